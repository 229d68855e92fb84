// The dispatch state of a step. A built-in operation runs below autograd and autocast: it is itself
// the derivative and has chosen its dtype. A Python op runs with the caller's state, without
// gradients. What is not ours finds everything before it launched, and has buffers of its own.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "ligature/fuser/plan.h"
#include "ligature/kernels/run.h"

namespace ligature {

/// What the caller's autocast asks for on this device, if it is on.
inline std::optional<at::ScalarType> autocast_dtype(const at::Device& device) {
  const at::DeviceType type = device.type();
  if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type)) {
    return std::nullopt;
  }
  return at::autocast::get_autocast_dtype(type);
}

/// A step's held launches may be all that still use a value by the time they go out.
inline void hold(const Value& value) {
  if (!kernels::Run::holds()) return;
  if (!value.is_quantized()) {
    kernels::Run::hold(value.tensor());
    return;
  }
  for (const at::Tensor& tensor : value.quantized()->tensors()) kernels::Run::hold(tensor);
}

class StepScope {
 public:
  explicit StepScope(const FusibleOperation& op) : StepScope(StepKind(op)) {}
  explicit StepScope(const StepKind& kind) {
    if (!kind.ours) outside_.emplace();
    if (kind.python) return;
    below_.emplace(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                   c10::autocast_dispatch_keyset);
  }

 private:
  std::optional<kernels::Run::Outside> outside_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> below_;
};

}  // namespace ligature
