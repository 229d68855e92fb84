// y = x.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct IdentityOptions {
  template <class F>
  void fields(F&&) {}
};

/// Example:
/// ```
/// Identity identity;
/// ```
class IdentityImpl : public Operation<IdentityImpl> {
 public:
  LIGATURE_BUILTIN(IdentityImpl)
  using Options = IdentityOptions;
  explicit IdentityImpl(Options given = {}) : Operation("Identity"), options(given) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(Identity);

}  // namespace ligature
