// Sums over the threads of a warp or of a block, in an order that depends on the number of threads
// alone; every thread gets the result.
#pragma once

namespace ligature::cuda {

constexpr int kWarp = 32;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

/// Sums one to `MaxK` values at a time over groups of `Warps` neighbouring warps, each group by
/// itself: the threads of a group call it together, and wait for no other group. Its shared memory
/// is in two halves used in turn, so that one barrier per sum is enough.
template <int Warps, int MaxK = 1, int Groups = 1>
class BlockSum {
 public:
  struct Shared {
    float partial[2][Groups][Warps][MaxK];
  };

  __device__ explicit BlockSum(Shared& shared) : shared_(shared) {}

  template <int K>
  __device__ __forceinline__ void operator()(float (&values)[K]) {
    static_assert(K <= MaxK);
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = warp_sum(values[k]);
    if constexpr (Warps > 1) {
      const int warp = static_cast<int>(threadIdx.x) / kWarp;
      float (&partial)[Warps][MaxK] = shared_.partial[half_][warp / Warps];
      half_ ^= 1;
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) partial[warp % Warps][k] = values[k];
      }
      wait(warp / Warps);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float sum = partial[0][k];
#pragma unroll
        for (int other = 1; other < Warps; ++other) sum = __fadd_rn(sum, partial[other][k]);
        values[k] = sum;
      }
    }
  }

  /// Waits as in a sum, for a group that has none to add while others do: compute-sanitizer takes
  /// blocks whose groups waited unequally often for a race at the next __syncthreads().
  __device__ __forceinline__ void pass() {
    if constexpr (Warps > 1) wait(static_cast<int>(threadIdx.x) / kWarp / Warps);
  }

 private:
  static_assert(Warps == 1 || Groups < 16, "a block has 16 barriers");

  static __device__ __forceinline__ void wait(int group) {
    if constexpr (Groups == 1) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(Warps * kWarp) : "memory");
    }
  }

  Shared& shared_;
  int half_ = 0;
};

}  // namespace ligature::cuda
