// Where groups of rows end. One block goes through the sizes, as many at a time as it has threads.
#include <cuda_runtime.h>

#include "ligature/backend/cuda/device/integers.cuh"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/grouped_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 1024;

/// The sum of the values of this thread and those before it in the block.
__device__ __forceinline__ int64_t sum_up_to(int64_t value, int64_t* warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  value = warp_sum_up_to(value, lane);
  __syncthreads();
  if (lane == kWarp - 1) warps[warp] = value;
  __syncthreads();
  if (warp == 0) warps[lane] = warp_sum_up_to(warps[lane], lane);
  __syncthreads();
  return warp == 0 ? value : value + warps[warp - 1];
}

__global__ void __launch_bounds__(kThreads) group_ends_kernel(const SplitsArgs args) {
  static_assert(kThreads / kWarp == kWarp);
  __shared__ int64_t warps[kWarp];
  __shared__ int32_t ends[kThreads];
  int64_t rows_before = 0, tiles_before = 0;
  for (int32_t first = 0; first < args.count; first += kThreads) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x), group = first + thread;
    const bool inside = group < args.count;
    const int64_t size =
        inside ? counted_size(load_integer(args.splits, args.type, group), args.rows) : 0;
    const int64_t sum = rows_before + sum_up_to(size, warps);
    const int32_t end = group_end(sum, args.rows);
    ends[thread] = end;
    __syncthreads();
    const int32_t begin = thread == 0 ? group_end(rows_before, args.rows) : ends[thread - 1];
    const int64_t tiles = tiles_before + sum_up_to(args.cut.parts(end - begin), warps);
    if (inside) {
      args.ends[group] = end;
      args.tile_ends[group] = static_cast<int32_t>(tiles);
    }
    // Of the last thread, for the next ones.
    __syncthreads();
    __shared__ int64_t last[2];
    if (thread == kThreads - 1) {
      last[0] = sum;
      last[1] = tiles;
    }
    __syncthreads();
    rows_before = last[0];
    tiles_before = last[1];
  }
}

__global__ void known_ends_kernel(const KnownEnds args) {
  const int group = static_cast<int>(threadIdx.x);
  if (group >= args.count) return;
  args.to_ends[group] = args.ends[group];
  args.to_tile_ends[group] = args.tile_ends[group];
}

}  // namespace

void launch_group_ends(const SplitsArgs& args, Stream stream) {
  if (args.count > 0) group_ends_kernel<<<1, kThreads, 0, stream>>>(args);
}

void launch_known_ends(const KnownEnds& args, Stream stream) {
  if (args.count > 0) known_ends_kernel<<<1, 256, 0, stream>>>(args);
}

}  // namespace ligature::cuda
