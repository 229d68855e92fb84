#include "ligature/kernels/small_buffers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <utility>

#include "ligature/kernels/run_context.h"

namespace ligature {
namespace {

/// On the CPU without the way through the dispatcher.
Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  if (device.is_cpu()) return at::detail::empty_cpu(sizes, dtype);
  return at::empty(sizes, at::TensorOptions(dtype).device(device));
}

}  // namespace

SmallBufferRun::SmallBufferRun(SmallBytes& bytes)
    : bytes_(bytes), outer_(std::exchange(kernels::run_context().buffers, this)) {}

SmallBufferRun::~SmallBufferRun() {
  kernels::run_context().buffers = outer_;
  const int64_t bytes = count_ > 1 ? wanted_ : 0;
  if (bytes_ != bytes) bytes_.set(bytes);
}

OwnBuffers::OwnBuffers() : paused_(std::exchange(kernels::run_context().buffers, nullptr)) {}
OwnBuffers::~OwnBuffers() { kernels::run_context().buffers = paused_; }

Tensor take_small(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                  at::Device device) {
  SmallBufferRun* run = kernels::run_context().buffers;
  if (run == nullptr || device.is_meta()) return {};
  const int64_t item = static_cast<int64_t>(c10::elementSize(dtype));
  constexpr int64_t kAlignment = SmallBufferRun::kAlignment;
  const int64_t bytes = (c10::multiply_integers(sizes) * item + kAlignment - 1) / kAlignment;
  const int64_t rounded = bytes * kAlignment;
  if (rounded > SmallBufferRun::kLargest) return {};
  if (run->wanted_ + rounded > SmallBufferRun::kLimit) return {};
  run->wanted_ += rounded;
  ++run->count_;
  if (!run->memory_.defined()) {
    const int64_t expected = run->bytes_;
    if (expected == 0 || expected < rounded) return {};
    run->memory_ = allocate({expected}, at::kByte, device);
  }
  const Tensor& memory = run->memory_;
  if (run->used_ + rounded > memory.numel() || memory.device() != device) return {};
  auto view =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(memory.storage()),
                                           memory.key_set(), c10::scalarTypeToTypeMeta(dtype));
  if (strides.empty()) {
    view->set_sizes_contiguous(sizes);
  } else {
    view->set_sizes_and_strides(sizes, strides);
  }
  view->set_storage_offset(run->used_ / item);
  run->used_ += rounded;
  return Tensor(std::move(view));
}

Tensor empty_small(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  Tensor made = take_small(sizes, {}, dtype, options.device());
  return made.defined() ? made : allocate(sizes, dtype, options.device());
}

}  // namespace ligature
