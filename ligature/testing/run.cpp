#include "ligature/testing/run.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/recipes/recipe.h"
#include "ligature/testing/compare.h"

namespace ligature::testing {

Gradients gradients(const Graph& graph, const Data& data, const Needs& wanted, bool keep_graph,
                    const Needs& outputs) {
  Gradients result;
  result.of_leaves.resize(graph.leaves.size());
  result.changed.resize(graph.outputs.size());
  std::vector<Tensor> ys, dys, leaves;
  std::vector<size_t> of_output, of_leaf;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    if (!has(outputs, k) || !graph.outputs[k].requires_grad()) continue;
    const Tensor& dy = data.grad_outputs[k];
    ys.push_back(graph.outputs[k]);
    // An expanded gradient keeps its strides; others are copied, since they may be written to.
    dys.push_back(dy.is_non_overlapping_and_dense() ? copy_of(dy) : dy);
    of_output.push_back(k);
  }
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    if (!has(wanted, i) || !graph.leaves[i].requires_grad()) continue;
    leaves.push_back(graph.leaves[i]);
    of_leaf.push_back(i);
  }
  if (ys.empty() || leaves.empty()) return result;
  const std::vector<Tensor> found =
      torch::autograd::grad(ys, leaves, dys, keep_graph, false, /*allow_unused=*/true);
  for (size_t n = 0; n < found.size(); ++n) result.of_leaves[of_leaf[n]] = found[n];
  for (size_t n = 0; n < dys.size(); ++n) {
    result.changed[of_output[n]] = !same_bits(dys[n], data.grad_outputs[of_output[n]]);
  }
  return result;
}

namespace {

std::vector<PlanStep> to_steps(const OpList& ops, size_t first = 0) {
  std::vector<PlanStep> steps;
  for (const auto& op : ops) {
    steps.push_back({op, first, op->basic_ops().size(), StepKind(*op)});
    first += steps.back().count;
  }
  return steps;
}

/// What `op` has of the recipe, apart from its own state. Nobody updates a delayed scale, so that
/// every run has the same.
OpQuantizationPtr fixed_quantization(const BasicOperation& op, const PlanOptions& options) {
  if (options.recipe == nullptr) return nullptr;
  const auto make = [&](const std::vector<QuantizerRole>& roles) {
    std::vector<std::shared_ptr<Quantizer>> out;
    for (const QuantizerRole& role : roles) {
      out.push_back(options.recipe->make_quantizer(role, options.device));
      if (out.back() != nullptr && out.back()->delayed != nullptr) {
        out.back()->delayed->recipe = nullptr;
      }
    }
    return out;
  };
  auto made = std::make_shared<OpQuantization>();
  made->recipe = options.recipe;
  made->forward = make(op.forward_quantizer_roles());
  made->backward = make(op.backward_quantizer_roles());
  made->weights = std::make_shared<WeightCaches>(made->forward.size());  // one of each at most
  return made->forward.empty() && made->backward.empty() ? nullptr : made;
}

}  // namespace

Plans::Plans(const Subject& subject, PlanOptions options)
    : subject_(subject),
      options_(std::move(options)),
      wiring_(std::make_shared<const Wiring>(wire(subject.ops))) {}

Plans::Plans(const Subject& subject, PlanOptions options, const Fusion& fusion, Pass pass)
    : Plans(subject, std::move(options)) {
  fusion_ = &fusion;
  pass_ = pass;
}

OpList Plans::fuse(const OpList& ops, const PlanOptions& options) {
  OpList result;
  reason_ = "it left the operations as they are";
  if (const auto* rule = std::get_if<FusionRule>(fusion_)) {
    std::vector<Consideration> considered;
    result = apply_rule(*rule, ops, options, &considered);
    for (const Consideration& c : considered) {
      if (!c.reason.empty()) reason_ = c.reason;
    }
    if (considered.empty()) reason_ = "wanted " + rule->pattern[0].what + ", found none";
  } else {
    result = std::get<FusionFunction>(*fusion_).apply(ops, options);
  }
  std::vector<BasicOpPtr> wanted, got;
  for (const auto& op : ops) {
    for (auto& basic : op->basic_ops()) wanted.push_back(std::move(basic));
  }
  for (const auto& op : result) {
    LIGATURE_CHECK_TYPE(op != nullptr, "it returned no operation");
    for (auto& basic : op->basic_ops()) got.push_back(std::move(basic));
  }
  LIGATURE_CHECK_STATE(wanted == got, "it must return the same basic operations in order: given ",
                       describe(wanted), ", returned ", describe(got));
  return result;
}

std::shared_ptr<const Plan> Plans::get(size_t first_backward_op) {
  const auto known = plans_.find(first_backward_op);
  if (known != plans_.end()) return known->second;
  auto plan = std::make_shared<Plan>();
  plan->basic_ops = subject_.ops;
  plan->wiring = wiring_;
  plan->first_backward_op = first_backward_op;
  plan->options = options_;
  plan->options.requires_grad = first_backward_op < subject_.ops.size();
  for (const auto& op : subject_.ops) {
    add_quantizers(*plan, *op, fixed_quantization(*op, plan->options));
  }
  const OpList basic(subject_.ops.begin(), subject_.ops.end());
  plan->forward = plan->backward = to_steps(basic);
  bool fires = fusion_ == nullptr;
  if (fusion_ != nullptr && pass_ != Pass::Backward) {
    const OpList fused = fuse(basic, plan->options);
    fires = fused != basic;
    plan->forward = to_steps(fused);
    if (pass_ == Pass::Joint) plan->backward = plan->forward;
  } else if (fusion_ != nullptr && first_backward_op < basic.size()) {
    const OpList suffix(basic.begin() + first_backward_op, basic.end());
    const OpList fused = fuse(suffix, plan->options);
    fires = fused != suffix;
    plan->backward.resize(first_backward_op);
    for (auto& step : to_steps(fused, first_backward_op)) plan->backward.push_back(std::move(step));
  }
  finish_plan(*plan);
  if (!fires) plan = nullptr;
  plans_.emplace(first_backward_op, plan);
  return plan;
}

Prepared prepare_call(const Subject& subject, const Wiring& wiring, const Data& data,
                      const Needs& needs) {
  Prepared out;
  Call& call = out.call;
  call.input = copy_of(data.input).set_requires_grad(has(needs, 0));
  call.param_offsets.push_back(0);
  size_t leaf = 1;
  for (const auto& params : subject.params) {
    for (const Tensor& param : params) {
      if (at::isFloatingType(param.scalar_type())) param.set_requires_grad(has(needs, leaf));
      call.params.push_back(param);
      ++leaf;
    }
    call.param_offsets.push_back(call.params.size());
  }
  const size_t first_extra = leaf;
  for (const Tensor& extra : data.extra_inputs) {
    Tensor copy = copy_of(extra);
    if (at::isFloatingType(extra.scalar_type())) copy.set_requires_grad(has(needs, leaf));
    call.extra_inputs.push_back(std::move(copy));
    ++leaf;
  }
  call.training = subject.training;
  call.keep_alive = subject.keep_alive;

  std::vector<Tensor>& leaves = out.graph.leaves;
  leaves.push_back(call.input.tensor());
  leaves.insert(leaves.end(), call.params.begin(), call.params.end());
  leaves.insert(leaves.end(), call.extra_inputs.begin(), call.extra_inputs.end());
  out.graph.given = leaves;
  for (size_t i = 0; i < subject.ops.size(); ++i) {
    for (size_t j = 0; j < wiring.inputs[i].size(); ++j) {
      if (!subject.ops[i]->writes_extra_input(j)) continue;
      // A leaf cannot be overwritten.
      const size_t k = wiring.inputs[i][j].caller;
      call.extra_inputs[k] = call.extra_inputs[k].clone();
      out.graph.given[first_extra + k] = call.extra_inputs[k];
    }
  }
  return out;
}

Graph run_plan(Plans& plans, const Subject& subject, const Data& data, const Needs& needs,
               uint64_t seed) {
  Prepared prepared = prepare_call(subject, plans.wiring(), data, needs);
  const GradPlan grads = plan_gradients(prepared.call, plans.wiring(), subject.ops.size());
  auto plan = plans.get(grads.first_backward_op);
  LIGATURE_CHECK_STATE(plan != nullptr, "the fusion does not fire: ", plans.reason());
  seed_device(data.input.device(), seed);
  prepared.call.autocast_dtype = autocast_dtype(prepared.call.input.device());
  prepared.graph.outputs = execute(plan, std::move(prepared.call), grads);
  return std::move(prepared.graph);
}

namespace {

template <class F>
void with_generator(at::Device device, const F& function) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  function(generator);
}

}  // namespace

void seed_device(at::Device device, uint64_t seed) {
  with_generator(device, [&](at::Generator& g) { g.set_current_seed(seed); });
}

KeepRandomState::KeepRandomState(at::Device device) {
  const auto keep = [&](at::Device where) {
    with_generator(where, [&](at::Generator& g) { states_.emplace_back(where, g.get_state()); });
  };
  keep(at::kCPU);
  if (device.type() != at::kCPU) keep(device);
}

KeepRandomState::~KeepRandomState() {
  for (const auto& [device, state] : states_) {
    with_generator(device, [&](at::Generator& g) { g.set_state(state); });
  }
}

}  // namespace ligature::testing
