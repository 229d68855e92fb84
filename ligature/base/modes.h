// Who watches the calls that this thread makes through torch's dispatcher: modes of torch
// (FlopCounterMode, selective checkpoints, make_fx, ...) and the tracer of torch.jit. What a fuser
// computes does not pass the dispatcher, so it has to show itself to them.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <utility>

namespace ligature {

inline bool is_dispatched_to(c10::DispatchKeySet watchers) {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return (keys.included_ - keys.excluded_).has_any(watchers);
}

/// Is a mode active that sees each call?
inline bool has_modes() {
  return is_dispatched_to(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PreDispatch}));
}

/// Does torch.jit.trace record each call?
inline bool has_tracer() { return is_dispatched_to(c10::DispatchKeySet(c10::DispatchKey::Tracer)); }

/// While it lives, modes see nothing of this thread.
class ModesHidden {
 public:
  ModesHidden() {
    using c10::impl::TorchDispatchModeTLS;
    if (!TorchDispatchModeTLS::any_modes_set() && !has_modes()) return;
    hidden_ = TorchDispatchModeTLS::get_state();
    TorchDispatchModeTLS::set_state({});
    below_.emplace(
        c10::DispatchKeySet({c10::DispatchKey::PreDispatch, c10::DispatchKey::PythonDispatcher}));
  }
  ~ModesHidden() {
    below_.reset();
    if (hidden_) c10::impl::TorchDispatchModeTLS::set_state(std::move(*hidden_));
  }
  ModesHidden(const ModesHidden&) = delete;
  ModesHidden& operator=(const ModesHidden&) = delete;

 private:
  std::optional<c10::impl::TorchDispatchModeTLS> hidden_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> below_;
};

}  // namespace ligature
