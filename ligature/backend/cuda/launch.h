// What the torch side of the CUDA backend needs around a launch: the tensor's type, device and
// stream as the .cu files know them, and the launch itself.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ligature/backend/cuda/launch_queue.h"
#include "ligature/backend/cuda/runs.h"
#include "ligature/backend/cuda/types.h"
#include "ligature/check.h"
#include "ligature/kernels/small_buffers.h"

namespace ligature::cuda {

/// Holds the tensor's device as the current one; before the first allocation or launch.
using DeviceGuard = c10::cuda::CUDAGuard;

inline Type type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Type::Float32;
    case at::kHalf:
      return Type::Float16;
    case at::kBFloat16:
      return Type::BFloat16;
    default:
      LIGATURE_CHECK_TYPE(false, "[cuda] tensor must be float32, float16 or bfloat16, got ", dtype);
  }
}

inline Type type_of(const Tensor& x) { return type_of(x.scalar_type()); }

/// The current stream of the tensor's device.
inline Stream stream_of(const Tensor& x) {
  return c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
}

/// Where a tensor is, or one without memory that stands for one here.
inline at::Device place_of(const Tensor& x) {
  return x.is_cuda() ? x.device() : at::Device(at::kCUDA, c10::cuda::current_device());
}

/// Multiprocessors of the tensor's device; asked once.
int sm_count(const Tensor& x);

/// Memory for results, row-major, without the way through the dispatcher.
inline Tensor empty_on(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  Tensor made(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
  if (LaunchQueue* queue = LaunchQueue::current()) queue->hold(made);
  return made;
}
/// The same for what the steps of a run have among themselves; see small_buffers.h.
inline Tensor small_on(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  Tensor made = take_small(sizes, {}, dtype, device);
  if (!made.defined()) return empty_on(sizes, dtype, device);
  if (LaunchQueue* queue = LaunchQueue::current()) queue->hold(made);
  return made;
}
inline Tensor empty_as(const Tensor& x) { return empty_on(x.sizes(), x.scalar_type(), x.device()); }
/// Rows of another length, as many as x has.
inline Tensor empty_rows(const Tensor& x, int64_t columns) {
  if (x.dim() == 2) return empty_on({x.size(0), columns}, x.scalar_type(), x.device());
  at::DimVector shape(x.sizes());
  shape.back() = columns;
  return empty_on(shape, x.scalar_type(), x.device());
}

/// Null for an undefined tensor.
inline const void* data_of(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
inline void* mutable_data_of(const Tensor& x) {
  return x.defined() ? x.mutable_data_ptr() : nullptr;
}

/// The dtype itself where kernels read and write it, float32 for the rest (a double parameter).
inline at::ScalarType served(at::ScalarType dtype) {
  return computes_in(dtype) ? dtype : at::kFloat;
}

/// Without the call into the dispatcher where nothing changes.
inline Tensor cast(const Tensor& t, at::ScalarType dtype) {
  return !t.defined() || t.scalar_type() == dtype ? t : t.to(dtype);
}

inline Tensor serve(const Tensor& t) { return t.defined() ? cast(t, served(t.scalar_type())) : t; }

}  // namespace ligature::cuda
