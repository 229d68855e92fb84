#include "ligature/ops/prepare.h"

namespace ligature {

void check_floating(const std::string& label, const ValueMeta& input) {
  const bool ok = input.dtype == at::kFloat || input.dtype == at::kBFloat16 ||
                  input.dtype == at::kHalf || input.dtype == at::kDouble;
  LIGATURE_CHECK_TYPE(ok, "[", label,
                      "] input's dtype must be float32, bfloat16, float16 or float64, got ",
                      to_string(input));
}

void check_same_device(const std::string& label, const ValueMeta& input, const char* what,
                       const Tensor& parameter) {
  LIGATURE_CHECK(parameter.device() == input.device, "[", label, "] input and ", what,
                 " must be on one device, got input on ", input.device.str(), " and ", what, " on ",
                 parameter.device().str());
}

}  // namespace ligature
