#include "ligature/backend/cuda/generator.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <mutex>

namespace ligature::cuda {

RandomState draw(at::Device device, uint64_t count) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  at::PhiloxCudaState drawn;
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    drawn = generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(count);
  }
  RandomState state;
  if (drawn.captured_) {
    state.seed_at = drawn.seed_.ptr;
    state.offset_at = drawn.offset_.ptr;
    state.offset = drawn.offset_intragraph_;
  } else {
    state.seed = drawn.seed_.val;
    state.offset = drawn.offset_.val;
  }
  return state;
}

}  // namespace ligature::cuda
