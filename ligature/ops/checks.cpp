#include "ligature/ops/checks.h"

namespace ligature {

bool is_input_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

void check_floating(const BasicOperation& op, const ValueMeta& input) {
  LIGATURE_CHECK_TYPE(is_input_dtype(input.dtype), "[", op.label(),
                      "] input's dtype must be float32, bfloat16, float16 or float64, got ",
                      to_string(input));
}

void check_parameter(const BasicOperation& op, const ValueMeta& input, const char* what,
                     const Tensor& parameter) {
  LIGATURE_CHECK_TYPE(is_input_dtype(parameter.scalar_type()), "[", op.label(), "] ", what,
                      "'s dtype must be float32, bfloat16, float16 or float64, got ",
                      to_string(ValueMeta::of(parameter)));
  LIGATURE_CHECK(parameter.device() == input.device, "[", op.label(), "] input and ", what,
                 " must be on one device, got input on ", input.device.str(), " and ", what, " on ",
                 parameter.device().str());
}

}  // namespace ligature
