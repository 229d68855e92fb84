#include "ligature/ops/scaled_activation.h"

#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {
namespace {

Tensor scales_of(const ScaledActivationOperation& op, const Tensor& given) {
  return op.has_unit_scale() ? Tensor() : contiguous(given);
}

}  // namespace

LIGATURE_REGISTER_OPERATION(ScaledSwiGLU);
LIGATURE_REGISTER_OPERATION(ScaledSiTUGLU);
LIGATURE_REGISTER_OPERATION(ScaledClampedQGeGLU);
LIGATURE_REGISTER_OPERATION(ScaledSReLU);

void ScaledActivationOperation::pretty_print(std::ostream& stream) const {
  print_options(stream, *this);
}

std::optional<InferResult> ScaledActivationOperation::infer(const InferArgs& args) const {
  InferResult result{infer_activation(*this, spec(), args), {}};
  if (!args.extra_inputs[0]) return result;
  const ValueMeta& scales = *args.extra_inputs[0];
  const at::IntArrayRef sizes = args.input.sizes;
  const bool one = has_unit_scale() && scales.numel() == 1;
  LIGATURE_CHECK(one || at::IntArrayRef(scales.sizes) == sizes.slice(0, sizes.size() - 1), "[",
                 label(), "] scales must have the input's shape without its last dimension, ",
                 sizes_string(sizes.slice(0, sizes.size() - 1)), ", got ",
                 sizes_string(scales.sizes));
  LIGATURE_CHECK_TYPE(at::isFloatingType(scales.dtype), "[", label(),
                      "] scales must have a floating dtype, got ", to_string(scales));
  return result;
}

FuserForwardResult ScaledActivationOperation::fuser_forward_compute(const Value& input,
                                                                    ArgsList args) {
  const Tensor x = prepare(input, ActivationOperation::compute_dtype(input, args[0]));
  FuserForwardResult out;
  out.output = activation_forward_to(x, spec(), scales_of(*this, args[0].extra_inputs[0]),
                                     args[0].output_target());
  out.extra_outputs.resize(1);
  out.to_save.resize(1);
  if (caches_quantized_input()) out.to_save[0] = quantized_input(*this, input, args[0]);
  return out;
}

void ScaledActivationOperation::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                                       FuserForwardResult& result, ArgsList args) {
  const auto& to_save = result.to_save[0].tensors;
  ctxs[0]->save_for_backward({to_save.empty() ? input : to_save[0], args[0].extra_inputs[0]});
  save_spec(*ctxs[0], spec());
  if (args[0].autocast_dtype) {
    save_dtype(*ctxs[0], ActivationOperation::compute_dtype(input, args[0]));
  }
}

FuserBackwardResult ScaledActivationOperation::fuser_backward(CtxList ctxs,
                                                              const Value& grad_output, GradList) {
  OperationContext& ctx = *ctxs[0];
  ActivationGrads grads = activation_backward(
      ctx, grad_output, spec(), scales_of(*this, ctx.saved_tensor(1)),
      !has_unit_scale() && ctx.requires_grad.extra_input(0), false, ctx.grad_input_target());
  FuserBackwardResult out;
  if (ctx.requires_grad.input) out.grad_input = std::move(grads.dx);
  out.grad_params.resize(1);
  out.grad_extra_inputs = {{std::move(grads.dscales)}};
  return out;
}

std::string ScaledActivationOperation::complete_context(OperationContext& ctx,
                                                        const OpArgs& args) const {
  const GradFlags& needs = args.requires_grad;
  if (!needs.input && !needs.extra_input(0)) return {};
  const std::string saved = "save_for_backward(input, scales)";
  if (ctx.num_saved() != 2) return expected(saved, count_of(ctx));
  const Value x = ctx.saved_value(0);
  Value scales = ctx.saved_value(1);
  if (!x.defined()) return expected(saved, "None as input");
  if (!scales.defined()) scales = args.extra_inputs[0];
  if (!scales.defined()) return expected(saved, "None as scales");
  ctx.save_for_backward({x, std::move(scales)});
  save_spec(ctx, saved_spec(ctx, spec()));
  return {};
}

}  // namespace ligature
