// Torch's functions on tensors that stand for quantized ones, where no language binding has a kind
// of its own: a dispatch key that such tensors have and no plain tensor has.
#pragma once

#include <c10/core/DispatchKey.h>

namespace ligature {

// Above autograd, so that a function's gradient is that of the function on the values.
inline constexpr c10::DispatchKey kWrapperKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

}  // namespace ligature
