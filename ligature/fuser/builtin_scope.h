// The dispatch state of a step. A built-in operation runs below autograd and autocast: it is itself
// the derivative and has chosen its dtype. A guest runs with the caller's state, without gradients.
// What is not ours finds everything before it launched.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <string_view>
#include <typeinfo>

#include "ligature/backend/cuda/launch_scope.h"
#include "ligature/operation.h"

namespace ligature {

/// What the caller's autocast asks for on this device, if it is on.
inline std::optional<at::ScalarType> autocast_dtype(const at::Device& device) {
  const at::DeviceType type = device.type();
  if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type)) {
    return std::nullopt;
  }
  return at::autocast::get_autocast_dtype(type);
}

/// Are all its kernels Ligature's own or ATen's? A type of the user's may launch others.
inline bool is_ours(const FusibleOperation& op) {
  return !op.is_guest() && std::string_view(typeid(op).name()).starts_with("N8ligature");
}

class StepScope {
 public:
  explicit StepScope(const FusibleOperation& op) {
    if (!is_ours(op)) launched_.emplace();
    if (op.is_guest()) return;
    below_autograd_.emplace();
    no_autocast_.emplace(c10::autocast_dispatch_keyset);
  }

 private:
  std::optional<cuda::LaunchPause> launched_;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast_;
};

}  // namespace ligature
