#include "ligature/ops/l2_normalization.h"

#include <algorithm>
#include <cmath>

#include "ligature/kernels/norm.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(L2Normalization);

void L2NormalizationImpl::check_options(const Options& options) {
  LIGATURE_CHECK(options.eps >= 0 && std::isfinite(options.eps),
                 "[L2Normalization] eps must be zero or more, got ", options.eps);
}

L2NormalizationImpl::L2NormalizationImpl(Options options_)
    : Operation("L2Normalization"), options(options_) {
  check_options(options);
}

void L2NormalizationImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::L2Normalization(eps=" << options.eps << ")";
}

std::optional<InferResult> L2NormalizationImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  LIGATURE_CHECK(!args.input.sizes.empty(), "[", label(),
                 "] input must have at least one dimension, got []");
  return InferResult{args.input, {}};
}

OpForwardResult L2NormalizationImpl::op_forward_compute(const Value& input, const OpArgs&) {
  kernels::L2Forward result = kernels::l2_normalization_forward(prepare(input), options.eps);
  OpForwardResult out;
  out.output = std::move(result.y);
  out.to_save.tensors.emplace_back(std::move(result.rstd));
  return out;
}

void L2NormalizationImpl::op_forward_save_ctx(OperationContext& ctx, const Value& input,
                                              ToSave& to_save, const OpArgs&) {
  ctx.save_for_backward({input, to_save.tensors[0]});
}

OpBackwardResult L2NormalizationImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (!ctx.requires_grad.input) return {};
  const Tensor x = prepare(ctx.saved_value(0));
  const Tensor dy = prepare(grad_output, x.scalar_type());
  return {kernels::l2_normalization_backward(dy, x, ctx.saved_tensor(1)), {}};
}

std::string L2NormalizationImpl::complete_context(OperationContext& ctx, const OpArgs& args) const {
  if (!args.requires_grad.input) return {};
  const std::string saved = "save_for_backward(input, rsqrt_norm)";
  if (ctx.num_saved() != 2) return expected(saved, count_of(ctx));
  const Value x = ctx.saved_value(0);
  Value rstd = ctx.saved_value(1);
  if (!x.defined() || x.sizes().empty()) return expected(saved, "None as input");
  const int64_t row = std::max<int64_t>(x.sizes().back(), 1);
  const std::string wrong = as_statistic(rstd, x, row, "rsqrt_norm");
  if (!wrong.empty()) return expected(saved, wrong);
  ctx.save_for_backward({x, std::move(rstd)});
  return {};
}

}  // namespace ligature
