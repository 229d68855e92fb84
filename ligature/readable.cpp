#include "ligature/readable.h"

#include <ATen/ops/resolve_neg.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "ligature/meta.h"

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

[[noreturn]] void refuse(const Tensor& t, TensorName name) {
  LIGATURE_CHECK_STATE(!is_freed(t), name(), " must have memory for ", to_string(ValueMeta::of(t)),
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

/// Torch works its values out when they are asked for, from memory that is there.
bool is_lazy(const Tensor& t) {
  constexpr c10::DispatchKeySet keys =
      detail::kStoredKeys | c10::DispatchKeySet({DispatchKey::Negative, DispatchKey::Conjugate});
  return keys.has_all(t.key_set()) && detail::has_memory(*t.unsafeGetTensorImpl());
}

/// A class of a language binding whose tensors have memory.
bool is_stored_subclass(const Tensor& t) {
  constexpr c10::DispatchKeySet keys = detail::kStoredKeys | c10::python_ks;
  if (!keys.has_all(t.key_set()) || !t.has_storage()) return false;
  auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return storage->_mutable_data_ptr_no_checks().get() != nullptr &&
         detail::has_memory(*t.unsafeGetTensorImpl());
}

void check_parts(const QuantizedTensor& q, TensorName name) {
  for (const auto* matrix : {&q.rowwise(), &q.columnwise()}) {
    for (const Tensor* part : {&matrix->data, &matrix->scale, &matrix->amax}) {
      if (!part->defined() || is_readable(*part)) continue;
      refuse(*part,
             [&] { return "a part of " + name() + ", which is in format " + q.format() + ","; });
    }
  }
}

}  // namespace

Tensor readable(const Tensor& t, TensorName name) {
  if (is_readable(t)) return t;
  if (const QuantizedPtr quantized = quantized_of(t)) {
    check_parts(*quantized, name);
    return quantized->dequantize();
  }
  if (t._is_zerotensor()) return at::zeros(t.sizes(), t.options());
  if (is_lazy(t)) return at::resolve_neg(t);
  if (is_stored_subclass(t)) return t;
  refuse(t, name);
}

Value readable(const Value& v, TensorName name) {
  if (!v.is_quantized()) return is_readable(v.tensor()) ? v : Value(readable(v.tensor(), name));
  check_parts(*v.quantized(), name);
  return v;
}

void check_writable(const Tensor& t, TensorName name) {
  if (is_readable(t) || is_lazy(t) || is_stored_subclass(t)) return;
  const QuantizedPtr quantized = quantized_of(t);
  if (quantized == nullptr) refuse(t, name);
  check_parts(*quantized, name);
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

void set_tensor_classes(std::function<std::optional<TensorClass>(const Tensor&)> find) {
  class_hook() = std::move(find);
}

}  // namespace ligature
