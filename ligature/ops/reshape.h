// The same values in another shape.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct ReshapeOptions {
  ReshapeOptions() = default;
  explicit ReshapeOptions(std::vector<int64_t> shape_) : shape(std::move(shape_)) {}

  std::vector<int64_t> shape;  ///< at most one size is -1: whatever is left

  template <class F>
  void fields(F&& f) {
    f("shape", shape);
  }
};

/// Saved from forward to backward.
struct ReshapeState {
  std::optional<std::vector<int64_t>> input_shape;

  template <class F>
  void fields(F&& f) {
    f("input_shape", input_shape);
  }
};

/// Example:
/// ```
/// Reshape merge_heads(ReshapeOptions({-1, 1024}));
/// ```
class ReshapeImpl : public Operation<ReshapeImpl> {
 public:
  LIGATURE_BUILTIN(ReshapeImpl)
  using Options = ReshapeOptions;
  explicit ReshapeImpl(Options options);

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  Options options;
  static void check_options(const Options& options);
  LIGATURE_OPTIONS_AS_DATA

 private:
  at::SmallVector<int64_t, 5> resolve(const ValueMeta& input) const;
};
TORCH_MODULE(Reshape);

}  // namespace ligature
