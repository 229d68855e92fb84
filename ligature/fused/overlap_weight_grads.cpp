#include "ligature/fused/overlap_weight_grads.h"

#include <algorithm>

#include "ligature/distributed/filler.h"
#include "ligature/fused/common.h"
#include "ligature/ops/collective.h"

namespace ligature {

OverlapWeightGrads::OverlapWeightGrads(const OpList& ops)
    : FusedOperation("OverlapWeightGrads", ops) {
  size_t first = 0;
  for (const OpPtr& op : ops) {
    const size_t count = op->basic_ops().size();
    steps_.push_back({op, first, count});
    first += count;
  }
  for (size_t i = 0; i < num_basic_ops(); ++i) {
    if (auto* linear = basic_ops()[i]->as<BasicLinearImpl>()) linears_.emplace_back(linear, i);
  }
}

bool OverlapWeightGrads::releases_saved() const {
  return std::all_of(steps_.begin(), steps_.end(),
                     [](const Step& step) { return step.op->releases_saved(); });
}

bool OverlapWeightGrads::overlaps() const {
  return std::all_of(linears_.begin(), linears_.end(), [](const auto& linear) {
    return !linear.first->is_parallel() || linear.first->group()->options().overlap;
  });
}

FuserBackwardResult OverlapWeightGrads::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                       GradList grad_extra_outputs) {
  FuserBackwardResult out = fused_backward_result(num_basic_ops());
  if (!overlaps()) {
    out.grad_input = run(ctxs, grad_output, grad_extra_outputs, out);
    return out;
  }
  distributed::Filler filler;
  const distributed::FillerScope scope(filler);
  for (const auto& [linear, i] : linears_) linear->start_gather_ahead(*ctxs[i]);
  out.grad_input = run(ctxs, grad_output, grad_extra_outputs, out);
  filler.finish();
  for (const auto& [linear, i] : linears_) {
    if (Tensor dw = filler.made_for(linear); dw.defined()) out.grad_params[i] = {std::move(dw)};
  }
  return out;
}

Value OverlapWeightGrads::run(CtxList ctxs, Value dy, GradList grad_extra_outputs,
                              FuserBackwardResult& out) const {
  for (size_t s = steps_.size(); s-- > 0 && dy.defined();) {
    const auto& [op, first, count] = steps_[s];
    const CtxList own = ctxs.slice(first, count);
    if (std::none_of(own.begin(), own.end(),
                     [](const OperationContext* ctx) { return ctx->requires_grad.op; })) {
      return {};
    }
    FuserBackwardResult made = op->fuser_backward(own, dy, grad_extra_outputs.slice(first, count));
    for (size_t k = 0; k < count; ++k) {
      out.grad_params[first + k] = std::move(made.grad_params[k]);
      out.grad_extra_inputs[first + k] = std::move(made.grad_extra_inputs[k]);
    }
    dy = std::move(made.grad_input);
  }
  return dy;
}

namespace {

/// Does its backward wait for other ranks while gradients of weights could be made?
bool waits(FusibleOperation& op) {
  for (const auto& basic : op.basic_ops()) {
    const auto* linear = basic->as<BasicLinearImpl>();
    if (linear != nullptr && linear->parallel() == TensorParallel::Column) return true;
  }
  return false;
}

bool has_linear(FusibleOperation& op) {
  for (const auto& basic : op.basic_ops()) {
    if (basic->as<BasicLinearImpl>() != nullptr) return true;
  }
  return false;
}

/// Its steps hand each other nothing but the gradient.
bool is_plain(FusibleOperation& op) {
  if (!op.is_builtin() || op.is_python_op()) return false;
  for (const auto& basic : op.basic_ops()) {
    for (size_t i = 0; i < basic->num_extra_inputs(); ++i) {
      if (!basic->extra_input_channel(i).empty()) return false;
    }
    for (size_t i = 0; i < basic->num_extra_outputs(); ++i) {
      if (!basic->extra_output_channel(i).empty()) return false;
    }
  }
  return true;
}

size_t take_run(at::ArrayRef<OpPtr> ops) {
  if (!waits(*ops.front())) return 0;
  size_t linears = 0;
  size_t end = 0;
  for (size_t i = 0; i < ops.size() && is_plain(*ops[i]); ++i) {
    if (!has_linear(*ops[i])) continue;
    ++linears;
    end = i + 1;
  }
  return linears > 1 ? end : 0;
}

}  // namespace

FusionRule overlap_weight_grads_rule() {
  FusionRule rule{
      "OverlapWeightGrads",
      {{"linears of which the first is spread over ranks by columns", take_run, false}},
      nullptr,
      [](const Match& match) -> OpPtr { return std::make_shared<OverlapWeightGrads>(match.ops); }};
  rule.needs_ranks = true;
  return rule;
}

}  // namespace ligature
