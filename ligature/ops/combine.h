// What the experts made of each token, added up: the way back from Dispatch.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct CombineOptions {
  CombineOptions() = default;
  explicit CombineOptions(bool weighted_) : weighted(weighted_) {}

  bool weighted = false;  ///< a second extra input: a weight for each of a token's experts

  template <class F>
  void fields(F&& f) {
    f("weighted", weighted);
  }
};

/// y[t] = sum over k of the row of token t for its k-th expert, times weights[t, k] where it is
/// weighted, in float in the order of k, rounded once. The input is [tokens * top_k, columns], the
/// output has the shape of Dispatch's input, as the routing map tells it.
///
/// Example:
/// ```
/// Combine combine;
/// OperationFuser fuser({combine.ptr()});
/// Tensor y = fuser(rows, {map})[0];  // the map is an extra output of Dispatch
/// ```
class CombineImpl : public Operation<CombineImpl> {
 public:
  LIGATURE_BUILTIN(CombineImpl)
  using Options = CombineOptions;
  explicit CombineImpl(Options given = {}) : Operation("Combine"), options(given) {}

  enum Input : size_t { kMap, kWeights };

  size_t num_extra_inputs() const override { return options.weighted ? 2 : 1; }
  bool extra_input_is_integer(size_t index) const override { return index == kMap; }
  Tensor example_extra_input(size_t index, const ValueMeta& input) const override;
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(Combine);

}  // namespace ligature
