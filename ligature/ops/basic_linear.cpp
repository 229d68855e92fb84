#include "ligature/ops/basic_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <cmath>

#include "ligature/distributed/filler.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/gemm.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"
#include "ligature/readable.h"
#include "ligature/recipes/model_init.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(BasicLinear);

namespace {

MainGradLookup& main_grad_lookup() {
  static MainGradLookup lookup;
  return lookup;
}

}  // namespace

void set_main_grad_lookup(MainGradLookup lookup) { main_grad_lookup() = std::move(lookup); }

MainGrad find_main_grad(const BasicOperation& op, const Tensor& weight) {
  return main_grad_lookup() ? main_grad_lookup()(op, weight) : MainGrad();
}

void check_main_grad(const BasicOperation& op, const Tensor& weight, const Tensor& buffer) {
  LIGATURE_CHECK_TYPE(buffer.layout() == at::kStrided && is_input_dtype(buffer.scalar_type()), "[",
                      op.label(),
                      "] main_grad must be a dense tensor of float32, bfloat16, float16 or "
                      "float64, got ",
                      c10::toString(buffer.scalar_type()), " with layout ", buffer.layout());
  if (!is_readable(buffer)) {
    check_writable(buffer, [&] { return "[" + op.label() + "] main_grad"; });
  }
  LIGATURE_CHECK(buffer.sizes() == weight.sizes(), "[", op.label(), "] main_grad must be ",
                 sizes_string(weight.sizes()), " like the weight, got ",
                 sizes_string(buffer.sizes()));
  LIGATURE_CHECK(buffer.device() == weight.device(), "[", op.label(),
                 "] main_grad must be on the weight's device ", weight.device().str(), ", got ",
                 buffer.device().str());
}

void BasicLinearImpl::check_options(const Options& given) const {
  LIGATURE_CHECK(given.in_features > 0, "[", label(), "] in_features must be positive, got ",
                 given.in_features);
  LIGATURE_CHECK(given.out_features > 0, "[", label(), "] out_features must be positive, got ",
                 given.out_features);
  canonical(given.tensor_parallel, label(), given.in_features, given.out_features);
}

BasicLinearImpl::BasicLinearImpl(Options options_)
    : Operation("BasicLinear"), options(std::move(options_)) {
  check_options(options);
  options.tensor_parallel =
      canonical(options.tensor_parallel, label(), options.in_features, options.out_features);
  parallel_ = options.tensor_parallel.parsed();
  add_parameter("weight", {local_out_features(), local_in_features()}, options.tensor_options());
  Tensor& w = parameters_["weight"];
  w = new_weight(*this, w).set_requires_grad(true);
}

// As torch.nn.Linear: uniform in ±1/sqrt(in_features), those of the whole layer.
void BasicLinearImpl::initialize_parameter(const std::string&, Tensor& parameter) {
  torch::nn::init::kaiming_uniform_(parameter, std::sqrt(5.0));
  // The inputs of all ranks are added up.
  if (parallel_ == TensorParallel::Row) {
    const torch::NoGradGuard no_grad;
    parameter.mul_(1.0 / std::sqrt(static_cast<double>(options.tensor_parallel.ranks())));
  }
}

void BasicLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::BasicLinear(in_features=" << options.in_features
         << ", out_features=" << options.out_features << ")";
}

std::optional<InferResult> BasicLinearImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const auto& sizes = args.input.sizes;
  const int64_t in = local_in_features(), out = local_out_features();
  const std::string shared =
      is_parallel() ? " on each of " + std::to_string(options.tensor_parallel.ranks()) + " ranks"
                    : std::string();
  LIGATURE_CHECK(!sizes.empty() && sizes.back() == in, "[", label(),
                 "] input's last dimension must be in_features=", in, shared, ", got ",
                 sizes_string(sizes));
  const Tensor& w = args.params[0];
  LIGATURE_CHECK(w.dim() == 2 && w.size(0) == out && w.size(1) == in, "[", label(),
                 "] weight must be [", out, ", ", in, "]", shared, ", got ",
                 sizes_string(w.sizes()));
  check_parameter(*this, args.input, "weight", w);
  InferResult result{args.input, {}};
  result.output.sizes.back() = out;
  if (is_parallel()) infer_parallel(result);
  result.output.dtype = under_autocast(w.scalar_type(), args.autocast_dtype);
  return result;
}

at::ScalarType BasicLinearImpl::compute_dtype(const OpArgs& args) const {
  return under_autocast(args.params[0].scalar_type(), args.autocast_dtype);
}

bool BasicLinearImpl::accepts_kwarg(const std::string& name) const {
  return name == "is_first_microbatch";  // a weight is quantized when it has changed, not when told
}

std::string BasicLinearImpl::note() const {
  if (gathers_input()) return overlap_note();
  if (!options.userbuffers_comm_name || is_parallel()) return "";
  return "userbuffers_options have no effect on a layer that is not spread over ranks";
}

std::vector<QuantizerRole> BasicLinearImpl::forward_quantizer_roles() const {
  return {{"linear", "input", label()}, {"linear", "weight", label()}};
}

std::vector<QuantizerRole> BasicLinearImpl::backward_quantizer_roles() const {
  return {{"linear", "grad_output", label()}};
}

namespace {

// A weight that is kept in low precision has a scale of its own. It is computed with as it is, or
// in another format with a scale that holds it; the history learns its amax.
Value delayed_weight(const Value& weight, const Target& target, at::ScalarType dtype) {
  Value used = weight;
  if (weight.quantized()->format_tag() != target.quantizer->format_tag()) {
    used = target.quantizer->fit(prepare(weight, dtype), target.usage_on(weight.device()));
  }
  target.quantizer->calibrate(*used.quantized());
  return used;
}

}  // namespace

Value weight_operand(const Value& weight, const Target& target, at::ScalarType dtype,
                     WeightCache* cache, const Tensor& owner) {
  if (!target || (weight.is_quantized() && target.quantizer->delayed == nullptr)) {
    return quantize_to(weight, target, dtype);
  }
  if (weight.is_quantized()) return delayed_weight(weight, target, dtype);
  const Usage usage = target.usage_on(weight.device());
  return cache != nullptr ? cache->get(weight.tensor(), *target.quantizer, usage, owner)
                          : target.quantizer->quantize(weight.tensor(), usage);
}

RecomputedInput::RecomputedInput(const OpQuantization* quantization, size_t index,
                                 const Tensor& scale) {
  if (quantization == nullptr) return;
  const BackwardOverride given = quantization->recipe->backward_override();
  const Quantizer* own = quantization->forward_quantizer(index);
  if (own == nullptr || given == BackwardOverride::HighPrecision) return;
  quantizer = own->again(scale);
  if (given == BackwardOverride::Dequantized) usage = {true, false};
}

LinearFwdArgs BasicLinearImpl::forward_args(const Value& input, const OpArgs& args,
                                            bool pieces) const {
  LinearFwdArgs out;
  out.dtype = compute_dtype(args);
  OpQuantization* quantization = args.calibrating ? nullptr : args.quantization;
  const Value weight = args.params[0];
  if (quantization == nullptr) {
    if (args.quantization != nullptr) calibrate(input, weight, args);
    if (gathers_input()) {
      gather_input(out, input, {}, [&]() -> Value { return prepare(weight, out.dtype); }, pieces);
      return out;
    }
    out.x = prepare(input, out.dtype);
    out.w = prepare(weight, out.dtype);
    return out;
  }
  LIGATURE_CHECK_TYPE(out.dtype != at::kDouble, "[", label(),
                      "] low precision takes float32, bfloat16 or float16, got float64");
  const Recipe& recipe = *quantization->recipe;
  out.split = recipe.split_accumulation();
  const Target to_x{quantization->forward_quantizer(0),
                    recipe.quantized_usage(input_usage(args.requires_grad))};
  const Target to_w{quantization->forward_quantizer(1),
                    recipe.quantized_usage({true, args.requires_grad.input})};
  const bool keeps = args.keep_weights && quantization->weights != nullptr;
  const auto operand = [&] {
    return weight_operand(weight, to_w, out.dtype, keeps ? &(*quantization->weights)[0] : nullptr,
                          args.params[0]);
  };
  if (gathers_input()) {
    gather_input(out, input, to_x, operand, pieces);
  } else {
    out.x = quantize_to(input, to_x, out.dtype);
    out.w = operand();
  }
  return out;
}

void BasicLinearImpl::calibrate(const Value& input, const Value& weight, const OpArgs& args) const {
  const Value values[] = {input, weight};
  for (size_t i = 0; i < 2; ++i) {
    const Quantizer* quantizer = args.quantization->forward_quantizer(i);
    if (quantizer != nullptr) quantizer->calibrate(prepare(values[i]));
  }
}

Tensor BasicLinearImpl::forward(const LinearFwdArgs& args) {
  if (args.arriving != nullptr) return forward_arriving(args);
  if (args.x.is_quantized() || args.w.is_quantized()) {
    Tensor y = kernels::quantized_linear_forward(args.x, args.w, args.product());
    if (!args.add_in_place) return y;
    Tensor sum = args.add;
    return sum.copy_(y);
  }
  const Tensor& x = args.x.tensor();
  const Tensor& w = args.w.tensor();
  if (args.add_in_place) {
    Tensor y = args.add;
    kernels::linear_forward_add_(y, x, w, args.bias, args.alpha);
    return y;
  }
  return kernels::linear_forward(x, w, args.bias, args.add, args.alpha);
}

// A product over the batch reads the input's column-wise data, one over the outputs the weight's:
// the other orientation is not kept. A recipe that overrides backward wants the operands of
// forward, which are row-wise, or none.
ToSave BasicLinearImpl::to_save(const LinearFwdArgs& fwd, const OpArgs& args) {
  ToSave to_save;
  const Value nothing;
  const Value& x = fwd.saves_input ? nothing : fwd.shard.defined() ? fwd.shard : fwd.x;
  if (!x.is_quantized() && !fwd.w.is_quantized()) return to_save;
  const BackwardOverride given = args.quantization != nullptr
                                     ? args.quantization->recipe->backward_override()
                                     : BackwardOverride::None;
  if (given == BackwardOverride::HighPrecision) return to_save;
  const bool rows = given == BackwardOverride::Dequantized;
  const auto narrowed = [&](const Value& v) -> Value {
    if (!v.is_quantized()) return v;
    const QuantizedTensor& q = *v.quantized();
    if (!(rows ? q.rowwise() : q.columnwise()).defined()) return v;
    return q.only(rows, !rows);
  };
  to_save.tensors = {args.requires_grad.param(0) && x.is_quantized() ? narrowed(x) : Value(),
                     args.requires_grad.input && fwd.w.is_quantized() ? narrowed(fwd.w) : Value()};
  return to_save;
}

OpForwardResult BasicLinearImpl::op_forward_compute(const Value& input, const OpArgs& args) {
  const LinearFwdArgs fwd = forward_args(input, args, /*pieces=*/true);
  Tensor y = forward(fwd);
  if (parallel_ == TensorParallel::Row) y = start_sum(y, shares_tokens()).wait_one();
  return {std::move(y), to_save(fwd, args)};
}

// The input and the weight are saved as they came in, so that nothing is held twice; a cast is made
// again in backward.
void BasicLinearImpl::op_forward_save_ctx(OperationContext& ctx, const Value& input,
                                          ToSave& to_save, const OpArgs& args) {
  save_ctx(ctx, args.requires_grad.param(0) ? input : Value(), input.dtype(), to_save, args);
}

void BasicLinearImpl::save_ctx(OperationContext& ctx, const Value& x, at::ScalarType input_dtype,
                               ToSave& to_save, const OpArgs& args) const {
  const GradFlags& needs = args.requires_grad;
  const auto quantized = [&](size_t i) -> Value {
    return i < to_save.tensors.size() ? std::move(to_save.tensors[i]) : Value();
  };
  Value saved_x = quantized(0);
  Value saved_w = quantized(1);
  if (!saved_x.defined()) saved_x = x;
  if (!saved_w.defined() && needs.input) saved_w = args.params[0];
  ctx.save_for_backward({std::move(saved_x), std::move(saved_w)});
  ctx.state.as<LinearState>() = {compute_dtype(args), input_dtype, args.params[0].scalar_type(),
                                 args.calibrating};
  if (options.accumulate_into_main_grad && needs.param(0)) {
    ctx.parameter_references.push_back(args.params[0]);
  }
}

LinearBwdArgs BasicLinearImpl::backward_args(OperationContext& ctx,
                                             const Value& grad_output) const {
  return backward_args(ctx, grad_output, ctx.release_saved(0).value, ctx.saved_value(1));
}

LinearBwdArgs BasicLinearImpl::backward_args(const OperationContext& ctx, const Value& grad_output,
                                             const Value& x, const Value& w) const {
  LinearBwdArgs out;
  const LinearState state = ctx.state.as<LinearState>();
  out.compute_dtype = state.dtype.value_or(grad_output.dtype());
  out.input_dtype = state.input_dtype.value_or(out.compute_dtype);
  out.weight_dtype = state.weight_dtype.value_or(out.compute_dtype);
  out.input_requires_grad = ctx.requires_grad.input;
  out.weight_requires_grad = ctx.requires_grad.param(0);
  if (ctx.quantization != nullptr) out.split = ctx.quantization->recipe->split_accumulation();
  const Quantizer* quantizer =
      ctx.quantization != nullptr ? ctx.quantization->backward_quantizer(0) : nullptr;
  const bool quantized = !state.calibrating && ctx.quantization != nullptr &&
                         ctx.quantization->recipe->backward_override() == BackwardOverride::None;
  const auto as_operand = [&](const Value& v) -> Value {
    return v.is_quantized() && quantized ? v : Value(prepare(v, out.compute_dtype));
  };
  if (out.weight_requires_grad && x.defined()) {
    if (gathers_input()) {
      out.gathered_x = gathered_input(ctx, x, quantized, out.compute_dtype);
    } else {
      out.x = as_operand(x);
    }
  }
  const Target to_dy{quantizer, grad_output_usage(ctx.requires_grad)};
  if (quantizer != nullptr && state.calibrating) quantizer->calibrate(prepare(grad_output));
  if (parallel_ == TensorParallel::Row && shares_tokens()) {
    out.dy =
        gathered_grad_output(grad_output, state.calibrating ? Target() : to_dy, out.compute_dtype);
  } else if (quantizer != nullptr && !state.calibrating) {
    out.dy = quantize_to(grad_output, to_dy, out.compute_dtype);
  } else {
    out.dy = as_operand(grad_output);
  }
  if (out.input_requires_grad) out.w = as_operand(w);
  return out;
}

Tensor BasicLinearImpl::input_grad(const LinearBwdArgs& args, bool quantized) const {
  const Tensor add = args.add.defined() ? prepare(args.add, args.compute_dtype) : Tensor();
  if (!quantized) {
    return kernels::linear_input_grad(args.dy.tensor(), args.w.tensor(), add, args.alpha);
  }
  return kernels::quantized_linear_input_grad(
      args.dy, args.w,
      {args.compute_dtype, {}, add, args.alpha, kernels::accumulation(args.split.input_grad)});
}

LinearGrads BasicLinearImpl::backward(LinearBwdArgs args, const OperationContext& ctx) {
  if (is_parallel() || distributed::Filler::current() != nullptr) {
    return parallel_backward(std::move(args), ctx);
  }
  LinearGrads grads;
  const bool quantized = args.is_quantized();
  if (joins_bias_grad(args)) {
    auto both = kernels::gemm_with_epilogue(
        kernels::weight_and_bias_grad(args.dy.tensor(), args.x.tensor()));
    grads.dw = cast(both.y, args.weight_dtype);
    grads.dbias = std::move(both.dbias);
  } else {
    if (args.bias_requires_grad) {
      grads.dbias = kernels::bias_backward(args.dy.dequantized(), local_out_features());
    }
    if (args.weight_requires_grad) grads.dw = weight_grad(args, ctx);
  }
  args.x = {};
  if (args.input_requires_grad) grads.dx = cast(input_grad(args, quantized), args.input_dtype);
  return grads;
}

bool BasicLinearImpl::joins_bias_grad(const LinearBwdArgs& args) const {
  return args.bias_requires_grad && args.weight_requires_grad && !args.is_quantized() &&
         !options.accumulate_into_main_grad && args.alpha == 1.0 &&
         kernels::pays(kernels::weight_and_bias_grad(args.dy.tensor(), args.x.tensor()));
}

Tensor BasicLinearImpl::weight_grad(const LinearBwdArgs& args, const OperationContext& ctx) {
  const kernels::ProductArgs weight_product{
      args.compute_dtype, {}, {}, args.alpha, kernels::accumulation(args.split.weight_grad)};
  if (!options.accumulate_into_main_grad) {
    const Tensor dw =
        args.is_quantized()
            ? kernels::quantized_linear_weight_grad(args.dy, args.x, weight_product)
            : kernels::linear_weight_grad(args.dy.tensor(), args.x.tensor(), args.alpha);
    return cast(dw, args.weight_dtype);
  }
  const Tensor& weight =
      ctx.parameter_references.empty() ? this->weight() : ctx.parameter_references[0];
  MainGrad main = main_grad_;
  if (!main.buffer.defined() && args.dy.device().is_meta()) {
    main.buffer = at::empty_like(weight);  // nothing is computed, so nothing is added up
  } else if (!main.buffer.defined()) {
    main = find_main_grad(*this, weight);
  }
  LIGATURE_CHECK_STATE(main.buffer.defined(), "[", label(),
                       "] accumulate_into_main_grad is set, but the weight has no main_grad");
  check_main_grad(*this, weight, main.buffer);
  if (args.is_quantized()) {
    kernels::quantized_linear_weight_grad_into(main.buffer, args.dy, args.x, !main.overwrite,
                                               weight_product);
  } else {
    kernels::linear_weight_grad_into(main.buffer, args.dy.tensor(), args.x.tensor(),
                                     !main.overwrite, args.alpha);
  }
  return main.return_placeholder ? at::zeros(weight.sizes(), weight.options()) : Tensor();
}

OpBackwardResult BasicLinearImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  LinearGrads grads = backward(backward_args(ctx, grad_output), ctx);
  return {grads.dx, {grads.dw}};
}

std::string BasicLinearImpl::complete_context(OperationContext& ctx, const OpArgs& args) const {
  const GradFlags& needs = args.requires_grad;
  if (!needs.input && !needs.param(0)) return {};
  const std::string saved = "save_for_backward(input, weight)";
  if (ctx.num_saved() != 2) return expected(saved, count_of(ctx));
  const Value x = ctx.saved_value(0);
  Value w = ctx.saved_value(1);
  if (needs.param(0)) {
    if (!x.defined()) return expected(saved, "None as input");
    if (x.sizes().empty() || x.sizes().back() != local_in_features()) {
      return expected(saved, "an input of " + sizes_string(x.sizes()) +
                                 ", whose last dimension is not in_features=" +
                                 std::to_string(local_in_features()));
    }
  }
  if (needs.input) {
    if (!w.defined()) w = args.params[0];
    if (w.sizes() != args.params[0].sizes()) {
      return expected(saved, "a weight of " + sizes_string(w.sizes()));
    }
  }
  ctx.save_for_backward({x, std::move(w)});
  auto& state = ctx.state.as<LinearState>();
  if (x.defined()) set_if_missing(state.input_dtype, x.dtype());
  set_if_missing(state.weight_dtype, args.params[0].scalar_type());
  set_if_missing(state.dtype, compute_dtype(args));
  if (options.accumulate_into_main_grad && needs.param(0) && ctx.parameter_references.empty()) {
    ctx.parameter_references.push_back(args.params[0]);
  }
  if (!ctx.state.get_or("with_quantized_compute", true)) ctx.quantization = nullptr;
  return {};
}

}  // namespace ligature
