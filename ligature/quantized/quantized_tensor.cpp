#include "ligature/quantized/quantized_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include "ligature/check.h"
#include "ligature/meta.h"
#include "ligature/quantized/torch_functions.h"

namespace ligature {
namespace {

using kernels::QuantizedMatrix;

std::array<const at::Tensor*, 6> all_of(const kernels::QuantizedPair& parts) {
  return {&parts.rowwise.data,    &parts.rowwise.scale,    &parts.rowwise.amax,
          &parts.columnwise.data, &parts.columnwise.scale, &parts.columnwise.amax};
}

std::array<at::Tensor*, 6> all_of(kernels::QuantizedPair& parts) {
  return {&parts.rowwise.data,    &parts.rowwise.scale,    &parts.rowwise.amax,
          &parts.columnwise.data, &parts.columnwise.scale, &parts.columnwise.amax};
}

int64_t product(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

struct QuantizedMeta : c10::BackendMeta {
  explicit QuantizedMeta(QuantizedPtr q) : quantized(std::move(q)) {}
  QuantizedPtr quantized;
  at::Tensor initial;  // in high precision, where it was kept
};

QuantizedMeta* meta_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return dynamic_cast<QuantizedMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

std::function<at::Tensor(const QuantizedPtr&)>& wrapper_hook() {
  static std::function<at::Tensor(const QuantizedPtr&)> hook;
  return hook;
}

}  // namespace

QuantizedTensor::QuantizedTensor(Format format, std::vector<int64_t> sizes, at::ScalarType dtype,
                                 kernels::QuantizedPair parts, QuantizerPtr quantizer)
    : format_(format),
      sizes_(std::move(sizes)),
      dtype_(dtype),
      parts_(std::move(parts)),
      quantizer_(std::move(quantizer)) {
  LIGATURE_CHECK(!sizes_.empty(), "a quantized tensor has at least one dimension, got none");
  const auto all = all_of(parts_);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i]->defined()) continue;
    present_ |= uint8_t(1) << i;
    device_ = all[i]->device();
  }
}

int64_t QuantizedTensor::rows() const {
  return product(at::IntArrayRef(sizes_).slice(0, sizes_.size() - 1));
}

int64_t QuantizedTensor::bytes() const {
  int64_t sum = 0;
  for (const at::Tensor& t : tensors()) sum += t.nbytes();
  return sum;
}

bool QuantizedTensor::is_inference() const {
  for (const at::Tensor* t : all_of(parts_)) {
    if (t->defined()) return t->is_inference();
  }
  return c10::InferenceMode::is_enabled();
}

at::Tensor QuantizedTensor::dequantize(std::optional<at::ScalarType> dtype) const {
  return kernels::dequantize(parts_, format_, sizes_, dtype.value_or(dtype_));
}

std::vector<at::Tensor> QuantizedTensor::tensors() const {
  std::vector<at::Tensor> out;
  for (const at::Tensor* t : all_of(parts_)) {
    if (t->defined()) out.push_back(*t);
  }
  return out;
}

QuantizedPtr QuantizedTensor::with_tensors(std::vector<at::Tensor> tensors) const {
  auto made = std::make_shared<QuantizedTensor>(*this);
  auto all = all_of(made->parts_);
  size_t next = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (((present_ >> i) & 1) == 0) continue;
    LIGATURE_CHECK(next < tensors.size(), "a tensor in format ", format(), " wants more than ",
                   tensors.size(), " parts");
    *all[i] = std::move(tensors[next++]);
  }
  LIGATURE_CHECK(next == tensors.size(), "a tensor in format ", format(), " is made of ", next,
                 " parts, got ", tensors.size());
  if (next > 0) made->device_ = made->tensors().front().device();
  return made;
}

QuantizedPtr QuantizedTensor::shell() const {
  auto made = std::make_shared<QuantizedTensor>(*this);
  made->parts_ = {};
  return made;
}

QuantizedPtr QuantizedTensor::view(std::vector<int64_t> sizes) const {
  LIGATURE_CHECK(!sizes.empty() && product(sizes) == product(sizes_) && sizes.back() == columns(),
                 "a tensor in format ", format(), " of shape ", sizes_string(sizes_),
                 " can be viewed with the same last dimension only, got ", sizes_string(sizes));
  auto made = std::make_shared<QuantizedTensor>(*this);
  made->sizes_ = std::move(sizes);
  return made;
}

QuantizedPtr QuantizedTensor::with_dtype(at::ScalarType dtype) const {
  auto made = std::make_shared<QuantizedTensor>(*this);
  made->dtype_ = dtype;
  return made;
}

QuantizedPtr QuantizedTensor::only(bool rowwise, bool columnwise) const {
  kernels::QuantizedPair parts;
  if (rowwise) parts.rowwise = parts_.rowwise;
  if (columnwise) parts.columnwise = parts_.columnwise;
  LIGATURE_CHECK(parts.rowwise.defined() || parts.columnwise.defined(), "a tensor in format ",
                 format(), " has no ", rowwise ? "row-wise" : "column-wise", " data to keep");
  return std::make_shared<QuantizedTensor>(format_, sizes_, dtype_, std::move(parts), quantizer_);
}

QuantizedPtr QuantizedTensor::map(const std::function<at::Tensor(const at::Tensor&)>& f) const {
  std::vector<at::Tensor> mapped;
  for (const at::Tensor& t : tensors()) mapped.push_back(f(t));
  return with_tensors(std::move(mapped));
}

void QuantizedTensor::make_usage(bool rowwise, bool columnwise) {
  const auto add = [&](QuantizedMatrix& to, const QuantizedMatrix& from, int64_t columns,
                       const char* what) {
    LIGATURE_CHECK(format_.orientations_agree(), "a tensor in format ", format(), " has no ", what,
                   " data, and none can be made from the other");
    to = kernels::transpose(from, format_, columns);
  };
  if (rowwise && !parts_.rowwise.defined()) {
    add(parts_.rowwise, parts_.columnwise, rows(), "row-wise");
  }
  if (columnwise && !parts_.columnwise.defined()) {
    add(parts_.columnwise, parts_.rowwise, columns(), "column-wise");
  }
  *this = QuantizedTensor(format_, sizes_, dtype_, parts_, quantizer_);
}

void QuantizedTensor::copy_from(const QuantizedTensor& other) {
  LIGATURE_CHECK(format_ == other.format_ && sizes_ == other.sizes_ && present_ == other.present_,
                 "wanted a tensor in format ", format(), " of shape ", sizes_string(sizes_),
                 " with the same orientations, got ", other.format(), " of shape ",
                 sizes_string(other.sizes_));
  const auto to = all_of(parts_);
  const auto from = all_of(other.parts_);
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i]->defined()) to[i]->copy_(*from[i]);
  }
}

QuantizedPtr quantized_of(const at::Tensor& tensor) {
  const QuantizedMeta* meta = meta_of(tensor);
  return meta != nullptr ? meta->quantized : nullptr;
}

void attach_quantized(const at::Tensor& wrapper, QuantizedPtr quantized) {
  wrapper.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<QuantizedMeta>(std::move(quantized)));
}

at::Tensor wrap_quantized(const QuantizedPtr& quantized) {
  // It shares the memory of its parts, so it counts versions where they do.
  const c10::InferenceMode as_parts(quantized->is_inference());
  if (wrapper_hook()) return wrapper_hook()(quantized);
  const at::Tensor empty =
      at::empty({0}, at::TensorOptions(quantized->dtype()).device(quantized->device()));
  c10::Storage none = empty.storage();
  at::Tensor wrapper =
      at::detail::make_tensor<c10::TensorImpl>(std::move(none), kWrapperKeys, empty.dtype());
  c10::TensorImpl* impl = wrapper.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(quantized->sizes());
  impl->set_storage_access_should_throw();
  attach_quantized(wrapper, quantized);
  return wrapper;
}

at::Tensor high_precision_init_val(const at::Tensor& weight) {
  const QuantizedMeta* meta = meta_of(weight);
  return meta != nullptr ? meta->initial : at::Tensor();
}

void set_high_precision_init_val(const at::Tensor& weight, at::Tensor values) {
  QuantizedMeta* meta = meta_of(weight);
  LIGATURE_CHECK_TYPE(meta != nullptr, "weight must be a quantized tensor, got a plain one");
  meta->initial = std::move(values);
}

void clear_high_precision_init_val(const at::Tensor& weight) {
  if (QuantizedMeta* meta = meta_of(weight)) meta->initial = at::Tensor();
}

void set_quantized_wrapper(std::function<at::Tensor(const QuantizedPtr&)> wrapper) {
  wrapper_hook() = std::move(wrapper);
}

}  // namespace ligature
