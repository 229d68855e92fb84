#include "ligature/ops/norm.h"

#include <cmath>

#include "ligature/kernels/bias.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

void NormOperation::check_options(const Options& given) const {
  bool positive = !given.normalized_shape.empty();
  for (int64_t size : given.normalized_shape) positive = positive && size > 0;
  LIGATURE_CHECK(positive, "[", name(),
                 "] normalized_shape must be one or more positive sizes, got ",
                 sizes_string(given.normalized_shape));
  LIGATURE_CHECK(given.eps >= 0 && std::isfinite(given.eps), "[", name(),
                 "] eps must be zero or more, got ", given.eps);
  LIGATURE_CHECK(given.sm_margin >= 0, "[", name(), "] sm_margin must be zero or more, got ",
                 given.sm_margin);
}

NormOperation::NormOperation(std::string name, Options options_, bool has_bias)
    : BasicOperation(std::move(name)), options(std::move(options_)), has_bias_(has_bias) {
  check_options(options);
  add_parameter("weight", options.normalized_shape, options.tensor_options());
  if (has_bias_) add_parameter("bias", options.normalized_shape, options.tensor_options());
}

void NormOperation::initialize_parameter(const std::string& name, Tensor& parameter) {
  parameter.fill_(name == "weight" && !options.zero_centered_gamma ? 1.0 : 0.0);
}

void NormOperation::pretty_print(std::ostream& stream) const {
  stream << "ligature::" << name() << "(" << sizes_string(options.normalized_shape)
         << ", eps=" << options.eps;
  if (options.zero_centered_gamma) stream << ", zero_centered_gamma=true";
  stream << ")";
}

std::optional<InferResult> NormOperation::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const at::IntArrayRef wanted = options.normalized_shape;
  const at::IntArrayRef sizes = args.input.sizes;
  LIGATURE_CHECK(
      sizes.size() >= wanted.size() && sizes.slice(sizes.size() - wanted.size()) == wanted, "[",
      label(), "] input's trailing dimensions must be normalized_shape=", sizes_string(wanted),
      ", got ", sizes_string(sizes));
  for (size_t i = 0; i < args.params.size(); ++i) {
    const char* what = i == 0 ? "weight" : "bias";
    LIGATURE_CHECK(args.params[i].sizes() == wanted, "[", label(), "] ", what, " must be ",
                   sizes_string(wanted), ", got ", sizes_string(args.params[i].sizes()));
    check_parameter(*this, args.input, what, args.params[i]);
  }
  InferResult result{args.input, {}};
  result.output.dtype = under_autocast(args.input.dtype, args.autocast_dtype);
  return result;
}

NormOperation::Forward NormOperation::forward_to(const Tensor& x, at::ArrayRef<Tensor> params,
                                                 at::ScalarType out_dtype,
                                                 const Target& target) const {
  const Target to = target.from(x.scalar_type()).from(out_dtype);
  if (!to || options.normalized_shape.size() > 1) {
    kernels::NormForward plain = forward(x, params, out_dtype);
    return {std::move(plain.y), std::move(plain.mean), std::move(plain.rstd)};
  }
  kernels::NormQuantized made = forward_quantize(x, params, out_dtype, to.args(x.device()));
  return {to.quantizer->assemble(std::move(made.y), x.sizes(), out_dtype), std::move(made.mean),
          std::move(made.rstd)};
}

OpForwardResult NormOperation::op_forward_compute(const Value& input, const OpArgs& args) {
  Forward result =
      forward_to(prepare(input), args.params, output_dtype(input, args), args.output_target());
  OpForwardResult out;
  out.output = std::move(result.y);
  if (result.mean.defined()) out.to_save.tensors.emplace_back(std::move(result.mean));
  out.to_save.tensors.emplace_back(std::move(result.rstd));
  return out;
}

void NormOperation::save_state(OperationContext& ctx, const OpArgs& args) const {
  auto& state = ctx.state.as<NormState>();
  if (args.params.size() > 1) state.bias_dtype = args.params[1].scalar_type();
  state.zero_centered_gamma = options.zero_centered_gamma;
}

bool NormOperation::saved_zero_centered_gamma(const OperationContext& ctx) const {
  return ctx.state.as<NormState>().zero_centered_gamma.value_or(options.zero_centered_gamma);
}

// Saves the input, the statistics and the weight; only the last when it is all that backward needs.
void NormOperation::op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                                        const OpArgs& args) {
  const bool statistics = args.requires_grad.input || args.requires_grad.param(0);
  std::vector<Value> saved;
  saved.reserve(4);
  saved.push_back(statistics ? input : Value());
  for (Value& kept_value : to_save.tensors) {
    saved.push_back(statistics ? std::move(kept_value) : Value());
  }
  saved.emplace_back(args.params[0]);
  ctx.save_for_backward(std::move(saved));
  save_state(ctx, args);
}

NormBwdArgs NormOperation::backward_args(const OperationContext& ctx,
                                         const Value& grad_output) const {
  const size_t n = ctx.num_saved();
  NormBwdArgs out =
      backward_args(ctx, grad_output, ctx.saved_value(0), n > 3 ? ctx.saved_tensor(1) : Tensor(),
                    ctx.saved_tensor(n - 2), ctx.saved_tensor(n - 1));
  // te.ops saves the input as rows.
  if (out.x.defined() && out.x.sizes() != out.dy.sizes()) out.x = out.x.view(out.dy.sizes());
  return out;
}

NormBwdArgs NormOperation::backward_args(const OperationContext& ctx, const Value& grad_output,
                                         const Value& x, const Tensor& mean, const Tensor& rstd,
                                         const Tensor& w) const {
  NormBwdArgs out;
  out.zero_centered_gamma = saved_zero_centered_gamma(ctx);
  out.input_requires_grad = ctx.requires_grad.input;
  out.weight_requires_grad = ctx.requires_grad.param(0);
  out.bias_requires_grad = ctx.requires_grad.param(1);
  if (x.defined()) {
    out.x = prepare(x);
    out.mean = mean;
    out.rstd = rstd;
  }
  out.w = contiguous(w);
  out.dy = x.defined() ? prepare(grad_output, out.x.scalar_type()) : prepare(grad_output);
  return out;
}

OpBackwardResult NormOperation::backward(const NormBwdArgs& args,
                                         const OperationContext& ctx) const {
  kernels::NormBackward grads;
  const bool of_parameters = args.weight_requires_grad || args.bias_requires_grad;
  // Where x is at hand the bias's gradient is the same bits, whichever gradients are asked for.
  if (args.x.defined() && (args.input_requires_grad || of_parameters)) {
    NormBwdArgs prepared = args;
    if (args.add.defined()) prepared.add = prepare(args.add, args.x.scalar_type());
    grads = backward_kernel(prepared);
  } else if (args.bias_requires_grad) {
    const int64_t n = args.w.numel();
    grads.db = kernels::bias_backward(args.dy.view({-1, n}), n).view(args.w.sizes());
  }
  OpBackwardResult out{std::move(grads.dx), {std::move(grads.dw)}};
  if (has_bias_) {
    Tensor& db = grads.db;
    if (db.defined()) {
      db = cast(db, ctx.state.as<NormState>().bias_dtype.value_or(db.scalar_type()));
    }
    out.grad_params.push_back(std::move(db));
  }
  return out;
}

OpBackwardResult NormOperation::op_backward(OperationContext& ctx, const Value& grad_output) {
  return backward(backward_args(ctx, grad_output), ctx);
}

std::string NormOperation::complete_context(OperationContext& ctx, const OpArgs& args) const {
  const std::string saved =
      has_bias_ ? "save_for_backward(input, mean, rstd)" : "save_for_backward(input, rstd)";
  const size_t statistics = has_bias_ ? 2 : 1;
  std::vector<Value> values = ctx.saved();
  const bool needed = args.requires_grad.input || args.requires_grad.param(0);
  if (!needed) values.assign(statistics + 2, Value());
  // The operation's own contexts hold the weight too, te.ops' do not.
  if (values.size() == statistics + 1) values.emplace_back();
  if (values.size() != statistics + 2) return expected(saved, count_of(ctx));
  if (!values.back().defined()) values.back() = args.params[0];
  const int64_t row = args.params[0].numel();
  const Value& x = values[0];
  if (needed && !x.defined()) return expected(saved, "None as input");
  if (needed && ValueMeta::of(x).numel() % row != 0) {
    return expected(saved, "an input of " + sizes_string(x.sizes()) +
                               " for normalized_shape=" + sizes_string(options.normalized_shape));
  }
  for (size_t i = 1; needed && i <= statistics; ++i) {
    const char* name = i == statistics ? "rstd" : "mean";
    const std::string wrong = as_statistic(values[i], x, row, name);
    if (!wrong.empty()) return expected(saved, wrong);
  }
  ctx.save_for_backward(std::move(values));
  auto& state = ctx.state.as<NormState>();
  if (has_bias_) set_if_missing(state.bias_dtype, args.params[1].scalar_type());
  set_if_missing(state.zero_centered_gamma, options.zero_centered_gamma);
  return {};
}

}  // namespace ligature
