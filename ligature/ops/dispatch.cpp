#include "ligature/ops/dispatch.h"

#include <ATen/ops/arange.h>

#include "ligature/kernels/routing.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Dispatch);

void DispatchImpl::check_options(const Options& options) {
  LIGATURE_CHECK(options.num_experts > 0, "[Dispatch] num_experts must be positive, got ",
                 options.num_experts);
}

DispatchImpl::DispatchImpl(Options options_) : Operation("Dispatch"), options(options_) {
  check_options(options);
}

void DispatchImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Dispatch(" << options.num_experts << ")";
}

namespace {

int64_t num_tokens(const ValueMeta& input) {
  int64_t tokens = 1;
  for (size_t d = 0; d + 1 < input.sizes.size(); ++d) tokens *= input.sizes[d];
  return tokens;
}

void check_slots(const DispatchImpl& op, const ValueMeta& input, const char* what,
                 const ValueMeta& slots) {
  const int64_t tokens = num_tokens(input);
  LIGATURE_CHECK(slots.sizes.size() == 2 && slots.sizes[0] == tokens && slots.sizes[1] > 0, "[",
                 op.label(), "] ", what, " must be [tokens=", tokens, ", top_k], got ",
                 sizes_string(slots.sizes));
  LIGATURE_CHECK(slots.device == input.device, "[", op.label(), "] input and ", what,
                 " must be on one device, got input on ", input.device.str(), " and ", what, " on ",
                 slots.device.str());
}

}  // namespace

std::optional<InferResult> DispatchImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const ValueMeta& input = args.input;
  LIGATURE_CHECK(input.sizes.size() >= 2, "[", label(), "] input must be [tokens, columns], got ",
                 sizes_string(input.sizes));
  const auto& experts = args.extra_inputs[kExperts];
  const auto& probabilities = args.extra_inputs[kProbabilities];
  if (experts) {
    LIGATURE_CHECK_TYPE(at::isIntegralType(experts->dtype, /*includeBool=*/false), "[", label(),
                        "] expert indices must be integers, got ", to_string(*experts));
    check_slots(*this, input, "expert indices", *experts);
  }
  if (probabilities) {
    LIGATURE_CHECK_TYPE(is_input_dtype(probabilities->dtype), "[", label(),
                        "] probabilities must have a floating dtype, got ",
                        to_string(*probabilities));
    check_slots(*this, input, "probabilities", *probabilities);
  }
  if (experts && probabilities) {
    LIGATURE_CHECK(experts->sizes == probabilities->sizes, "[", label(),
                   "] probabilities must have the expert indices' shape ",
                   sizes_string(experts->sizes), ", got ", sizes_string(probabilities->sizes));
  }
  if (!experts || !probabilities) return std::nullopt;
  const int64_t tokens = experts->sizes[0], top_k = experts->sizes[1];
  const at::Device device = input.device;
  at::SmallVector<int64_t, 5> map(input.sizes);
  map.back() = top_k;
  map.insert(map.begin(), 2);
  return InferResult{{{tokens * top_k, input.sizes.back()}, input.dtype, device},
                     {{{options.num_experts}, at::kLong, device},
                      {{tokens * top_k}, probabilities->dtype, device},
                      {std::move(map), at::kInt, device}}};
}

// Two for each token.
Tensor DispatchImpl::example_extra_input(size_t index, const ValueMeta& input) const {
  if (index != kExperts) return {};
  const int64_t tokens = num_tokens(input);
  return at::arange(2 * tokens, at::kLong)
      .mul_(5)
      .remainder_(options.num_experts)
      .view({tokens, 2});
}

std::vector<Tensor> DispatchImpl::route(at::IntArrayRef input_sizes, const OpArgs& args) const {
  const Tensor& experts = args.extra_inputs[kExperts];
  auto [splits, map] = kernels::route(experts, options.num_experts);
  at::DimVector sizes(input_sizes);
  sizes.back() = experts.size(1);
  sizes.insert(sizes.begin(), 2);
  return {std::move(splits), kernels::dispatch_slots(args.extra_inputs[kProbabilities], map),
          map.view(sizes)};
}

FuserForwardResult DispatchImpl::fuser_forward_compute(const Value& input, ArgsList args) {
  const Tensor x = prepare(input);
  const int64_t tokens = args[0].extra_inputs[kExperts].size(0);
  FuserForwardResult out;
  out.extra_outputs = {route(input.sizes(), args[0])};
  out.output = kernels::dispatch_rows(x.view({tokens, x.size(-1)}), out.extra_outputs[0][kMap]);
  out.to_save.resize(1);
  return out;
}

void DispatchImpl::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                          FuserForwardResult& result, ArgsList) {
  ctxs[0]->save_for_backward({result.extra_outputs[0][kMap]});
  ctxs[0]->state.as<DispatchState>().input_shape = input.sizes().vec();
}

FuserBackwardResult DispatchImpl::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                 GradList grad_extra_outputs) {
  OperationContext& ctx = *ctxs[0];
  const Tensor map = ctx.saved_tensor(0);
  FuserBackwardResult out;
  out.grad_params.resize(1);
  out.grad_extra_inputs = {std::vector<Tensor>(kNumInputs)};
  const Tensor& dprobabilities = grad_extra_outputs[0][kRowProbabilities];
  if (ctx.requires_grad.extra_input(kProbabilities) && dprobabilities.defined()) {
    out.grad_extra_inputs[0][kProbabilities] = kernels::combine_slots(dprobabilities, map);
  }
  if (ctx.requires_grad.input) {
    const auto& shape = ctx.state.as<DispatchState>().input_shape;
    out.grad_input = kernels::combine_rows(prepare(grad_output), map).view(*shape);
  }
  return out;
}

std::string DispatchImpl::complete_context(OperationContext& ctx, const OpArgs&) const {
  if (ctx.num_saved() != 1 || !ctx.saved_value(0).defined()) {
    return expected("save_for_backward(routing map)", count_of(ctx));
  }
  const bool there = ctx.state.as<DispatchState>().input_shape.has_value();
  return there ? "" : expected("input_shape=input_.size()", "none");
}

}  // namespace ligature
