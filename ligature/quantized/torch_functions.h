// Torch's functions on tensors that stand for quantized ones, where no language binding has a kind
// of its own.
#pragma once

#include <c10/core/DispatchKeySet.h>

namespace ligature {

/// The backend of such tensors, below autograd: a key for backends outside of torch, with a bit
/// that no tensor of another device has. Their device is that of their parts.
inline constexpr c10::DispatchKeySet kWrapperKeys{c10::DispatchKey::PrivateUse3};

}  // namespace ligature
