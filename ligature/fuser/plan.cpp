#include "ligature/fuser/plan.h"

#include <algorithm>
#include <string_view>
#include <typeinfo>

namespace ligature {

StepKind::StepKind(const FusibleOperation& op)
    : guest(op.is_guest()),
      ours(!guest && std::string_view(typeid(op).name()).starts_with("N8ligature")) {}

namespace {

OpList apply_fusion(const Fusion& fusion, const OpList& ops, const PlanOptions& options,
                    std::vector<Consideration>& considered) {
  if (const auto* rule = std::get_if<FusionRule>(&fusion)) {
    return apply_rule(*rule, ops, options, &considered);
  }
  const auto& function = std::get<FusionFunction>(fusion);
  OpList result = function.apply(ops, options);
  size_t position = 0;
  bool changed = false;
  for (const auto& op : result) {
    if (op == nullptr) break;  // reported by the caller
    const size_t count = op->basic_ops().size();
    if (std::find(ops.begin(), ops.end(), op) == ops.end()) {
      considered.push_back({function.name, position, "", count});
      changed = true;
    }
    position += count;
  }
  if (!changed) considered.push_back({function.name, 0, "it left the operations as they are"});
  return result;
}

std::vector<BasicOpPtr> expand(const OpList& ops) {
  std::vector<BasicOpPtr> out;
  for (const auto& op : ops) {
    for (auto& basic : op->basic_ops()) out.push_back(std::move(basic));
  }
  return out;
}

bool same_ops(const std::vector<BasicOpPtr>& a, const std::vector<BasicOpPtr>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].get() != b[i].get()) return false;
  }
  return true;
}

OpList run_pass(Pass pass, const OpList& ops, Plan& plan, bool fuse) {
  plan.reports.push_back({pass, {}});
  if (!fuse) return ops;
  auto& considered = plan.reports.back().considered;
  const std::vector<BasicOpPtr> wanted = expand(ops);
  OpList result = ops;
  for (const auto& fusion : registered_fusions(pass)) {
    result = apply_fusion(*fusion, result, plan.options, considered);
    for (const auto& op : result) {
      LIGATURE_CHECK_TYPE(op != nullptr, "fusion '", fusion_name(*fusion),
                          "' returned no operation");
    }
    const std::vector<BasicOpPtr> got = expand(result);
    LIGATURE_CHECK_STATE(same_ops(wanted, got), "the ", pass_name(pass), " fusion '",
                         fusion_name(*fusion),
                         "' must return the same basic operations in order: ", "given ",
                         describe(wanted), ", returned ", describe(got));
  }
  return result;
}

std::vector<PlanStep> to_steps(const OpList& ops, size_t first) {
  std::vector<PlanStep> steps;
  for (const auto& op : ops) {
    const size_t count = op->basic_ops().size();
    steps.push_back({op, first, count, StepKind(*op)});
    first += count;
  }
  return steps;
}

void check_channels(const std::vector<PlanStep>& steps, const Plan& plan) {
  for (const PlanStep& step : steps) {
    if (step.op->handles_internal_channels()) continue;
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      for (const Wiring::Input& input : plan.wiring->inputs[i]) {
        const bool inside = input.producer != Wiring::kNone && input.producer >= step.first;
        LIGATURE_CHECK_STATE(
            !inside, "[", step.op->label(), "] covers both ends of a channel (from ",
            plan.basic_ops[inside ? input.producer : i]->name(), " to ", plan.basic_ops[i]->name(),
            "), but does not say that it runs it (handles_internal_channels)");
      }
    }
  }
}

}  // namespace

std::shared_ptr<const Plan> make_plan(std::vector<BasicOpPtr> ops,
                                      std::shared_ptr<const Wiring> wiring, PlanOptions options,
                                      size_t first_backward_op, bool fuse) {
  auto plan = std::make_shared<Plan>();
  plan->basic_ops = std::move(ops);
  plan->wiring = std::move(wiring);
  plan->options = std::move(options);
  plan->first_backward_op = first_backward_op;
  plan->fuse = fuse;
  for (const auto& op : plan->basic_ops) {
    plan->quantizations.push_back(op->quantization(plan->options.recipe, plan->options.device));
    const OpQuantizationPtr& own = plan->quantizations.back();
    const bool eager = own != nullptr && !plan->options.calibrating;
    // What an operation says of itself comes before what the recipe gives it.
    const auto choose = [&](QuantizerPtr said, auto OpQuantization::* given) -> QuantizerPtr {
      return said == nullptr && eager && !((*own).*given).empty() ? ((*own).*given)[0] : said;
    };
    plan->input_quantizers.push_back(choose(op->get_input_quantizer(), &OpQuantization::forward));
    plan->grad_output_quantizers.push_back(
        choose(op->get_grad_output_quantizer(), &OpQuantization::backward));
  }

  const OpList basic(plan->basic_ops.begin(), plan->basic_ops.end());
  const OpList joint = run_pass(Pass::Joint, basic, *plan, fuse);
  plan->forward = to_steps(run_pass(Pass::Forward, joint, *plan, fuse), 0);

  // Only what runs in backward is fused there; the rest keeps its place in the list.
  OpList prefix;
  OpList suffix;
  size_t first = 0;
  for (const auto& op : joint) {
    const size_t count = op->basic_ops().size();
    (first + count <= first_backward_op ? prefix : suffix).push_back(op);
    first += count;
  }
  plan->backward = to_steps(prefix, 0);
  size_t prefix_count = 0;
  for (const PlanStep& step : plan->backward) prefix_count += step.count;
  if (suffix.empty()) {
    plan->reports.push_back({Pass::Backward, {}});
  } else {
    for (auto& step : to_steps(run_pass(Pass::Backward, suffix, *plan, fuse), prefix_count)) {
      plan->backward.push_back(std::move(step));
    }
  }
  check_channels(plan->forward, *plan);
  check_channels(plan->backward, *plan);
  for (const auto* steps : {&plan->forward, &plan->backward}) {
    for (const PlanStep& step : *steps) plan->has_guests |= step.kind.guest;
  }
  plan->has_extras = plan->wiring->has_extras();
  return plan;
}

}  // namespace ligature
