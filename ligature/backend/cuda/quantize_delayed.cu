// The update of delayed scaling at the end of a step: all tensors of the step in one kernel, a
// block for each.
#include "ligature/backend/cuda/device/float8.cuh"
#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ bool is_finite(float v) {
  return (__float_as_uint(v) & kMagnitudeBits) < kInfinityBits;
}

// The history moves by one from its end to its beginning, a piece at a time: all of a piece is read
// before any of it is written.
__global__ void __launch_bounds__(kThreads)
    delayed_update(const __grid_constant__ DelayedUpdate update) {
  __shared__ float largest_of_warps[kThreads / 32];
  const DelayedEntry& entry = update.entries[blockIdx.x];
  if (entry.noted != nullptr && *entry.noted < 0.0f) {
    if (threadIdx.x == 0) *entry.updated = *entry.scale;
    return;
  }
  const float newest = *entry.amax;
  float largest = threadIdx.x == 0 ? newest : 0.0f;
  for (int end = entry.length; end > 1; end -= kThreads) {
    const int i = end - 1 - static_cast<int>(threadIdx.x);  // 1 .. length - 1 gets i - 1's
    const float value = i >= 1 ? entry.history[i - 1] : 0.0f;
    __syncthreads();
    if (i >= 1) entry.history[i] = value;
    largest = fmaxf(largest, value);
  }
  __syncthreads();
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
  }
  if (threadIdx.x % 32 == 0) largest_of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const float other : largest_of_warps) largest = fmaxf(largest, other);
  entry.history[0] = newest;
  *entry.amax = 0.0f;
  const float amax = update.most_recent ? newest : largest;
  const float scale = rounded_quotient(rounded_quotient(entry.max_value, amax), update.divisor);
  const bool usable = amax != 0.0f && is_finite(amax) && is_finite(scale) && scale != 0.0f;
  *entry.updated = usable ? scale : *entry.scale;
}

}  // namespace

void launch_delayed_update(const DelayedUpdate& update, int count, Stream stream) {
  if (count > 0) delayed_update<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(update);
}

}  // namespace ligature::cuda
