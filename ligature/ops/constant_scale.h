// y = scale * x.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct ConstantScaleOptions {
  ConstantScaleOptions() = default;
  explicit ConstantScaleOptions(double scale_) : scale(scale_) {}

  double scale = 1.0;

  template <class F>
  void fields(F&& f) {
    f("scale", scale);
  }
};

/// Saved from forward to backward.
struct ConstantScaleState {
  std::optional<double> scale;

  template <class F>
  void fields(F&& f) {
    f("scale", scale);
  }
};

/// Example:
/// ```
/// ConstantScale half(0.5);
/// ```
class ConstantScaleImpl : public Operation<ConstantScaleImpl> {
 public:
  LIGATURE_BUILTIN(ConstantScaleImpl)
  using Options = ConstantScaleOptions;
  explicit ConstantScaleImpl(Options options);
  explicit ConstantScaleImpl(double scale) : ConstantScaleImpl(Options(scale)) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  /// The factor that forward used.
  double scale(const OperationContext& ctx) const {
    return ctx.state.as<ConstantScaleState>().scale.value_or(options.scale);
  }

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(ConstantScale);

}  // namespace ligature
