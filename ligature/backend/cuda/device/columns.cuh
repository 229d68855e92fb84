// Where a thread stands in a matrix that is walked down its columns: `lanes` threads of a block lie
// across a row, N neighbouring columns each, and the others take the rows below. A thread's columns
// never change, so its sums over rows stay in registers. N divides the columns.
#pragma once

#include "ligature/backend/cuda/column_grid.h"
#include "ligature/backend/cuda/device/column_sizes.h"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/device/row_access.cuh"

namespace ligature::cuda {

template <int N>
struct ColumnWalk {
  int lane;            // across the block's part of a row
  int row_lane;        // which of the rows at a time
  int row_lanes;       // how many rows at a time
  int64_t column;      // the first of N
  bool inside;         // are they in the matrix?
  int64_t first, end;  // the block's rows

  /// Blocks that lie across come first, so that neighbours read neighbouring memory.
  __device__ __forceinline__ ColumnWalk(const ColumnGrid& grid, int64_t rows, int64_t columns) {
    const unsigned int across = static_cast<unsigned int>(grid.across);
    const int64_t block_across = blockIdx.x % across;
    const int64_t block_down = blockIdx.x / across;
    lane = static_cast<int>(threadIdx.x) % grid.lanes;
    row_lane = static_cast<int>(threadIdx.x) / grid.lanes;
    row_lanes = kColumnThreads / grid.lanes;
    column = (block_across * grid.lanes + lane) * N;
    inside = column < columns;
    const int64_t per_block = (rows + grid.down - 1) / grid.down;
    first = block_down * per_block;
    end = first + per_block < rows ? first + per_block : rows;
  }
};

/// The block's sums over its rows, one per column, for the threads of its first row; the rows'
/// lanes are added in order. All threads of the block take part; `shared`: kColumnThreads * N
/// floats.
template <int N>
__device__ __forceinline__ void add_row_lanes(float (&values)[N], const ColumnWalk<N>& walk,
                                              int lanes, float* shared) {
  if (walk.row_lanes == 1) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) shared[i * kColumnThreads + threadIdx.x] = values[i];
  __syncthreads();
  if (walk.row_lane != 0) return;
  for (int other = 1; other < walk.row_lanes; ++other) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = __fadd_rn(values[i], shared[i * kColumnThreads + other * lanes + walk.lane]);
    }
  }
}

}  // namespace ligature::cuda
