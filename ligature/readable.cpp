#include "ligature/readable.h"

#include <ATen/ops/resolve_neg.h>
#include <ATen/ops/zeros.h>

#include "ligature/meta.h"

namespace ligature {
namespace {

using c10::DispatchKey;

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
      refuse_unreadable(*part, [&] {
        return "a part of " + name() + ", which is in format " + q.format() + ",";
      });
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
  refuse_unreadable(t, name);
}

Value readable(const Value& v, TensorName name) {
  if (!v.is_quantized()) return is_readable(v.tensor()) ? v : Value(readable(v.tensor(), name));
  check_parts(*v.quantized(), name);
  return v;
}

void check_writable(const Tensor& t, TensorName name) {
  if (is_readable(t) || is_lazy(t) || is_stored_subclass(t)) return;
  const QuantizedPtr quantized = quantized_of(t);
  if (quantized == nullptr) refuse_unreadable(t, name);
  check_parts(*quantized, name);
}

bool share_memory(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return false;
  if (a.is_same(b)) return true;
  if (quantized_of(a) != nullptr || quantized_of(b) != nullptr) return false;  // without memory
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

}  // namespace ligature
