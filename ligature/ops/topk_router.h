// Which experts each token is sent to, and with what weights.
#pragma once

#include "ligature/operation.h"
#include "ligature/ops/router_scores.h"
#include "ligature/options.h"

namespace ligature {

struct TopKRouterOptions : ParameterOptions {
  TopKRouterOptions() = default;
  TopKRouterOptions(int64_t hidden_size_, int64_t num_experts_, int64_t top_k_)
      : hidden_size(hidden_size_), num_experts(num_experts_), top_k(top_k_) {}

  int64_t hidden_size = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  ScoreFunction score_function = ScoreFunction::Softmax;
  bool use_pre_softmax = false;   ///< softmax over all experts instead of the chosen ones
  std::optional<bool> normalize;  ///< by default with Sigmoid and more than one expert
  std::optional<int64_t> num_groups;
  std::optional<int64_t> group_topk;  ///< how many of the groups a token's experts may be in
  std::optional<double> scaling_factor;
  bool expert_bias = false;  ///< a parameter that is added to scores where experts are chosen
  double aux_loss_coeff = 0.0;
  double z_loss_coeff = 0.0;

  template <class F>
  void fields(F&& f) {
    f("hidden_size", hidden_size);
    f("num_experts", num_experts);
    f("top_k", top_k);
    f("score_function", score_function);
    f("use_pre_softmax", use_pre_softmax);
    f("normalize", normalize);
    f("num_groups", num_groups);
    f("group_topk", group_topk);
    f("scaling_factor", scaling_factor);
    f("expert_bias", expert_bias);
    f("aux_loss_coeff", aux_loss_coeff);
    f("z_loss_coeff", z_loss_coeff);
  }
};

/// Saved from forward to backward.
struct TopKRouterState {
  std::optional<at::ScalarType> weight_dtype;

  template <class F>
  void fields(F&& f) {
    f("weight_dtype", weight_dtype);
  }
};

/// Logits l = x W^T are computed in float32 (float64 where x or W is). The output is the input, in
/// the same memory. Formulas are in docs/moe.md.
///
/// Example:
/// ```
/// TopKRouter router(TopKRouterOptions(512, 8, 2));
/// OperationFuser fuser({router.ptr()});
/// auto out = fuser(x);  // x, experts, probabilities, auxiliary loss, tokens per expert
/// ```
class TopKRouterImpl : public Operation<TopKRouterImpl> {
 public:
  LIGATURE_BUILTIN(TopKRouterImpl)
  using Options = TopKRouterOptions;
  explicit TopKRouterImpl(Options options);
  TopKRouterImpl(int64_t hidden_size, int64_t num_experts, int64_t top_k)
      : TopKRouterImpl(Options(hidden_size, num_experts, top_k)) {}

  enum Param : size_t { kWeight, kExpertBias };
  enum Output : size_t { kExperts, kProbabilities, kLoss, kCounts, kNumOutputs };

  size_t num_extra_outputs() const override { return kNumOutputs; }
  void initialize_parameter(const std::string& name, Tensor& parameter) override;
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  RouterSpec spec() const;

  Options options;
  static void check_options(const Options& options);
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(TopKRouter);

}  // namespace ligature
