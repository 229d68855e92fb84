// Quantizes what passes through it, so that an operation behind it, in this fuser or in the next,
// finds its input in low precision. Without a recipe it does nothing.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct QuantizeOptions {
  bool forward = true;    ///< the value
  bool backward = false;  ///< its gradient

  template <class F>
  void fields(F&& f) {
    f("forward", forward);
    f("backward", backward);
  }
};

/// Saved from forward to backward.
struct QuantizeState {
  bool calibrating = false;

  template <class F>
  void fields(F&& f) {
    f("calibrating", calibrating);
  }
};

/// Example:
/// ```
/// Sequential head(LayerNorm(NormOptions({256})), Quantize());
/// ```
class QuantizeImpl : public Operation<QuantizeImpl> {
 public:
  LIGATURE_BUILTIN(QuantizeImpl)
  using Options = QuantizeOptions;
  explicit QuantizeImpl(Options options = {});

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  std::vector<QuantizerRole> forward_quantizer_roles() const override;
  std::vector<QuantizerRole> backward_quantizer_roles() const override;
  // Whoever comes after may need both orientations.
  Usage input_usage(const GradFlags& needs) const override { return {true, needs.op}; }
  Usage grad_output_usage(const GradFlags&) const override { return {true, true}; }

  Options options;
  void check_options(const Options&) const {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(Quantize);

}  // namespace ligature
