// See sums_launch.h. A block sums 32 columns; its 16 rows of threads take the partials in turn and
// are added in order at the end.
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/sums_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kRowThreads = 16;

__device__ __forceinline__ void store_one(void* out, Type type, int64_t at, float value) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(out)[at] = from_float<T>(value);
  });
}

__global__ void __launch_bounds__(kWarp* kRowThreads)
    sum_partials_kernel(PartialSums first, PartialSums second, int64_t count, int64_t columns) {
  __shared__ float sums[kRowThreads][kWarp];
  const float* partials = blockIdx.y == 0 ? first.partials : second.partials;
  void* out = blockIdx.y == 0 ? first.out : second.out;
  const Type type = blockIdx.y == 0 ? first.type : second.type;
  if (out == nullptr) return;
  for (int64_t begin = int64_t{blockIdx.x} * kWarp; begin < columns;
       begin += int64_t{gridDim.x} * kWarp) {
    const int64_t column = begin + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
      const float* from = partials + column;
#pragma unroll 8
      for (int64_t i = threadIdx.y; i < count; i += kRowThreads) {
        sum = __fadd_rn(sum, from[i * columns]);
      }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
#pragma unroll
      for (int i = 1; i < kRowThreads; ++i) sum = __fadd_rn(sum, sums[i][threadIdx.x]);
      store_one(out, type, column, sum);
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(256)
    sum_row_partials_kernel(PartialSums sums, int64_t rows, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x / kWarp;
  int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (; row < rows; row += step) {
    float sum = 0.0f;
    for (int64_t i = lane; i < count; i += kWarp) {
      sum = __fadd_rn(sum, sums.partials[row * count + i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) store_one(sums.out, sums.type, row, sum);
  }
}

unsigned int blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned int>(blocks < 65536 ? blocks : 65536);
}

}  // namespace

void launch_sum_partials(const PartialSums& first, const PartialSums& second, int64_t count,
                         int64_t columns, Stream stream) {
  if (columns == 0) return;
  const dim3 grid(blocks_for(columns, kWarp), second.out == nullptr ? 1 : 2);
  sum_partials_kernel<<<grid, dim3(kWarp, kRowThreads), 0, stream>>>(first, second, count, columns);
}

void launch_sum_row_partials(const PartialSums& sums, int64_t rows, int64_t count, Stream stream) {
  if (rows == 0) return;
  sum_row_partials_kernel<<<blocks_for(rows, 8), 256, 0, stream>>>(sums, rows, count);
}

}  // namespace ligature::cuda
