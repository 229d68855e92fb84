#include "ligature/ops/bias.h"

#include "ligature/distributed/group.h"
#include "ligature/kernels/bias.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Bias);

void BiasImpl::check_options(const Options& options) {
  LIGATURE_CHECK(options.size > 0, "[Bias] size must be positive, got ", options.size);
  const int64_t ranks = options.tensor_parallel_size.value_or(1);
  LIGATURE_CHECK(ranks > 0, "[Bias] tensor_parallel_size must be positive, got ", ranks);
  LIGATURE_CHECK(options.size % ranks == 0, "[Bias] size must be one that ", ranks,
                 " ranks can share evenly, got ", options.size);
}

namespace {

/// A group of one rank splits nothing.
BiasOptions canonical(BiasOptions given) {
  if (given.tensor_parallel && !given.tensor_parallel_size) {
    given.tensor_parallel_size = distributed::find_group(given.tensor_parallel_group)->size();
  }
  if (given.tensor_parallel && given.tensor_parallel_size != 1) return given;
  given.tensor_parallel = false;
  given.tensor_parallel_group.reset();
  given.tensor_parallel_size.reset();
  return given;
}

}  // namespace

BiasImpl::BiasImpl(Options options_) : Operation("Bias"), options(canonical(std::move(options_))) {
  check_options(options);
  add_parameter("bias", {local_size()}, options.tensor_options());
}

void BiasImpl::initialize_parameter(const std::string&, Tensor& parameter) { parameter.zero_(); }

void BiasImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Bias(size=" << options.size << ")";
}

std::optional<InferResult> BiasImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const auto& sizes = args.input.sizes;
  LIGATURE_CHECK(!sizes.empty() && sizes.back() == local_size(), "[", label(),
                 "] input's last dimension must be size=", local_size(), ", got ",
                 sizes_string(sizes));
  if (args.params.empty()) return InferResult{args.input, {}};
  const Tensor& b = args.params[0];
  LIGATURE_CHECK(b.dim() == 1 && b.size(0) == local_size(), "[", label(), "] bias must be [",
                 local_size(), "], got ", sizes_string(b.sizes()));
  check_parameter(*this, args.input, "bias", b);
  return InferResult{args.input, {}};
}

Tensor BiasImpl::bias_of(const OpArgs& args, at::ScalarType dtype) {
  return args.params.empty() ? Tensor() : prepare(args.params[0], dtype);
}

OpForwardResult BiasImpl::op_forward_compute(const Value& input, const OpArgs& args) {
  if (args.params.empty()) return {input, {}};
  const Tensor x = prepare(input);
  return {kernels::bias_forward(x, bias_of(args, x.scalar_type())), {}};
}

void BiasImpl::save_dtypes(OperationContext& ctx, const OpArgs& args) {
  auto& state = ctx.state.as<BiasState>();
  state.no_bias = args.params.empty();
  if (!state.no_bias) state.bias_dtype = args.params[0].scalar_type();
}

Tensor BiasImpl::cast_grad(const OperationContext& ctx, const Tensor& db) const {
  return cast(db, ctx.state.as<BiasState>().bias_dtype.value_or(db.scalar_type()));
}

void BiasImpl::op_forward_save_ctx(OperationContext& ctx, const Value&, ToSave&,
                                   const OpArgs& args) {
  save_dtypes(ctx, args);
}

OpBackwardResult BiasImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (ctx.state.as<BiasState>().no_bias) return {grad_output, {}};
  Tensor db;
  if (ctx.requires_grad.param(0)) {
    db = cast_grad(ctx, kernels::bias_backward(prepare(grad_output), local_size()));
  }
  return {grad_output, {db}};
}

std::string BiasImpl::complete_context(OperationContext& ctx, const OpArgs& args) const {
  set_if_missing(ctx.state.as<BiasState>().bias_dtype, args.params[0].scalar_type());
  return {};
}

}  // namespace ligature
