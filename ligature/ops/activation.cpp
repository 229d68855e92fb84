#include "ligature/ops/activation.h"

#include <cmath>
#include <string_view>

#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

#define LIGATURE_ACTIVATION(Name, ...) LIGATURE_REGISTER_OPERATION(Name);
LIGATURE_ACTIVATIONS(LIGATURE_ACTIVATION, LIGATURE_ACTIVATION, LIGATURE_ACTIVATION)
#undef LIGATURE_ACTIVATION

void check_finite(const char* op, const char* option, double value) {
  LIGATURE_CHECK(std::isfinite(static_cast<float>(value)), "[", op, "] ", option, " must be finite",
                 std::isfinite(value) ? " in float32" : "", ", got ", value);
}

namespace {

// The options of a spec's kind: the fields of its operation's options that a spec has too.
template <class F>
void each_option(kernels::ActivationSpec& spec, F&& f) {
  const auto of = [&](auto options) {
    options.fields([&](std::string_view field, auto&) {
      spec.options([&](const char* name, auto& value) {
        if (field == name) f(name, value);
      });
    });
  };
  switch (spec.kind) {
#define LIGATURE_ACTIVATION(Name, Options, ...) \
  case kernels::ActivationKind::Name:           \
    return of(Options());
    LIGATURE_ACTIVATIONS(LIGATURE_ACTIVATION, LIGATURE_ACTIVATION, LIGATURE_ACTIVATION)
#undef LIGATURE_ACTIVATION
  }
}

/// Saved from forward to backward.
struct ActivationState {
  std::optional<kernels::ActivationSpec> spec;
  std::optional<at::ScalarType> dtype;

  template <class F>
  void fields(F&& f) {
    if (spec) each_option(*spec, f);
    f("dtype", dtype);
  }
};

}  // namespace

void save_dtype(OperationContext& ctx, at::ScalarType dtype) {
  ctx.state.as<ActivationState>().dtype = dtype;
}

std::optional<at::ScalarType> saved_dtype(const OperationContext& ctx) {
  return ctx.state.as<ActivationState>().dtype;
}

void save_spec(OperationContext& ctx, const kernels::ActivationSpec& spec) {
  ctx.state.as<ActivationState>().spec = spec;
}

kernels::ActivationSpec saved_spec(const OperationContext& ctx, kernels::ActivationSpec spec) {
  const ActivationState state = ctx.state.as<ActivationState>();
  if (state.spec) return *state.spec;
  each_option(spec, [&](const char* name, auto& value) { value = ctx.state.get_or(name, value); });
  return spec;
}

ValueMeta infer_activation(const BasicOperation& op, const kernels::ActivationSpec& spec,
                           const InferArgs& args) {
  check_floating(op, args.input);
  ValueMeta output = args.input;
  const auto& sizes = args.input.sizes;
  LIGATURE_CHECK(!sizes.empty(), "[", op.label(),
                 "] input must have at least one dimension, got []");
  output.dtype = under_autocast(args.input.dtype, args.autocast_dtype);
  if (!kernels::is_gated(spec.kind)) return output;
  const int64_t n = spec.glu_interleave_size;
  LIGATURE_CHECK(sizes.back() % 2 == 0, "[", op.label(),
                 "] input's last dimension must be even, got ", sizes_string(sizes));
  LIGATURE_CHECK(n == 0 || sizes.back() % (2 * n) == 0, "[", op.label(),
                 "] input's last dimension must be divisible by 2*glu_interleave_size=", 2 * n,
                 ", got ", sizes_string(sizes));
  output.sizes.back() /= 2;
  return output;
}

void print_options(std::ostream& stream, const BasicOperation& op) {
  stream << "ligature::" << op.name() << "(";
  bool first = true;
  for (const auto& [name, value] : op.options_state()) {
    stream << (first ? "" : ", ") << name << "=" << to_string(value);
    first = false;
  }
  stream << ")";
}

void ActivationOperation::pretty_print(std::ostream& stream) const { print_options(stream, *this); }

std::optional<InferResult> ActivationOperation::infer(const InferArgs& args) const {
  return InferResult{infer_activation(*this, spec(), args), {}};
}

Value activation_forward_to(const Tensor& x, const kernels::ActivationSpec& spec,
                            const Tensor& scales, const Target& target) {
  const Target to = target.from(x.scalar_type());
  if (!to) return kernels::activation_forward(x, spec, scales);
  at::DimVector sizes(x.sizes());
  if (kernels::is_gated(spec.kind)) sizes.back() /= 2;
  return to.quantizer->assemble(
      kernels::activation_forward_quantize(x, spec, scales, to.args(x.device())), sizes,
      x.scalar_type());
}

ActivationGrads activation_backward_to(const Tensor& dy, const Tensor& x,
                                       const kernels::ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, const Target& target,
                                       bool over_x) {
  const Target to = target.from(x.scalar_type());
  if (!to) {
    auto grads =
        kernels::activation_backward(dy, x, spec, scales, need_dscales, need_dbias, over_x);
    return {std::move(grads.dx), std::move(grads.dscales), std::move(grads.dbias)};
  }
  auto grads = kernels::activation_backward_quantize(dy, x, spec, scales, need_dscales, need_dbias,
                                                     to.args(x.device()));
  return {to.quantizer->assemble(std::move(grads.dx), x.sizes(), x.scalar_type()),
          std::move(grads.dscales), std::move(grads.dbias)};
}

OpForwardResult ActivationOperation::op_forward_compute(const Value& input, const OpArgs& args) {
  const Tensor x = prepare(input, compute_dtype(input, args));
  return {activation_forward_to(x, spec(), {}, args.output_target()), to_save(input, args)};
}

ToSave quantized_input(const BasicOperation& op, const Value& x, const OpArgs& args) {
  if (!args.requires_grad.op || x.is_quantized()) return {};
  static const auto quantizer = std::make_shared<Quantizer>(Format{});  // E4M3, current scaling
  LIGATURE_CHECK_TYPE(x.dtype() != at::kDouble, "[", op.label(),
                      "] cache_quantized_input takes float32, bfloat16 or float16, got float64");
  ToSave to_save;
  to_save.tensors.emplace_back(quantizer->quantize(prepare(x), {true, false}));
  return to_save;
}

void ActivationOperation::op_forward_save_ctx(OperationContext& ctx, const Value& input,
                                              ToSave& to_save, const OpArgs& args) {
  ctx.save_for_backward({to_save.tensors.empty() ? input : to_save.tensors[0]});
  save_spec(ctx, spec());
  if (args.autocast_dtype) save_dtype(ctx, compute_dtype(input, args));
}

ActivationGrads ActivationOperation::backward(OperationContext& ctx, const Value& grad_output,
                                              bool need_dbias, const Target& target) const {
  return activation_backward(ctx, grad_output, spec(), {}, false, need_dbias, target);
}

ActivationGrads activation_backward(OperationContext& ctx, const Value& grad_output,
                                    const kernels::ActivationSpec& spec, const Tensor& scales,
                                    bool need_dscales, bool need_dbias, const Target& target) {
  ReleasedValue input = ctx.release_saved(0);
  const at::ScalarType input_dtype = input.value.dtype();
  const at::ScalarType dtype = saved_dtype(ctx).value_or(input_dtype);
  const bool same = dtype == input_dtype;
  const Tensor x = prepare(input.value, dtype);
  const bool copied = input.value.is_quantized() || !x.is_same(input.value.tensor());
  input.value = {};
  ActivationGrads grads = activation_backward_to(
      prepare(grad_output, dtype), x, saved_spec(ctx, spec), scales, need_dscales, need_dbias,
      same ? target : Target(), copied || input.may_overwrite);
  if (!same) grads.dx = cast(grads.dx.tensor(), input_dtype);
  return grads;
}

OpBackwardResult ActivationOperation::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (!ctx.requires_grad.input) return {};
  return {backward(ctx, grad_output, false, ctx.grad_input_target()).dx, {}};
}

std::string ActivationOperation::complete_context(OperationContext& ctx, const OpArgs& args) const {
  if (!args.requires_grad.input) return {};
  const std::string saved = "save_for_backward(input)";
  if (ctx.num_saved() == 0) return expected(saved, count_of(ctx));
  if (!ctx.saved_value(0).defined()) return expected(saved, "None as input");
  save_spec(ctx, saved_spec(ctx, spec()));
  return {};
}

}  // namespace ligature
