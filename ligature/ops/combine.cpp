#include "ligature/ops/combine.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/mul.h>

#include "ligature/kernels/routing.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Combine);

namespace {

enum SavedByCombine : size_t { kSavedMap, kSavedInput, kSavedWeights };

/// The tokens' dimensions, and the input's columns.
at::SmallVector<int64_t, 5> output_sizes(at::IntArrayRef map, int64_t columns) {
  at::SmallVector<int64_t, 5> sizes(map.begin() + 1, map.end());
  sizes.back() = columns;
  return sizes;
}

size_t num_saved_by(const CombineImpl& op) { return op.options.weighted ? 3 : 1; }

}  // namespace

void CombineImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Combine(weighted=" << std::boolalpha << options.weighted << ")";
}

std::optional<InferResult> CombineImpl::infer(const InferArgs& args) const {
  const ValueMeta& input = args.input;
  check_floating(*this, input);
  LIGATURE_CHECK(input.sizes.size() == 2, "[", label(), "] input must be [rows, columns], got ",
                 sizes_string(input.sizes));
  if (!args.extra_inputs[kMap]) return std::nullopt;
  const ValueMeta& map = *args.extra_inputs[kMap];
  LIGATURE_CHECK_TYPE(map.dtype == at::kInt, "[", label(),
                      "] the routing map must be Dispatch's, of int32, got ", to_string(map));
  LIGATURE_CHECK(map.sizes.size() >= 3 && map.sizes[0] == 2, "[", label(),
                 "] the routing map must be [2, tokens, top_k], got ", sizes_string(map.sizes));
  LIGATURE_CHECK(map.device == input.device, "[", label(),
                 "] input and routing map must be on one device, got input on ", input.device.str(),
                 " and routing map on ", map.device.str());
  const int64_t top_k = map.sizes.back();
  const int64_t tokens = top_k > 0 ? map.numel() / (2 * top_k) : 0;
  LIGATURE_CHECK(input.sizes[0] == tokens * top_k, "[", label(),
                 "] input must have a row per slot of the routing map, ", tokens * top_k, ", got ",
                 sizes_string(input.sizes));
  if (options.weighted && args.extra_inputs[kWeights]) {
    const ValueMeta& weights = *args.extra_inputs[kWeights];
    LIGATURE_CHECK_TYPE(is_input_dtype(weights.dtype), "[", label(),
                        "] weights must have a floating dtype, got ", to_string(weights));
    LIGATURE_CHECK(at::IntArrayRef(weights.sizes) == at::IntArrayRef({tokens, top_k}), "[", label(),
                   "] weights must be [tokens, top_k] = ", sizes_string({tokens, top_k}), ", got ",
                   sizes_string(weights.sizes));
    LIGATURE_CHECK(weights.device == input.device, "[", label(),
                   "] input and weights must be on one device, got input on ", input.device.str(),
                   " and weights on ", weights.device.str());
  }
  InferResult result{input, {}};
  result.output.sizes = output_sizes(map.sizes, input.sizes[1]);
  return result;
}

// Of three experts: two for each token, or one where the rows are odd.
Tensor CombineImpl::example_extra_input(size_t index, const ValueMeta& input) const {
  if (index != kMap) return {};
  const int64_t rows = input.sizes[0];
  const int64_t top_k = rows % 2 == 0 ? 2 : 1;
  const Tensor experts = at::arange(rows, at::kLong).mul_(2).remainder_(3);
  return kernels::route(experts.view({rows / top_k, top_k}), 3).map;
}

FuserForwardResult CombineImpl::fuser_forward_compute(const Value& input, ArgsList args) {
  FuserForwardResult out;
  const auto& extra = args[0].extra_inputs;
  const Tensor weights = options.weighted ? extra[kWeights] : Tensor();
  out.output = kernels::combine_rows(prepare(input), extra[kMap], weights)
                   .view(output_sizes(extra[kMap].sizes(), input.sizes()[1]));
  out.extra_outputs.resize(1);
  out.to_save.resize(1);
  return out;
}

void CombineImpl::fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult&,
                                         ArgsList args) {
  const auto& extra = args[0].extra_inputs;
  std::vector<Value> saved(num_saved_by(*this));
  saved[kSavedMap] = extra[kMap];
  if (options.weighted) {
    const GradFlags& needs = args[0].requires_grad;
    if (needs.extra_input(kWeights)) saved[kSavedInput] = input;
    saved[kSavedWeights] = extra[kWeights];
  }
  ctxs[0]->save_for_backward(std::move(saved));
}

FuserBackwardResult CombineImpl::fuser_backward(CtxList ctxs, const Value& grad_output, GradList) {
  OperationContext& ctx = *ctxs[0];
  const Tensor map = ctx.saved_tensor(kSavedMap);
  const Tensor dy = prepare(grad_output).flatten(0, -2);
  FuserBackwardResult out;
  out.grad_params.resize(1);
  out.grad_extra_inputs = {std::vector<Tensor>(num_extra_inputs())};
  const Tensor weights = options.weighted ? ctx.saved_tensor(kSavedWeights) : Tensor();
  if (options.weighted && ctx.requires_grad.extra_input(kWeights)) {
    const Tensor x = prepare(ctx.release_saved(kSavedInput).value);
    out.grad_extra_inputs[0][kWeights] =
        cast(kernels::combine_weights_grad(dy, x, map), weights.scalar_type());
  }
  if (!ctx.requires_grad.input) return out;
  Tensor dx = kernels::dispatch_rows(dy, map);
  if (weights.defined()) {
    const at::ScalarType wide = dy.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor of_rows = kernels::dispatch_slots(cast(weights, wide), map).unsqueeze(1);
    dx = cast(at::mul(cast(dx, wide), of_rows), dy.scalar_type());
  }
  out.grad_input = std::move(dx);
  return out;
}

std::string CombineImpl::complete_context(OperationContext& ctx, const OpArgs& args) const {
  const size_t wanted = num_saved_by(*this);
  if (ctx.num_saved() != wanted || !ctx.saved_value(kSavedMap).defined()) {
    return expected(options.weighted ? "save_for_backward(routing map, input, weights)"
                                     : "save_for_backward(routing map)",
                    count_of(ctx));
  }
  if (!options.weighted) return {};
  if (!ctx.saved_value(kSavedWeights).defined()) return expected("weights", "None");
  const bool needs_input = args.requires_grad.extra_input(kWeights);
  return needs_input && !ctx.saved_value(kSavedInput).defined() ? expected("an input", "None") : "";
}

}  // namespace ligature
