#include "ligature/fused/common.h"

#include "ligature/kernels/devices.h"
#include "ligature/prepare.h"
#include "ligature/readable.h"

namespace ligature {

FuserForwardResult fused_forward_result(Value output, size_t n) {
  FuserForwardResult result;
  result.output = std::move(output);
  result.extra_outputs.resize(n);
  result.to_save.resize(n);
  return result;
}

FuserBackwardResult fused_backward_result(size_t n) {
  FuserBackwardResult result;
  result.grad_params.resize(n);
  result.grad_extra_inputs.resize(n);
  return result;
}

void save_basic_op(BasicOperation& op, OperationContext& ctx, const Value& input, ToSave to_save,
                   const OpArgs& args) {
  if (!args.requires_grad.op) return;
  ctx.state = to_save.state;
  op.op_forward_save_ctx(ctx, input, to_save, args);
}

LinearFwdArgs linear_bias_args(const BasicLinearImpl& linear, const BiasImpl* bias,
                               const Value& input, const OpArgs& linear_args,
                               const OpArgs* bias_args, bool pieces) {
  LinearFwdArgs fwd = linear.forward_args(input, linear_args, pieces);
  if (bias != nullptr) fwd.bias = BiasImpl::bias_of(*bias_args, fwd.dtype);
  return fwd;
}

namespace {

bool is_plain_product(const LinearFwdArgs& fwd) {
  return !fwd.x.is_quantized() && !fwd.w.is_quantized() && !fwd.add.defined() && fwd.alpha == 1.0;
}

/// The input's gradient is of the compute dtype, and nothing is done to it.
bool is_plain_product(const LinearBwdArgs& args) {
  return args.input_requires_grad && !args.is_quantized() && !args.add.defined() &&
         args.alpha == 1.0 && args.input_dtype == args.compute_dtype;
}

}  // namespace

bool activation_in_gemm_pays(const LinearFwdArgs& fwd, const kernels::ActivationSpec& spec,
                             const Target& target, bool need_z) {
  if (fwd.arriving != nullptr) return false;
  if (target) {
    return kernels::quantized_gated_pays(fwd.x, fwd.w, fwd.product(), spec,
                                         target.quantizer->format_tag());
  }
  return is_plain_product(fwd) && kernels::pays(kernels::activated_forward(
                                      fwd.x.tensor(), fwd.w.tensor(), fwd.bias, spec, need_z));
}

LinearActivation activation_in_gemm(const LinearFwdArgs& fwd, const kernels::ActivationSpec& spec,
                                    const Target& target, bool need_z) {
  if (!target) {
    auto both = kernels::gemm_with_epilogue(
        kernels::activated_forward(fwd.x.tensor(), fwd.w.tensor(), fwd.bias, spec, need_z));
    return {std::move(both.z), std::move(both.y)};
  }
  auto both = kernels::quantized_linear_gated_forward(fwd.x, fwd.w, fwd.product(), spec,
                                                      target.args(fwd.x.device()), need_z);
  at::DimVector sizes(fwd.x.sizes());
  sizes.back() = fwd.w.sizes()[0] / 2;
  return {std::move(both.z), target.quantizer->assemble(std::move(both.a), sizes, fwd.dtype)};
}

bool activation_grad_in_gemm_pays(const LinearBwdArgs& args, const Value& z,
                                  const kernels::ActivationSpec& spec) {
  return is_plain_product(args) && !z.is_quantized() && z.dtype() == args.compute_dtype &&
         kernels::pays(kernels::activated_input_grad(args.dy.tensor(), args.w.tensor(), z.tensor(),
                                                     spec, false, false));
}

bool leaves_bias_grad(const OperationContext& linear, const OperationContext& bias,
                      const Value& grad_output) {
  return linear.requires_grad.param(0) && bias.requires_grad.param(0) &&
         linear.quantization == nullptr && !grad_output.is_quantized() &&
         linear.state.as<LinearState>().dtype.value_or(grad_output.dtype()) ==
             grad_output.dtype() &&
         kernels::has_epilogue(kernels::Epilogue::BiasGrad, nullptr, grad_output.dtype(),
                               grad_output.device());
}

Tensor linear_forward_add(LinearFwdArgs fwd, const AddExtraInputImpl& add, const Tensor& extra) {
  const bool in_place = add.options.in_place;
  const bool quantized = fwd.x.is_quantized() || fwd.w.is_quantized();
  const bool writable = !quantized && is_readable(extra) && extra.is_contiguous() &&
                        !extra.is_alias_of(fwd.x.tensor());
  if (extra.scalar_type() != fwd.dtype || (in_place && !writable)) {
    return add.forward(BasicLinearImpl::forward(fwd), extra);
  }
  fwd.add = contiguous(extra);
  fwd.add_in_place = in_place;
  Tensor y = BasicLinearImpl::forward(fwd);
  if (in_place) AddExtraInputImpl::mark_changed(extra);
  return y;
}

std::string why_not_parallel(at::ArrayRef<OpPtr> ops, bool column, bool row) {
  for (const OpPtr& op : ops) {
    const auto* linear = dynamic_cast<const BasicLinearImpl*>(op.get());
    if (linear == nullptr) continue;
    const TensorParallel mode = linear->parallel();
    if ((column && mode == TensorParallel::Column) || (row && mode == TensorParallel::Row)) {
      return "its linear is spread over " +
             std::to_string(linear->options.tensor_parallel.ranks()) + " ranks (" +
             *linear->options.tensor_parallel.mode + ")";
    }
  }
  return "";
}

void check_input_survives(const Value& input, const OpArgs& linear_args,
                          const AddExtraInputImpl& add, const Tensor& extra) {
  const bool overwritten = add.options.in_place && linear_args.requires_grad.param(0) &&
                           !input.is_quantized() && quantized_of(extra) == nullptr &&
                           input.tensor().is_alias_of(extra);
  LIGATURE_CHECK_STATE(!overwritten, "[", add.label(),
                       "] one of the variables needed for gradient computation has been modified "
                       "by an inplace operation: the extra input of in_place=true is the input of "
                       "the linear before it");
}

}  // namespace ligature
