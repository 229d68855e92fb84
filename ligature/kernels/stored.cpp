#include "ligature/kernels/stored.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "ligature/check.h"

namespace ligature {
namespace {

using c10::DispatchKey;

std::function<std::optional<TensorClass>(const Tensor&)>& class_hook() {
  static std::function<std::optional<TensorClass>(const Tensor&)> hook;
  return hook;
}

bool has(const Tensor& t, std::initializer_list<DispatchKey> keys) {
  return t.key_set().has_any(c10::DispatchKeySet(keys));
}

TensorClass class_of(const Tensor& t) {
  if (has(t, {DispatchKey::Python}) && class_hook()) {
    if (auto found = class_hook()(t)) return std::move(*found);
  }
  if (has(t, {DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
              DispatchKey::Batched})) {
    return {"a tensor of a torch.func transform", "call it outside of the transform"};
  }
  if (has(t, {DispatchKey::Functionalize})) {
    return {"a functional tensor", "call it outside of functionalization"};
  }
  return {"a tensor that has none", "pass a plain tensor"};
}

/// Only its memory is missing.
bool is_freed(const Tensor& t) {
  return detail::kStoredKeys.has_all(t.key_set()) && t.has_storage();
}

}  // namespace

void refuse_unreadable(const Tensor& t, TensorName name) {
  LIGATURE_CHECK_STATE(!is_freed(t), name(), " must have memory for ", t.scalar_type(), t.sizes(),
                       ", got ", t.storage().nbytes(),
                       " bytes of it: its storage was freed or made smaller (resize_); fill it "
                       "again before this call");
  LIGATURE_CHECK_TYPE(!t.unsafeGetTensorImpl()->is_nested(), name(),
                      " must be a dense tensor, got a nested one; give its values(), or "
                      "torch.nested.to_padded_tensor() of it");
  LIGATURE_CHECK_TYPE(t.layout() == at::kStrided, name(),
                      " must be a dense tensor, got one with layout ", t.layout(),
                      "; give its to_dense()");
  const TensorClass given = class_of(t);
  LIGATURE_CHECK_TYPE(false, name(), " must be a tensor with memory that kernels can read, got ",
                      given.name, "; ", given.way_out);
}

void set_tensor_classes(std::function<std::optional<TensorClass>(const Tensor&)> find) {
  class_hook() = std::move(find);
}

bool in_fake_mode() {
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::any_modes_set() &&
         TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value();
}

void check_no_fake_mode(TensorName name) {
  LIGATURE_CHECK_STATE(!in_fake_mode(), name(),
                       " cannot compute inside FakeTensorMode, whose tensors have no memory");
}

}  // namespace ligature
