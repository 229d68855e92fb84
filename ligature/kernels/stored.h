// Which tensors kernels can read: those whose values lie, all of them, in memory of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <optional>
#include <string>

#include "ligature/kernels/devices.h"

namespace ligature {

using at::Tensor;

/// How an error calls a tensor: "[LayerNorm] weight". Asked only when there is one.
using TensorName = c10::function_ref<std::string()>;

namespace detail {

/// Of a tensor with any other key the values are not simply what lies in its memory. Tensors of
/// torch's own quantized dtypes are refused for their dtype. PrivateUse3 stands for a quantized
/// tensor (quantized/torch_functions.h).
inline constexpr c10::DispatchKeySet kStoredKeys =
    c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::Quantized,
                         c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradFunctionality,
                         c10::DispatchKey::AutogradOther}) |
    c10::autocast_dispatch_keyset |
    c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask)
        .remove_backend(c10::BackendComponent::PrivateUse3Bit);

/// The elements of its storage up to the last one that it reaches.
inline int64_t reach(const c10::TensorImpl& t) {
  if (t.is_contiguous()) return t.storage_offset() + t.numel();
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return last + 1;
}

/// Kernels of devices without a backend are ATen's, and a tensor on the meta device has only a
/// shape.
inline bool has_memory(const c10::TensorImpl& t) {
  if (!t.is_cpu() && (t.is_meta() || kernels::own_backend(t.device_type()) == nullptr)) return true;
  if (!t.has_storage()) return false;
  if (t.numel() == 0) return true;
  c10::StorageImpl* storage = t.unsafe_storage().unsafeGetStorageImpl();
  return storage->_mutable_data_ptr_no_checks().get() != nullptr &&
         reach(t) * static_cast<int64_t>(t.itemsize()) <= static_cast<int64_t>(storage->nbytes());
}

}  // namespace detail

/// May a kernel read it as it is?
inline bool is_readable(const Tensor& t) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  return detail::kStoredKeys.has_all(impl.key_set()) && detail::has_memory(impl);
}

/// Throws inside torch's FakeTensorMode, where results of kernels have no memory.
void check_no_fake_mode(TensorName name);
/// Is this thread inside that mode?
bool in_fake_mode();

/// Says why kernels cannot read `t`, for which !is_readable(t), and the way out.
[[noreturn]] void refuse_unreadable(const Tensor& t, TensorName name);

/// A class of tensors that only a language binding knows.
struct TensorClass {
  std::string name;     ///< "a DTensor"
  std::string way_out;  ///< "pass its local part, to_local()"
};
void set_tensor_classes(std::function<std::optional<TensorClass>(const Tensor&)> find);

}  // namespace ligature
