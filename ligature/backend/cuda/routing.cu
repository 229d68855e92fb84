// Routing: a stable counting sort of slots by their expert, and sums of rows back at their tokens.
#include <cuda_runtime.h>

#include <algorithm>

#include "ligature/backend/cuda/device/integers.cuh"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/device/row_access.cuh"
#include "ligature/backend/cuda/routing_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kWarps = 4;  // of a block
constexpr uint32_t kAll = 0xffffffffu;

__device__ __forceinline__ int lane_here() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int32_t warp_here() {
  return static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / kWarp;
}

/// Calls f(slot, expert, same) for the warp's slots, 32 at a time in their order. `expert` is -1
/// for none, and `same` are the lanes with the same one; `slot` is -1 behind the warp's last.
template <typename F>
__device__ __forceinline__ void for_each_slot(const RouteArgs& args, int32_t warp, const F& f) {
  const int32_t end = args.grid.end(warp);
  for (int64_t first = args.grid.first(warp); first < end; first += kWarp) {
    const int32_t slot = first + lane_here() < end ? static_cast<int32_t>(first) + lane_here() : -1;
    const int64_t number = slot < 0 ? -1 : load_integer(args.experts_of, args.type, slot);
    const int32_t expert = is_expert(number, args.experts) ? static_cast<int32_t>(number) : -1;
    f(slot, expert, __match_any_sync(kAll, expert));
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kWarps* kWarp) route_counts_kernel(const RouteArgs args) {
  const int32_t warp = warp_here();
  if (warp >= args.grid.warps) return;
  int32_t* counts = args.counts + warp;
  const int64_t stride = args.grid.warps;
  for (int32_t expert = lane_here(); expert < args.experts; expert += kWarp) {
    counts[expert * stride] = 0;
  }
  __syncwarp();
  for_each_slot(args, warp, [&](int32_t, int32_t expert, uint32_t same) {
    if (expert >= 0 && lanes_before(same, lane_here()) == 0) {
      counts[expert * stride] += __popc(same);
    }
  });
}

/// A warp has an expert.
__global__ void __launch_bounds__(kWarps* kWarp) route_places_kernel(const RouteArgs args) {
  const int32_t expert = warp_here();
  if (expert >= args.experts) return;
  int32_t* counts = args.counts + int64_t{expert} * args.grid.warps;
  int32_t before = 0;
  for (int32_t first = 0; first < args.grid.warps; first += kWarp) {
    const int32_t warp = first + lane_here();
    const int32_t count = warp < args.grid.warps ? counts[warp] : 0;
    const int32_t with = before + warp_sum_up_to(count, lane_here());
    if (warp < args.grid.warps) counts[warp] = with - count;
    before = __shfl_sync(kAll, with, kWarp - 1);
  }
  if (lane_here() == 0) args.splits[expert] = before;
}

__global__ void __launch_bounds__(kWarps* kWarp) route_rows_kernel(const RouteArgs args) {
  const int32_t warp = warp_here();
  if (warp >= args.grid.warps) return;
  int32_t* places = args.counts + warp;
  const int64_t stride = args.grid.warps;
  const int32_t rows = args.groups.last();
  for_each_slot(args, warp, [&](int32_t slot, int32_t expert, uint32_t same) {
    const int32_t rank = lanes_before(same, lane_here());
    int32_t before = 0;
    if (expert >= 0 && rank == 0) {
      before = places[expert * stride];
      places[expert * stride] = before + __popc(same);
    }
    before = __shfl_sync(kAll, before, __ffs(static_cast<int>(same)) - 1);
    if (slot < 0) return;
    const int32_t row = expert < 0 ? -1 : args.groups.begin(expert) + before + rank;
    args.row_of_slot[slot] = row;
    if (row >= 0) args.slot_of_row[row] = slot;
    if (slot >= rows) args.slot_of_row[slot] = -1;
  });
}

/// The row of x that a slot has, or -1.
template <typename Args>
__device__ __forceinline__ int64_t row_of(const Args& args, int64_t slot) {
  const int32_t row = args.row_of_slot[slot];
  return row >= 0 && row < args.x_rows ? row : -1;
}

constexpr int kThreads = 256;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) combine_rows_kernel(const CombineArgs args, int lanes) {
  const int lane = static_cast<int>(threadIdx.x) % lanes, per_block = kThreads / lanes;
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  for (int64_t token = int64_t{blockIdx.x} * per_block + static_cast<int>(threadIdx.x) / lanes;
       token < args.tokens; token += int64_t{gridDim.x} * per_block) {
    for (int64_t column = lane * N; column < args.columns; column += int64_t{lanes} * N) {
      float sums[N] = {};
#pragma unroll 4
      for (int64_t k = 0; k < args.top_k; ++k) {
        const int64_t slot = token * args.top_k + k, row = row_of(args, slot);
        if (row < 0) continue;
        const Packed<T, N> values = load_packed<N>(x + row * args.columns + column);
        const float weight =
            args.weights == nullptr ? 1.0f : load_one(args.weights, args.weights_type, slot);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(weight, values[i]));
      }
      store<N>(y + token * args.columns + column, sums);
    }
  }
}

/// A warp has a slot.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) combine_weights_kernel(const CombineGradArgs args) {
  const int64_t slot = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (slot >= args.tokens * args.top_k) return;
  const int64_t row = row_of(args, slot);
  float sum = 0.0f;
  if (row >= 0) {
    const T* x = static_cast<const T*>(args.x) + row * args.columns;
    const T* dy = static_cast<const T*>(args.dy) + slot / args.top_k * args.columns;
    for (int64_t column = lane_here() * N; column < args.columns; column += kWarp * N) {
      const Packed<T, N> a = load_packed<N>(x + column), b = load_packed<N>(dy + column);
#pragma unroll
      for (int i = 0; i < N; ++i) sum = __fadd_rn(sum, __fmul_rn(a[i], b[i]));
    }
  }
  sum = warp_sum(sum);
  if (lane_here() == 0) args.dweights[slot] = sum;
}

unsigned int blocks_of(int64_t warps) { return static_cast<unsigned int>(parts_of(warps, kWarps)); }

}  // namespace

void launch_route_counts(const RouteArgs& args, Stream stream) {
  if (args.grid.warps == 0) return;
  route_counts_kernel<<<blocks_of(args.grid.warps), kWarps * kWarp, 0, stream>>>(args);
}

void launch_route_places(const RouteArgs& args, Stream stream) {
  if (args.experts == 0) return;
  route_places_kernel<<<blocks_of(args.experts), kWarps * kWarp, 0, stream>>>(args);
}

void launch_route_rows(const RouteArgs& args, Stream stream) {
  if (args.grid.warps == 0) return;
  route_rows_kernel<<<blocks_of(args.grid.warps), kWarps * kWarp, 0, stream>>>(args);
}

void launch_combine_rows(const CombineArgs& args, Stream stream) {
  if (args.tokens == 0 || args.columns == 0) return;
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVector<T>;
    const bool vectors = allows_vectors<N>(args.x, args.type, args.columns) &&
                         allows_vectors<N>(args.y, args.type, args.columns);
    int lanes = 1;
    while (lanes < kThreads && lanes * (vectors ? N : 1) < args.columns) lanes *= 2;
    const auto blocks = static_cast<unsigned int>(
        std::min<int64_t>(parts_of(args.tokens, kThreads / lanes), 1 << 30));
    if (vectors) {
      combine_rows_kernel<T, N><<<blocks, kThreads, 0, stream>>>(args, lanes);
    } else {
      combine_rows_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(args, lanes);
    }
  });
}

void launch_combine_weights_grad(const CombineGradArgs& args, Stream stream) {
  const int64_t slots = args.tokens * args.top_k;
  if (slots == 0) return;
  const auto blocks = static_cast<unsigned int>(parts_of(slots, kThreads / kWarp));
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVector<T>;
    if (allows_vectors<N>(args.x, args.type, args.columns) &&
        allows_vectors<N>(args.dy, args.type, args.columns)) {
      combine_weights_kernel<T, N><<<blocks, kThreads, 0, stream>>>(args);
    } else {
      combine_weights_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(args);
    }
  });
}

}  // namespace ligature::cuda
