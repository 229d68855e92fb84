#include "ligature/fuser/plan.h"

#include <algorithm>

namespace ligature {

StepKind::StepKind(const FusibleOperation& op)
    : python(op.is_python_op()), ours(!python && op.is_builtin()) {}

namespace {

OpList apply_fusion(const FusionTurn& turn, const OpList& ops, const PlanOptions& options,
                    std::vector<Consideration>& considered) {
  if (const auto* rule = std::get_if<FusionRule>(turn.fusion.get())) {
    return apply_rule(*rule, ops, options, &considered, turn.only_in_te_ops);
  }
  const auto& function = std::get<FusionFunction>(*turn.fusion);
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
  for (const FusionTurn& turn : fusion_turns(pass)) {
    result = apply_fusion(turn, result, plan.options, considered);
    for (const auto& op : result) {
      LIGATURE_CHECK_TYPE(op != nullptr, "fusion '", fusion_name(*turn.fusion),
                          "' returned no operation");
    }
    const std::vector<BasicOpPtr> got = expand(result);
    LIGATURE_CHECK_STATE(same_ops(wanted, got), "the ", pass_name(pass), " fusion '",
                         fusion_name(*turn.fusion),
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
            "), but says that it does not run it (handles_internal_channels)");
      }
    }
  }
}

const PlanStep& step_of(const std::vector<PlanStep>& steps, size_t op) {
  const auto covers = [&](const PlanStep& step) { return op < step.first + step.count; };
  return *std::find_if(steps.begin(), steps.end(), covers);
}

}  // namespace

void finish_plan(Plan& plan) {
  check_channels(plan.forward, plan);
  check_channels(plan.backward, plan);
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const PlanStep& step : *steps) {
      plan.has_python_ops |= step.kind.python;
      plan.ours &= step.kind.ours;
    }
  }
  plan.has_extras = plan.wiring->has_extras();
  plan.groups = find_groups(plan.basic_ops);
  if (!plan.groups.empty()) plan.partial_gradients = find_partial_gradients(plan.basic_ops);
  for (const PlanStep& step : plan.forward) {
    if (!step.op->is_fused_op() || step.kind.ours) continue;
    plan.filled_by_user.resize(plan.basic_ops.size());
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      const PlanStep& reader = step_of(plan.backward, i);
      plan.filled_by_user[i] = reader.op != step.op && !reader.kind.python;
    }
  }
}

bool use_recipe(const Plan& plan, const RecipePtr& recipe, at::Device device) {
  for (size_t i = 0; i < plan.quantizations.size(); ++i) {
    const OpQuantizationPtr& own = plan.quantizations[i];
    if (own == nullptr || plan.basic_ops[i]->computes_with(*own, recipe)) continue;
    if (plan.basic_ops[i]->quantization(recipe, device) != own) return false;
    own->move_to(device);
  }
  return true;
}

void add_quantizers(Plan& plan, BasicOperation& op, OpQuantizationPtr own) {
  const bool eager = own != nullptr && !plan.options.calibrating && op.quantizes_input_whole();
  // What an operation says of itself comes before what the recipe gives it.
  const auto choose = [&](QuantizerPtr said, auto OpQuantization::* given) -> QuantizerPtr {
    return said == nullptr && eager && !((*own).*given).empty() ? ((*own).*given)[0] : said;
  };
  plan.input_quantizers.push_back(choose(op.get_input_quantizer(), &OpQuantization::forward));
  plan.grad_output_quantizers.push_back(
      choose(op.get_grad_output_quantizer(), &OpQuantization::backward));
  plan.quantizations.push_back(std::move(own));
}

namespace {

void offer_input_quantizer(const Plan& plan, const GradFlagList& flags, size_t i, OpArgs& args) {
  Usage usage = plan.basic_ops[i + 1]->input_usage(flags[i + 1]);
  if (plan.quantizations[i + 1] != nullptr) {
    const Recipe& recipe = *plan.quantizations[i + 1]->recipe;
    if (recipe.takes_high_precision(usage)) return;
    usage = recipe.quantized_usage(usage);
  }
  args.next_op_input_quantizer = plan.input_quantizers[i + 1].get();
  args.next_op_input_usage = usage;
}

}  // namespace

void give_quantizers(const Plan& plan, const GradFlagList& flags, size_t i, OpArgs& args,
                     OperationContext& ctx) {
  if (i > 0 && plan.grad_output_quantizers[i - 1] != nullptr) {
    args.prev_op_grad_output_quantizer = plan.grad_output_quantizers[i - 1].get();
    ctx.grad_input_quantizer = plan.grad_output_quantizers[i - 1];
    ctx.grad_input_usage = plan.basic_ops[i - 1]->grad_output_usage(flags[i - 1]);
  }
  if (i + 1 < plan.basic_ops.size() && plan.input_quantizers[i + 1] != nullptr) {
    offer_input_quantizer(plan, flags, i, args);
  }
  if (plan.quantizations[i] != nullptr) {
    args.quantization = plan.quantizations[i].get();
    ctx.quantization = plan.quantizations[i];
  }
}

std::shared_ptr<const Plan> make_plan(std::vector<BasicOpPtr> ops,
                                      std::shared_ptr<const Wiring> wiring, PlanOptions options,
                                      size_t first_backward_op, bool fuse) {
  auto plan = std::make_shared<Plan>();
  plan->basic_ops = std::move(ops);
  plan->wiring = std::move(wiring);
  plan->options = std::move(options);
  plan->registry = registry_version();
  plan->first_backward_op = first_backward_op;
  plan->fuse = fuse;
  for (const auto& op : plan->basic_ops) {
    add_quantizers(*plan, *op, op->find_quantization(plan->options.recipe, plan->options.device));
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
  plan->options.planner = nullptr;
  finish_plan(*plan);
  return plan;
}

}  // namespace ligature
