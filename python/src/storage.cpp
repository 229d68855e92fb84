// Parts of a tensor as checkpoints want them.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include "bindings.h"
#include "ligature/value.h"

namespace ligature::python {
namespace {

/// Rows of a tensor in a storage of their own over the same memory: a file that holds whole
/// storages then holds these rows alone, and no tool finds two entries in one storage. A tensor
/// whose memory is not at hand is narrowed as usual.
Tensor rows_alone(const Tensor& whole, int64_t first, int64_t count) {
  const at::NoGradGuard no_grad;
  const Tensor rows = whole.detach().narrow(0, first, count);
  const bool plain = !whole.key_set().has(c10::DispatchKey::Python) && whole.has_storage() &&
                     quantized_of(whole) == nullptr && !whole.is_meta() && rows.numel() > 0 &&
                     rows.is_contiguous() && whole.storage().data() != nullptr;
  if (!plain) return rows;
  const Tensor kept = whole.detach();
  Tensor alone =
      at::from_blob(rows.data_ptr(), rows.sizes(), [kept](void*) {}, rows.options(), rows.device());
  if (!whole.is_inference()) {
    torch::autograd::impl::set_version_counter(alone,
                                               torch::autograd::impl::version_counter(whole));
  }
  return alone;
}

}  // namespace

void bind_storage(py::module_& m) {
  m.def("rows_alone", &rows_alone, py::arg("whole"), py::arg("first"), py::arg("count"));
}

}  // namespace ligature::python
