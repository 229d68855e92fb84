// Zeroes values with probability p and divides the rest by 1 - p; in eval mode it does nothing.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct DropoutOptions {
  DropoutOptions() = default;
  explicit DropoutOptions(double p_) : p(p_) {}

  double p = 0.5;

  template <class F>
  void fields(F&& f) {
    f("p", p);
  }
};

/// Saved from forward to backward.
struct DropoutState {
  std::optional<double> p;

  template <class F>
  void fields(F&& f) {
    f("p", p);
  }
};

/// Example:
/// ```
/// Dropout dropout(0.1);
/// ```
class DropoutImpl : public Operation<DropoutImpl> {
 public:
  LIGATURE_BUILTIN(DropoutImpl)
  using Options = DropoutOptions;
  explicit DropoutImpl(Options options);
  explicit DropoutImpl(double p) : DropoutImpl(Options(p)) {}

  bool uses_training() const override { return true; }
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
};
TORCH_MODULE(Dropout);

}  // namespace ligature
