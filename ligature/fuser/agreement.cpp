#include "ligature/fuser/agreement.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <map>

#include "ligature/distributed/collectives.h"
#include "ligature/distributed/handshake.h"
#include "ligature/fuser/execute.h"

namespace ligature {
namespace {

bool moves_tokens(const std::optional<Communication>& c) {
  return c && (c->gathers || c->scatters);
}

distributed::PlanText text_of(const Plan& plan, const Call& call, ArgsList args) {
  distributed::PlanText text;
  text.push_back("the operations " + describe(plan.basic_ops));
  const ValueMeta input = ValueMeta::of(call.input);
  text.push_back("an input of " + sizes_string(input.sizes) + " in " + dtype_name(input.dtype) +
                 " on " + c10::DeviceTypeName(input.device.type(), true));
  text.push_back("the recipe " +
                 (plan.options.recipe != nullptr ? plan.options.recipe->key() : "none") +
                 (plan.options.calibrating ? ", calibrating" : ""));
  for (size_t i = 0; i < plan.basic_ops.size(); ++i) {
    const BasicOperation& op = *plan.basic_ops[i];
    std::string line = "operation " + std::to_string(i) + ", " + op.name();
    for (const auto& [name, value] : op.options_state()) {
      line += ", " + name + "=" + to_string(value);
    }
    for (size_t j = 0; j < args[i].params.size(); ++j) {
      const Tensor& param = args[i].params[j];
      if (!param.defined()) continue;
      line += ", a parameter of " + sizes_string(param.sizes()) + " in " +
              dtype_name(param.scalar_type()) +
              (args[i].requires_grad.param(j) ? " that needs a gradient" : " that needs none");
    }
    const GradFlags& needs = args[i].requires_grad;
    line += std::string(", ") + (needs.op ? "in backward" : "not in backward");
    line += needs.input ? ", its input needs a gradient" : ", its input needs none";
    line += args[i].training ? ", training" : ", in evaluation";
    text.push_back(std::move(line));
  }
  return text;
}

}  // namespace

std::vector<PartialGradients> find_partial_gradients(const std::vector<BasicOpPtr>& ops) {
  std::vector<std::optional<Communication>> all;
  for (const auto& op : ops) all.push_back(op->communication());
  std::vector<PartialGradients> out;
  for (size_t i = 0; i < ops.size(); ++i) {
    if (moves_tokens(all[i]) || ops[i]->parameter_names().empty()) continue;
    const auto before = std::find_if(all.rbegin() + static_cast<std::ptrdiff_t>(ops.size() - i),
                                     all.rend(), moves_tokens);
    if (before != all.rend()) {
      if ((*before)->scatters) out.push_back({i, (*before)->group});
      continue;
    }
    const auto after =
        std::find_if(all.begin() + static_cast<std::ptrdiff_t>(i), all.end(), moves_tokens);
    if (after != all.end() && (*after)->gathers) out.push_back({i, (*after)->group});
  }
  return out;
}

std::vector<std::optional<std::string>> find_groups(const std::vector<BasicOpPtr>& ops) {
  std::vector<std::optional<std::string>> out;
  for (const auto& op : ops) {
    const auto own = op->communication();
    if (!own || own->ranks == 1) continue;
    if (std::find(out.begin(), out.end(), own->group) == out.end()) out.push_back(own->group);
  }
  return out;
}

void agree_on(const Plan& plan, const Call& call, ArgsList args) {
  if (call.dry || call.input.device().is_meta()) return;
  const bool first = !plan.agreed.yes.load(std::memory_order_acquire);
  for (const auto& name : plan.groups) {
    const distributed::GroupPtr group = distributed::find_group(name);
    const bool always = group->options().check == distributed::Check::Always;
    if (first) distributed::agree(group, text_of(plan, call, args));
    if (always) distributed::agree_always(group, text_of(plan, call, args));
  }
  plan.agreed.yes.store(true, std::memory_order_release);
}

void reduce_partial_gradients(const Plan& plan, const std::vector<size_t>& param_offsets,
                              std::vector<Tensor>& results) {
  // One flat tensor per group and dtype.
  std::map<std::pair<std::string, at::ScalarType>, std::vector<Tensor*>> flat;
  std::map<std::string, distributed::GroupPtr> groups;
  for (const PartialGradients& partial : plan.partial_gradients) {
    const distributed::GroupPtr group = distributed::find_group(partial.group);
    if (group->alone() || !group->options().reduce_partial_grads) continue;
    groups[group->name()] = group;
    for (size_t k = param_offsets[partial.op]; k < param_offsets[partial.op + 1]; ++k) {
      Tensor& grad = results[1 + k];
      if (grad.defined()) flat[{group->name(), grad.scalar_type()}].push_back(&grad);
    }
  }
  for (auto& [key, parts] : flat) {
    std::vector<Tensor> pieces;
    for (const Tensor* grad : parts) pieces.push_back(grad->reshape({-1}));
    const Tensor sum = distributed::all_reduce(groups[key.first], at::cat(pieces),
                                               {"partial gradients", ""}, /*own=*/true)
                           .wait_one();
    int64_t begin = 0;
    for (Tensor* grad : parts) {
      *grad = sum.narrow(0, begin, grad->numel()).view(grad->sizes()).clone();
      begin += grad->numel();
    }
  }
}

}  // namespace ligature
