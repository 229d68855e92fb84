// The source of a tile that is a matrix in memory, of any size and alignment.
#pragma once

#include "ligature/backend/cuda/device/tile.cuh"

namespace ligature::cuda {

/// Copies 16 bytes to shared memory while the thread goes on.
__device__ __forceinline__ void copy_16(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <typename T>
struct PlainSource {
  using Value = T;
  static constexpr int kTiles = 1;
  static constexpr int kResident = sizeof(T) == 4 ? 3 : 5;

  struct Arguments {
    const T* x;
    bool vectors;  ///< rows begin at multiples of 16 bytes and are whole vectors long
  };

  static __device__ __forceinline__ int64_t apart(const QuantizePlan&) { return 0; }

  static __device__ __forceinline__ void fill(const Arguments& source, const QuantizePlan& plan,
                                              TilePlace place, uint32_t* tile) {
    constexpr int kAcross = kTile / kVector<T>;
    constexpr int kRows = kTileThreads / kAcross;
    const int column = threadIdx.x % kAcross * kVector<T>;
    const int64_t c = place.column + column;
    const int64_t count = plan.columns - c;
#pragma unroll
    for (int row = threadIdx.x / kAcross; row < kTile; row += kRows) {
      const int64_t r = place.row + row;
      uint4* to = tile_vector<T>(tile, row, column);
      const T* from = source.x + r * plan.columns + c;
      if (r < plan.rows && count > 0 && source.vectors) {
        copy_16(to, from);
      } else {
        const int given =
            r < plan.rows ? static_cast<int>(min(max(count, int64_t{0}), int64_t{kVector<T>})) : 0;
        const Packed<T, kVector<T>> packed = load_packed_part<kVector<T>>(from, given);
        *reinterpret_cast<Packed<T, kVector<T>>*>(to) = packed;
      }
    }
    wait_for_copies();
  }
};

}  // namespace ligature::cuda
