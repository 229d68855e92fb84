#include "ligature/ops/quantize.h"

#include "ligature/kernels/small_buffers.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Quantize);

QuantizeImpl::QuantizeImpl(Options options_) : Operation("Quantize"), options(options_) {}

void QuantizeImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Quantize(forward=" << std::boolalpha << options.forward
         << ", backward=" << options.backward << ")";
}

std::optional<InferResult> QuantizeImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  LIGATURE_CHECK(!args.input.sizes.empty(), "[", label(),
                 "] input must have at least one dimension, got []");
  return InferResult{args.input, {}};
}

std::vector<QuantizerRole> QuantizeImpl::forward_quantizer_roles() const {
  if (!options.forward) return {};
  return {{"quantize", "input", label()}};
}

std::vector<QuantizerRole> QuantizeImpl::backward_quantizer_roles() const {
  if (!options.backward) return {};
  return {{"quantize", "grad_output", label()}};
}

OpForwardResult QuantizeImpl::op_forward_compute(const Value& input, const OpArgs& args) {
  const Quantizer* quantizer =
      args.quantization != nullptr ? args.quantization->forward_quantizer(0) : nullptr;
  if (quantizer == nullptr) return {input, {}};
  if (args.calibrating) {
    quantizer->calibrate(prepare(input));
    return {input, {}};
  }
  const Usage usage = args.next_op_input_quantizer != nullptr ? args.next_op_input_usage
                                                              : input_usage(args.requires_grad);
  const OwnBuffers own;  // the caller may be given it
  return {quantize_to(input, {quantizer, usage}, input.dtype()), {}};
}

void QuantizeImpl::op_forward_save_ctx(OperationContext& ctx, const Value&, ToSave&,
                                       const OpArgs& args) {
  ctx.state.as<QuantizeState>().calibrating = args.calibrating;
}

OpBackwardResult QuantizeImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  const Quantizer* quantizer =
      ctx.quantization != nullptr ? ctx.quantization->backward_quantizer(0) : nullptr;
  if (quantizer == nullptr) return {grad_output, {}};
  if (ctx.state.as<QuantizeState>().calibrating) {
    quantizer->calibrate(prepare(grad_output));
    return {grad_output, {}};
  }
  const Target next = ctx.grad_input_target();
  const Usage usage = next ? next.usage : Usage{true, true};
  const OwnBuffers own;
  return {quantize_to(grad_output, {quantizer, usage}, grad_output.dtype()), {}};
}

std::string QuantizeImpl::complete_context(OperationContext& ctx, const OpArgs&) const {
  if (!ctx.state.get_or("quantize_backward", true)) ctx.quantization = nullptr;
  return {};
}

}  // namespace ligature
