// Integers of any type, and running sums of them over a warp.
#pragma once

#include "ligature/backend/cuda/grouped_launch.h"

namespace ligature::cuda {

__device__ __forceinline__ int64_t load_integer(const void* from, IntType type, int64_t at) {
  switch (type) {
    case IntType::UInt8:
      return static_cast<const uint8_t*>(from)[at];
    case IntType::Int8:
      return static_cast<const int8_t*>(from)[at];
    case IntType::Int16:
      return static_cast<const int16_t*>(from)[at];
    case IntType::Int32:
      return static_cast<const int32_t*>(from)[at];
    case IntType::Int64:
      break;
  }
  return static_cast<const int64_t*>(from)[at];
}

/// The sum of the values of this lane and those before it.
template <typename T>
__device__ __forceinline__ T warp_sum_up_to(T value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(0xffffffffu, value, static_cast<unsigned int>(distance));
    if (lane >= distance) value += before;
  }
  return value;
}

}  // namespace ligature::cuda
