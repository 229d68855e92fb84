// y = x / sqrt(sum(x^2) + eps) over the last dimension; no parameters.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct L2NormalizationOptions {
  double eps = 1e-6;
  /// These two: accepted for compatibility, no effect: kernels need no warm-up with the sizes.
  std::optional<int64_t> seq_length;
  std::optional<int64_t> micro_batch_size;

  template <class F>
  void fields(F&& f) {
    f("eps", eps);
    f("seq_length", seq_length);
    f("micro_batch_size", micro_batch_size);
  }
};

/// Example:
/// ```
/// L2Normalization query_norm;
/// ```
class L2NormalizationImpl : public Operation<L2NormalizationImpl> {
 public:
  LIGATURE_BUILTIN(L2NormalizationImpl)
  using Options = L2NormalizationOptions;
  explicit L2NormalizationImpl(Options options = {});

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
TORCH_MODULE(L2Normalization);

}  // namespace ligature
