#include "ligature/backend/cuda/workspace.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace ligature::cuda {
namespace {

at::TensorBase allocate(int device, size_t bytes) {
  return at::detail::empty_cuda({static_cast<int64_t>(bytes)}, at::kByte,
                                at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)),
                                std::nullopt);
}

// In a thread of its own: what this one allocates may be meant for a graph that torch is about to
// capture, and may live no longer than that. Ordered as memory of the current stream.
at::TensorBase allocate_for_good(int device, size_t bytes) {
  const auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
  at::TensorBase memory;
  std::exception_ptr error;
  std::thread([&] {
    try {
      const c10::cuda::CUDAStreamGuard guard(stream);
      memory = allocate(device, bytes);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error != nullptr) std::rethrow_exception(error);
  return memory;
}

}  // namespace

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
  if (capturing) {
    keep = allocate(device, bytes);
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
  if (!memory.defined()) memory = allocate_for_good(device, workspace_limit(device));
  last = {device, stream, memory.mutable_data_ptr()};
  return last.memory;
}

}  // namespace ligature::cuda
