#include "ligature/backend/cuda/gemm_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kTile = 32;
constexpr int kRows = 8;

struct ScaleJobs {
  ScaleJob job[2];
};

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The operand's rows, filled up, of a job with layout Tiled.
__host__ __device__ constexpr int64_t tiled_rows(const ScaleJob& job) {
  return ceil_div(job.rows * job.per_block, 128) * 128;
}

/// A matrix of tiles of 32x32 that covers everything a job writes.
__host__ __device__ constexpr int64_t tile_columns(const ScaleJob& job) {
  return ceil_div(job.layout == ScaleLayout::Filled ? job.ld : job.columns, kTile);
}

__host__ __device__ constexpr int64_t tile_count(const ScaleJob& job) {
  const int64_t rows = job.layout == ScaleLayout::Turned   ? job.ld
                       : job.layout == ScaleLayout::Filled ? job.rows
                                                           : tiled_rows(job);
  return ceil_div(rows, kTile) * tile_columns(job);
}

__device__ void turned(const ScaleJob& job, int64_t row0, int64_t column0,
                       float (*tile)[kTile + 1]) {
  const float* in = static_cast<const float*>(job.in);
  float* out = static_cast<float*>(job.out);
  for (int i = threadIdx.y; i < kTile; i += kRows) {
    const int64_t r = row0 + i, c = column0 + threadIdx.x;
    tile[i][threadIdx.x] = r < job.rows && c < job.columns ? in[r * job.columns + c] : 0.0f;
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += kRows) {
    const int64_t c = column0 + i, r = row0 + threadIdx.x;
    if (c < job.columns && r < job.ld) out[c * job.ld + r] = tile[threadIdx.x][i];
  }
  __syncthreads();
}

__device__ void filled(const ScaleJob& job, int64_t row0, int64_t column0) {
  const float* in = static_cast<const float*>(job.in);
  float* out = static_cast<float*>(job.out);
  for (int i = threadIdx.y; i < kTile; i += kRows) {
    const int64_t r = row0 + i, c = column0 + threadIdx.x;
    if (r >= job.rows || c >= job.ld) continue;
    out[r * job.ld + c] = c < job.columns ? in[r * job.columns + c] : 0.0f;
  }
}

__device__ void tiled(const ScaleJob& job, int64_t row0, int64_t column0) {
  const uint8_t* in = static_cast<const uint8_t*>(job.in);
  uint8_t* out = static_cast<uint8_t*>(job.out);
  const int64_t columns = ceil_div(job.columns, 4) * 4;
  for (int i = threadIdx.y; i < kTile; i += kRows) {
    const int64_t r = row0 + i, c = column0 + threadIdx.x;
    if (c >= columns) continue;
    const int64_t from = r / job.per_block;
    const int64_t tile = (r / 128) * (columns / 4) + c / 4;
    const int64_t inside = r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
    out[tile * 512 + inside] =
        from < job.rows && c < job.columns ? in[from * job.columns + c] : uint8_t{0};
  }
}

__global__ void gemm_scales_kernel(const __grid_constant__ ScaleJobs jobs) {
  __shared__ float tile[kTile][kTile + 1];
  const ScaleJob& job = jobs.job[blockIdx.y];
  const int64_t across = tile_columns(job), count = tile_count(job);
  for (int64_t t = blockIdx.x; t < count; t += gridDim.x) {
    const int64_t row0 = t / across * kTile, column0 = t % across * kTile;
    if (job.layout == ScaleLayout::Turned) {
      turned(job, row0, column0, tile);
    } else if (job.layout == ScaleLayout::Filled) {
      filled(job, row0, column0);
    } else {
      tiled(job, row0, column0);
    }
  }
}

__global__ void gemm_coefficients_kernel(float* out, double alpha, float beta, const float* a,
                                         const float* b) {
  double factor = alpha;
  if (a != nullptr) factor *= static_cast<double>(*a);
  if (b != nullptr) factor *= static_cast<double>(*b);
  out[0] = static_cast<float>(factor);
  out[1] = beta;
}

}  // namespace

int64_t size_of(const ScaleJob& job) {
  switch (job.layout) {
    case ScaleLayout::Turned:
      return job.columns * job.ld;
    case ScaleLayout::Filled:
      return job.rows * job.ld;
    default:
      return tiled_rows(job) * ceil_div(job.columns, 4) * 4;
  }
}

void launch_scales(const ScaleJob* jobs, int count, Stream stream) {
  ScaleJobs both;
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    both.job[i] = jobs[i];
    const int64_t needed = tile_count(jobs[i]);
    tiles = needed > tiles ? needed : tiles;
  }
  if (tiles == 0) return;
  constexpr int64_t kMostBlocks = 1 << 16;
  const dim3 grid(static_cast<unsigned>(tiles < kMostBlocks ? tiles : kMostBlocks),
                  static_cast<unsigned>(count));
  gemm_scales_kernel<<<grid, dim3(kTile, kRows), 0, stream>>>(both);
}

void launch_coefficients(float* out, double alpha, float beta, const float* a, const float* b,
                         Stream stream) {
  gemm_coefficients_kernel<<<1, 1, 0, stream>>>(out, alpha, beta, a, b);
}

}  // namespace ligature::cuda
