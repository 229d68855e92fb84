// Rows of tokens in the order of the experts that they are sent to, and back to tokens (Combine).
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct DispatchOptions {
  DispatchOptions() = default;
  explicit DispatchOptions(int64_t num_experts_) : num_experts(num_experts_) {}

  int64_t num_experts = 0;

  template <class F>
  void fields(F&& f) {
    f("num_experts", num_experts);
  }
};

/// Saved from forward to backward.
struct DispatchState {
  std::optional<std::vector<int64_t>> input_shape;

  template <class F>
  void fields(F&& f) {
    f("input_shape", input_shape);
  }
};

/// The input is [..., columns], its rows the tokens; the output [tokens * top_k, columns], a copy
/// of a token for each of its experts, by expert and in the order of tokens. Rows past the last one
/// that is used are zeros. The routing map has the input's dimensions: [2, ..., top_k].
///
/// Example:
/// ```
/// Dispatch dispatch(DispatchOptions(8));
/// OperationFuser fuser({dispatch.ptr()});
/// auto out = fuser(x, {experts, probabilities});  // rows, splits, row probabilities, map
/// ```
class DispatchImpl : public Operation<DispatchImpl> {
 public:
  LIGATURE_BUILTIN(DispatchImpl)
  using Options = DispatchOptions;
  explicit DispatchImpl(Options options);
  explicit DispatchImpl(int64_t num_experts) : DispatchImpl(Options(num_experts)) {}

  enum Input : size_t { kExperts, kProbabilities, kNumInputs };
  enum Output : size_t { kSplits, kRowProbabilities, kMap, kNumOutputs };

  size_t num_extra_inputs() const override { return kNumInputs; }
  size_t num_extra_outputs() const override { return kNumOutputs; }
  bool extra_input_is_integer(size_t index) const override { return index == kExperts; }
  Tensor example_extra_input(size_t index, const ValueMeta& input) const override;
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  /// For fusions that cover it: its extra outputs for an input of these sizes.
  std::vector<Tensor> route(at::IntArrayRef input_sizes, const OpArgs& args) const;

  Options options;
  static void check_options(const Options& options);
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(Dispatch);

}  // namespace ligature
