#include "ligature/ops/topk_router.h"

#include <ATen/ops/zeros_like.h>
#include <torch/nn/init.h>

#include <cmath>

#include "ligature/kernels/gemm.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(TopKRouter);

namespace {

enum SavedByRouter : size_t {
  kRouterInput,
  kRouterWeight,
  kRouterLogits,
  kRouterExperts,
  kRouterLossCounts,
  kRouterBias,
  kNumSavedByRouter
};

at::ScalarType router_dtype(at::ScalarType input, at::ScalarType weight) {
  return input == at::kDouble || weight == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor as_rows(const Value& value, at::ScalarType dtype) {
  const Tensor x = prepare(value, dtype);
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

}  // namespace

void TopKRouterImpl::check_options(const Options& given) {
  const auto positive = [](const char* name, int64_t value) {
    LIGATURE_CHECK(value > 0, "[TopKRouter] ", name, " must be positive, got ", value);
  };
  positive("hidden_size", given.hidden_size);
  positive("num_experts", given.num_experts);
  positive("top_k", given.top_k);
  LIGATURE_CHECK(given.top_k <= given.num_experts,
                 "[TopKRouter] top_k must be at most num_experts=", given.num_experts, ", got ",
                 given.top_k);
  LIGATURE_CHECK(given.num_groups.has_value() == given.group_topk.has_value(),
                 "[TopKRouter] num_groups and group_topk must be given together");
  if (!given.num_groups) return;
  positive("num_groups", *given.num_groups);
  positive("group_topk", *given.group_topk);
  LIGATURE_CHECK(given.num_experts % *given.num_groups == 0,
                 "[TopKRouter] num_experts must be a multiple of num_groups=", *given.num_groups,
                 ", got ", given.num_experts);
  LIGATURE_CHECK(*given.group_topk <= *given.num_groups,
                 "[TopKRouter] group_topk must be at most num_groups=", *given.num_groups, ", got ",
                 *given.group_topk);
  const int64_t allowed = *given.group_topk * (given.num_experts / *given.num_groups);
  LIGATURE_CHECK(given.top_k <= allowed, "[TopKRouter] top_k must be at most the ", allowed,
                 " experts of group_topk=", *given.group_topk, " groups, got ", given.top_k);
}

TopKRouterImpl::TopKRouterImpl(Options options_)
    : Operation("TopKRouter"), options(std::move(options_)) {
  check_options(options);
  add_parameter("weight", {options.num_experts, options.hidden_size}, options.tensor_options());
  if (!options.expert_bias) return;
  add_parameter("expert_bias", {options.num_experts}, options.tensor_options().dtype(at::kFloat))
      .set_requires_grad(false);
}

// The weight as that of torch.nn.Linear.
void TopKRouterImpl::initialize_parameter(const std::string& name, Tensor& parameter) {
  if (name == "expert_bias") {
    parameter.zero_();
  } else {
    torch::nn::init::kaiming_uniform_(parameter, std::sqrt(5.0));
  }
}

void TopKRouterImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::TopKRouter(hidden_size=" << options.hidden_size
         << ", num_experts=" << options.num_experts << ", top_k=" << options.top_k << ")";
}

RouterSpec TopKRouterImpl::spec() const {
  const bool sigmoid = options.score_function == ScoreFunction::Sigmoid;
  RouterSpec spec;
  spec.score_function = options.score_function;
  spec.top_k = options.top_k;
  spec.pre_softmax = options.use_pre_softmax;
  spec.normalize = options.normalize.value_or(sigmoid && options.top_k > 1);
  spec.num_groups = options.num_groups.value_or(1);
  spec.group_topk = options.group_topk.value_or(1);
  spec.scaling_factor = options.scaling_factor.value_or(1.0);
  spec.aux_loss_coeff = options.aux_loss_coeff;
  spec.z_loss_coeff = options.z_loss_coeff;
  return spec;
}

std::optional<InferResult> TopKRouterImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const ValueMeta& input = args.input;
  LIGATURE_CHECK(!input.sizes.empty() && input.sizes.back() == options.hidden_size, "[", label(),
                 "] input's last dimension must be hidden_size=", options.hidden_size, ", got ",
                 sizes_string(input.sizes));
  const size_t wanted = options.expert_bias ? 2 : 1;
  LIGATURE_CHECK_STATE(args.params.size() == wanted, "[", label(), "] takes ", wanted,
                       " parameters, got ", args.params.size());
  const Tensor& w = args.params[kWeight];
  LIGATURE_CHECK(w.sizes() == at::IntArrayRef({options.num_experts, options.hidden_size}), "[",
                 label(), "] weight must be [", options.num_experts, ", ", options.hidden_size,
                 "], got ", sizes_string(w.sizes()));
  check_parameter(*this, input, "weight", w);
  if (options.expert_bias) {
    const Tensor& bias = args.params[kExpertBias];
    LIGATURE_CHECK(bias.sizes() == at::IntArrayRef({options.num_experts}), "[", label(),
                   "] expert_bias must be [", options.num_experts, "], got ",
                   sizes_string(bias.sizes()));
    check_parameter(*this, input, "expert_bias", bias);
  }
  const int64_t tokens = input.numel() / options.hidden_size;
  const at::ScalarType dtype = router_dtype(input.dtype, w.scalar_type());
  const at::Device device = input.device;
  return InferResult{input,
                     {{{tokens, options.top_k}, at::kLong, device},
                      {{tokens, options.top_k}, dtype, device},
                      {{}, dtype, device},
                      {{options.num_experts}, at::kLong, device}}};
}

FuserForwardResult TopKRouterImpl::fuser_forward_compute(const Value& input, ArgsList args) {
  const Tensor& weight = args[0].params[kWeight];
  const at::ScalarType dtype = router_dtype(input.dtype(), weight.scalar_type());
  Tensor logits = kernels::linear_forward(as_rows(input, dtype), prepare(weight, dtype));
  RoutedScores routed =
      route_scores(logits, options.expert_bias ? args[0].params[kExpertBias] : Tensor(), spec());
  FuserForwardResult out;
  out.output = input;
  out.extra_outputs = {{std::move(routed.experts), std::move(routed.probabilities),
                        std::move(routed.loss), std::move(routed.counts)}};
  out.to_save.resize(1);
  out.to_save[0].tensors = {std::move(logits), std::move(routed.loss_counts)};
  return out;
}

void TopKRouterImpl::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                            FuserForwardResult& result, ArgsList args) {
  const GradFlags& needs = args[0].requires_grad;
  std::vector<Value> saved(kNumSavedByRouter);
  if (needs.param(kWeight)) saved[kRouterInput] = input;
  if (needs.input) saved[kRouterWeight] = args[0].params[kWeight];
  std::vector<Value>& made = result.to_save[0].tensors;
  saved[kRouterLogits] = std::move(made[0]);
  saved[kRouterExperts] = result.extra_outputs[0][kExperts];
  saved[kRouterLossCounts] = std::move(made[1]);
  if (options.expert_bias && needs.param(kExpertBias)) {
    saved[kRouterBias] = args[0].params[kExpertBias];
  }
  ctxs[0]->save_for_backward(std::move(saved));
  auto& state = ctxs[0]->state.as<TopKRouterState>();
  state.weight_dtype = args[0].params[kWeight].scalar_type();
}

FuserBackwardResult TopKRouterImpl::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                   GradList grad_extra_outputs) {
  OperationContext& ctx = *ctxs[0];
  const GradFlags& needs = ctx.requires_grad;
  FuserBackwardResult out;
  out.grad_params = {std::vector<Tensor>(options.expert_bias ? 2 : 1)};
  out.grad_extra_inputs.resize(1);
  if (options.expert_bias && needs.param(kExpertBias)) {
    out.grad_params[0][kExpertBias] = at::zeros_like(ctx.saved_tensor(kRouterBias));
  }
  const Tensor& dprobabilities = grad_extra_outputs[0][kProbabilities];
  const Tensor& dloss = grad_extra_outputs[0][kLoss];
  if (!dprobabilities.defined() && !dloss.defined()) {
    if (needs.input) out.grad_input = grad_output;
    return out;
  }
  const Tensor logits = ctx.saved_tensor(kRouterLogits);
  const at::ScalarType dtype = logits.scalar_type();
  const Tensor dlogits =
      logits_grad(logits, ctx.saved_tensor(kRouterExperts), ctx.saved_tensor(kRouterLossCounts),
                  dprobabilities, dloss, spec());
  if (needs.param(kWeight)) {
    const Tensor dw =
        kernels::linear_weight_grad(dlogits, as_rows(ctx.saved_value(kRouterInput), dtype));
    const auto own = ctx.state.as<TopKRouterState>().weight_dtype;
    out.grad_params[0][kWeight] = cast(dw, own.value_or(dtype));
  }
  if (needs.input) {
    const Tensor dx = kernels::linear_input_grad(
        dlogits, prepare(ctx.saved_value(kRouterWeight), dtype), as_rows(grad_output, dtype));
    out.grad_input = cast(dx, grad_output.dtype()).view(grad_output.sizes());
  }
  return out;
}

std::string TopKRouterImpl::complete_context(OperationContext& ctx, const OpArgs&) const {
  if (ctx.num_saved() == kNumSavedByRouter && ctx.saved_value(kRouterLogits).defined()) return {};
  return expected("what its own fuser_forward_save_ctx saves", count_of(ctx));
}

}  // namespace ligature
