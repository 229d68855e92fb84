// The gradients of the groups' biases and of the rows' scales. Without atomics: every sum is made
// in an order that depends on sizes alone.
#include <cuda_runtime.h>

#include <algorithm>

#include "ligature/backend/cuda/activation_launch.h"
#include "ligature/backend/cuda/device/columns.cuh"
#include "ligature/backend/cuda/grouped_launch.h"

namespace ligature::cuda {
namespace {

template <typename Args>
__device__ __forceinline__ int64_t source_of(const Args& args, int64_t row) {
  if (args.index == nullptr) return row;
  const int32_t from = args.index[row];
  return from >= 0 && from < args.x_rows ? from : -1;
}

/// A block has a part of a group's rows; it sums them as bias_backward does.
template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    bias_partials_kernel(const GroupedBiasArgs args, const ColumnGrid grid) {
  __shared__ float shared[kColumnThreads * N];
  const auto part = static_cast<int32_t>(blockIdx.x / static_cast<unsigned int>(grid.across));
  if (part >= args.groups.tiles()) return;
  const TileRows rows = rows_of_part(args.groups, part);
  ColumnWalk<N> walk(grid, 0, args.columns);
  walk.first = rows.begin;
  walk.end = rows.end;
  const T* x = static_cast<const T*>(args.x) + walk.column;
  float sums[N] = {};
  if (walk.inside) {
#pragma unroll 4
    for (int64_t row = walk.first + walk.row_lane; row < walk.end; row += walk.row_lanes) {
      const int64_t from = source_of(args, row);
      if (from < 0) continue;
      const Packed<T, N> values = load_packed<N>(x + from * args.columns);
      const float scale = args.scale == nullptr ? 1.0f : args.scale[row];
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(scale, values[i]));
    }
  }
  add_row_lanes(sums, walk, grid.lanes, shared);
  if (walk.row_lane != 0 || !walk.inside) return;
  store<N>(args.partials + part * args.columns + walk.column, sums);
}

constexpr int kSumRows = 16;  // as sum_partials has them

template <typename T>
__global__ void __launch_bounds__(kWarp* kSumRows) bias_sums_kernel(const GroupedBiasArgs args) {
  __shared__ float sums[kSumRows][kWarp];
  const auto group = static_cast<int32_t>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row_lane = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t column = int64_t{blockIdx.y} * kWarp + lane;
  const int32_t end = args.groups.tile_ends[group];
  float sum = 0.0f;
  if (column < args.columns) {
#pragma unroll 8
    for (int32_t part = args.groups.first_tile(group) + row_lane; part < end; part += kSumRows) {
      sum = __fadd_rn(sum, args.partials[part * args.columns + column]);
    }
  }
  sums[row_lane][lane] = sum;
  __syncthreads();
  if (row_lane != 0 || column >= args.columns) return;
#pragma unroll
  for (int i = 1; i < kSumRows; ++i) sum = __fadd_rn(sum, sums[i][lane]);
  static_cast<T*>(args.db)[group * args.columns + column] = from_float<T>(sum);
}

/// A warp has a row.
template <typename T, int N>
__global__ void __launch_bounds__(256) scale_grad_kernel(const GroupedScaleArgs args) {
  const int64_t row = (int64_t{blockIdx.x} * 256 + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (row >= args.rows) return;
  float sum = 0.0f;
  const int64_t from = row < args.groups.last() ? source_of(args, row) : -1;
  if (from >= 0) {
    const int64_t of_group =
        find_group(args.groups.ends, args.groups.count, row) * args.bias_stride;
    const T* x = static_cast<const T*>(args.x) + from * args.columns;
    for (int64_t column = lane * N; column < args.columns; column += kWarp * N) {
      const Packed<T, N> values = load_packed<N>(x + column);
      float bias[N];
      read_parameter<T>(args.bias, args.bias_type, of_group + column, 0.0f, bias);
#pragma unroll
      for (int i = 0; i < N; ++i) sum = __fadd_rn(sum, __fmul_rn(values[i], bias[i]));
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) args.out[row] = sum;
}

}  // namespace

ColumnGrid grouped_bias_grid(const GroupedBiasArgs& args, int sm_count) {
  BiasArgs of_many;
  of_many.rows = int64_t{1} << 40;
  of_many.columns = args.columns;
  of_many.x = args.x;
  of_many.type = args.type;
  return bias_backward_grid(of_many, sm_count);
}

Cut grouped_bias_cut(const ColumnGrid& grid) {
  return {static_cast<int32_t>(least_rows(grid.lanes)), static_cast<int32_t>(grid.down)};
}

void launch_grouped_bias_partials(const GroupedBiasArgs& args, const ColumnGrid& grid,
                                  Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  const auto blocks = static_cast<unsigned int>(
      most_parts(args.rows, args.groups.count, grouped_bias_cut(grid)) * grid.across);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (grid.piece > 1) {
      bias_partials_kernel<T, kVector<T>><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    } else {
      bias_partials_kernel<T, 1><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    }
  });
}

void launch_grouped_bias_sums(const GroupedBiasArgs& args, Stream stream) {
  if (args.groups.count == 0 || args.columns == 0) return;
  const dim3 grid(static_cast<unsigned int>(args.groups.count),
                  static_cast<unsigned int>(parts_of(args.columns, kWarp)));
  with_type(args.type, [&](auto zero) {
    bias_sums_kernel<decltype(zero)><<<grid, kWarp * kSumRows, 0, stream>>>(args);
  });
}

void launch_grouped_scale_grad(const GroupedScaleArgs& args, Stream stream) {
  if (args.rows == 0) return;
  const auto blocks = static_cast<unsigned int>(parts_of(args.rows, 256 / kWarp));
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVector<T>;
    if (allows_vectors<N>(args.x, args.type, args.columns) &&
        allows_vectors<N>(args.bias, args.bias_type, args.columns) && args.bias_stride % N == 0) {
      scale_grad_kernel<T, N><<<blocks, 256, 0, stream>>>(args);
    } else {
      scale_grad_kernel<T, 1><<<blocks, 256, 0, stream>>>(args);
    }
  });
}

}  // namespace ligature::cuda
