#include "ligature/ops/identity.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Identity);

void IdentityImpl::pretty_print(std::ostream& stream) const { stream << "ligature::Identity()"; }

std::optional<InferResult> IdentityImpl::infer(const InferArgs& args) const {
  return InferResult{args.input, {}};
}

OpForwardResult IdentityImpl::op_forward_compute(const Value& input, const OpArgs&) {
  return {input, {}};
}

void IdentityImpl::op_forward_save_ctx(OperationContext&, const Value&, ToSave&, const OpArgs&) {}

OpBackwardResult IdentityImpl::op_backward(OperationContext&, const Value& grad_output) {
  return {grad_output, {}};
}

}  // namespace ligature
