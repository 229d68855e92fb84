#include "ligature/backend/cuda/workspace.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>

#include <map>
#include <mutex>
#include <utility>

namespace ligature::cuda {

size_t workspace_limit(int device) {
  const auto* properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  return size_t{properties->major >= 9 ? 32U : 8U} << 20;
}

bool is_capturing(Stream stream) {
  if (stream == nullptr) return false;  // the legacy stream cannot be captured, nor asked meanwhile
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

void* workspace(int device, Stream stream, size_t bytes, bool capturing, at::TensorBase& keep) {
  if (bytes == 0) return nullptr;
  const auto allocate = [&](size_t size) {
    return at::detail::empty_cuda({static_cast<int64_t>(size)}, at::kByte,
                                  at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)),
                                  std::nullopt);
  };
  if (capturing) {
    keep = allocate(bytes);
    return keep.mutable_data_ptr();
  }
  struct Known {
    int device = -1;
    Stream stream = nullptr;
    void* memory = nullptr;
  };
  thread_local Known last;
  if (last.device == device && last.stream == stream) return last.memory;
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<int, Stream>, at::TensorBase>;  // never given back
  const std::lock_guard<std::mutex> lock(mutex);
  at::TensorBase& memory = (*all)[{device, stream}];
  if (!memory.defined()) memory = allocate(workspace_limit(device));
  last = {device, stream, memory.mutable_data_ptr()};
  return last.memory;
}

}  // namespace ligature::cuda
