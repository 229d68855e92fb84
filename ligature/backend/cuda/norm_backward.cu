// The norms backward: dx in one pass over dy and x, with dw and db gathered on the way. The grid is
// as wide as the device; each block walks its rows and leaves one row of partial sums, so the sums'
// order depends on the device alone. Here is the choice between the kernels, and what
// norm_backward_staged.cu does not serve: rows that are not made of whole vectors, and long ones.
#include "ligature/backend/cuda/device/norm.cuh"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/device/row_access.cuh"
#include "ligature/backend/cuda/norm_backward_staged.h"
#include "ligature/backend/cuda/norm_launch.h"

namespace ligature::cuda {
namespace {

__device__ __forceinline__ Statistics kept(const NormBackwardArgs& args, int64_t row) {
  return {args.centered ? args.mean[row] : 0.0f, args.rstd[row]};
}

/// What is the same for all values of a row.
struct RowGrad {
  Statistics s;
  float along = 0.0f, offset = 0.0f;
};

/// rstd * (g - offset - xhat * along) + add.
__device__ __forceinline__ float input_grad(float g, float xhat, const RowGrad& row, float add) {
  return fmaf(g - row.offset - xhat * row.along, row.s.rstd, add);
}

/// A row's values in a thread's registers.
template <typename T, int N, int Pieces>
struct RowPart {
  Packed<T, N> x[Pieces], dy[Pieces];
  Statistics s;

  /// Nothing beyond the last row.
  __device__ __forceinline__ void load(const NormBackwardArgs& args, int64_t row, int first,
                                       int step, int columns) {
    if (row >= args.rows) return;
    const T* x_row = static_cast<const T*>(args.x) + row * columns;
    const T* dy_row = static_cast<const T*>(args.dy) + row * columns;
    s = kept(args, row);
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      x[p] = read_piece<N>(x_row, first + p * step, columns);
      dy[p] = read_piece<N>(dy_row, first + p * step, columns);
    }
  }
};

/// The groups' sums meet in shared memory, two rows of floats, and the last group has them all.
template <int N, int Pieces, int Groups>
__device__ __forceinline__ void add_groups(float (&dw)[Pieces][N], float (&db)[Pieces][N],
                                           float* meeting, int group, int first, int step,
                                           int columns) {
  for (int turn = 0; turn < Groups; ++turn) {
    if (turn > 0) __syncthreads();
    if (group != turn) continue;
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      const int at = first + p * step;
      if (at >= columns) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float& dw_sum = meeting[at + i];
        float& db_sum = meeting[columns + at + i];
        if (turn > 0) {
          dw[p][i] = __fadd_rn(dw_sum, dw[p][i]);
          db[p][i] = __fadd_rn(db_sum, db[p][i]);
        }
        if (turn + 1 < Groups) {
          dw_sum = dw[p][i];
          db_sum = db[p][i];
        }
      }
    }
  }
}

/// A group of `Warps` warps with `Pieces` pieces of N values per thread holds a row; `Groups` of
/// them make a block.
template <typename T, int N, int Warps, int Pieces, int Groups>
__global__ void __launch_bounds__(Warps * Groups * kWarp)
    norm_backward_kernel(const NormBackwardArgs args) {
  constexpr int threads = Warps * kWarp;
  constexpr int step = threads * N;
  extern __shared__ float meeting[];
  __shared__ typename BlockSum<Warps, 2, Groups>::Shared shared;
  BlockSum<Warps, 2, Groups> block_sum(shared);
  const int group = static_cast<int>(threadIdx.x) / threads;
  const int first = static_cast<int>(threadIdx.x) % threads * N;
  const int columns = static_cast<int>(args.columns);
  const float divisor = args.averaged ? static_cast<float>(columns) : 1.0f;
  const bool zero_centered = args.zero_centered && args.w != nullptr;

  float gamma[Pieces][N] = {}, dw[Pieces][N] = {}, db[Pieces][N] = {};
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    if (first + p * step >= columns) continue;
    read_parameter<T>(args.w, args.w_type, first + p * step, 1.0f, gamma[p]);
#pragma unroll
    for (int i = 0; i < N; ++i) gamma[p][i] = gamma_of(gamma[p][i], zero_centered);
  }

  const int64_t stride = int64_t{gridDim.x} * Groups;
  RowPart<T, N, Pieces> next;
  next.load(args, int64_t{blockIdx.x} * Groups + group, first, step, columns);
  // `base` is the block's, so that all its threads meet at the barriers.
  for (int64_t base = int64_t{blockIdx.x} * Groups; base < args.rows; base += stride) {
    const int64_t row = base + group;
    const bool active = row < args.rows;
    RowPart<T, N, Pieces> now = next;
    Packed<T, N> add[Pieces] = {};
    if (args.add != nullptr && active) {
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        add[p] = read_piece<N>(static_cast<const T*>(args.add) + row * columns, first + p * step,
                               columns);
      }
    }
    next.load(args, row + stride, first, step, columns);
    float sums[2] = {0.0f, 0.0f};
    if (active) {
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float dy = now.dy[p][i];
          const float xhat = standardized(now.x[p][i], now.s);
          const float g = dy * gamma[p][i];
          dw[p][i] += dy * xhat;
          db[p][i] += dy;
          sums[0] += g * xhat;
          sums[1] += g;
        }
      }
    }
    if (args.dx == nullptr) continue;
    block_sum(sums);
    if (!active) continue;
    const RowGrad grad{now.s, sums[0] / divisor, args.centered ? sums[1] / divisor : 0.0f};
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      const int at = first + p * step;
      if (at >= columns) continue;
      forget(now.x[p]);
      forget(now.dy[p]);
      float dx[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = standardized(now.x[p][i], now.s);
        dx[i] = input_grad(now.dy[p][i] * gamma[p][i], xhat, grad, add[p][i]);
      }
      store_any<N>(args.dx, args.dx_type, row * columns + at, N, true, dx);
    }
  }

  if (args.dw_partials == nullptr && args.db_partials == nullptr) return;
  if constexpr (Groups > 1) {
    add_groups<N, Pieces, Groups>(dw, db, meeting, group, first, step, columns);
  }
  if (group != Groups - 1) return;
  const int64_t place = int64_t{blockIdx.x} * columns;
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    const int at = first + p * step;
    if (at >= columns) continue;
    if (args.dw_partials != nullptr) store<N>(args.dw_partials + place + at, dw[p]);
    if (args.db_partials != nullptr) store<N>(args.db_partials + place + at, db[p]);
  }
}

constexpr int kLongWarps = 16;

/// values += the block's sums so far, and back; at the block's first row there are none yet.
template <int N>
__device__ __forceinline__ void gather(float* partials, int64_t at, bool begins,
                                       float (&values)[N]) {
  if (partials == nullptr) return;
  if (!begins) {
    float before[N];
    load<N>(partials + at, before);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = __fadd_rn(before[i], values[i]);
  }
  store<N>(partials + at, values);
}

/// For rows of any length: a block per row, read twice (the second time from the caches); the sums
/// are kept in the block's own row of the partial sums.
template <typename T, int N>
__global__ void __launch_bounds__(kLongWarps* kWarp)
    norm_backward_long_kernel(const NormBackwardArgs args) {
  constexpr int64_t step = kLongWarps * kWarp * N;
  __shared__ typename BlockSum<kLongWarps, 2>::Shared shared;
  BlockSum<kLongWarps, 2> block_sum(shared);
  const int64_t first = int64_t{threadIdx.x} * N;
  const int64_t columns = args.columns;
  const int64_t place = int64_t{blockIdx.x} * columns;
  const float divisor = args.averaged ? static_cast<float>(columns) : 1.0f;
  const bool zero_centered = args.zero_centered && args.w != nullptr;

  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* x_row = static_cast<const T*>(args.x) + row * columns;
    const T* dy_row = static_cast<const T*>(args.dy) + row * columns;
    const T* add_row = static_cast<const T*>(args.add) + row * columns;
    const Statistics s = kept(args, row);
    RowGrad grad{s};
    if (args.dx != nullptr) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll 2
      for (int64_t at = first; at < columns; at += step) {
        const Packed<T, N> x = load_packed<N>(x_row + at);
        const Packed<T, N> dy = load_packed<N>(dy_row + at);
        float gamma[N];
        read_parameter<T>(args.w, args.w_type, at, 1.0f, gamma);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float g = dy[i] * gamma_of(gamma[i], zero_centered);
          sums[0] += g * standardized(x[i], s);
          sums[1] += g;
        }
      }
      block_sum(sums);
      grad.along = sums[0] / divisor;
      if (args.centered) grad.offset = sums[1] / divisor;
    }
    const bool begins = row == blockIdx.x;
    for (int64_t at = first; at < columns; at += step) {
      const Packed<T, N> x = load_packed<N>(x_row + at);
      const Packed<T, N> dy = load_packed<N>(dy_row + at);
      Packed<T, N> add = {};
      if (args.add != nullptr) add = load_packed<N>(add_row + at);
      float gamma[N], dx[N], dw[N], db[N];
      read_parameter<T>(args.w, args.w_type, at, 1.0f, gamma);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = standardized(x[i], s);
        dx[i] = input_grad(dy[i] * gamma_of(gamma[i], zero_centered), xhat, grad, add[i]);
        dw[i] = dy[i] * xhat;
        db[i] = dy[i];
      }
      if (args.dx != nullptr) {
        store_any<N>(args.dx, args.dx_type, row * columns + at, N, true, dx);
      }
      gather(args.dw_partials, place + at, begins, dw);
      gather(args.db_partials, place + at, begins, db);
    }
  }
}

template <typename T, int Warps, int Pieces, int Groups>
void launch_held(const NormBackwardArgs& args, int64_t blocks, Stream stream) {
  const bool sums = args.dw_partials != nullptr || args.db_partials != nullptr;
  const size_t shared = sums && Groups > 1 ? 2 * sizeof(float) * args.columns : 0;
  norm_backward_kernel<T, 1, Warps, Pieces, Groups>
      <<<static_cast<unsigned int>(blocks), Warps * Groups * kWarp, shared, stream>>>(args);
}

template <typename T, int N>
void launch_long(const NormBackwardArgs& args, int64_t blocks, Stream stream) {
  norm_backward_long_kernel<T, N>
      <<<static_cast<unsigned int>(blocks), kLongWarps * kWarp, 0, stream>>>(args);
}

template <typename T>
void launch(const NormBackwardArgs& args, int64_t blocks, Stream stream) {
  constexpr int N = kVector<T>;
  constexpr int64_t kMaxStagedRows = int64_t{1} << 30;  // it counts them in int
  if (allows_vectors<N>(args.x, args.x_type, args.columns) &&
      allows_vectors<N>(args.dy, args.x_type, args.columns) &&
      allows_vectors<N>(args.add, args.x_type, args.columns) &&
      allows_vectors<N>(args.w, args.w_type, args.columns) &&
      allows_vectors<N>(args.dx, args.dx_type, args.columns)) {
    if (staged_shape(args.columns, args.x_type).rows > 0 && args.rows < kMaxStagedRows) {
      return launch_norm_backward_staged(args, blocks, stream);
    }
    return launch_long<T, N>(args, blocks, stream);
  }
  if (args.columns <= 16 * kWarp) return launch_held<T, 1, 16, 8>(args, blocks, stream);
  if (args.columns <= 64 * kWarp) return launch_held<T, 4, 16, 2>(args, blocks, stream);
  if (args.columns <= 128 * kWarp) return launch_held<T, 8, 16, 1>(args, blocks, stream);
  launch_long<T, 1>(args, blocks, stream);
}

}  // namespace

int64_t norm_backward_blocks(int64_t rows, int64_t columns, Type x_type, int sm_count) {
  const StagedShape shape = staged_shape(columns, x_type);
  if (shape.rows == 0) return rows < sm_count ? rows : sm_count;
  const int64_t wanted = (rows + shape.rows - 1) / shape.rows;
  const int64_t most = int64_t{sm_count} * shape.blocks;
  return wanted < most ? wanted : most;
}

void launch_norm_backward(const NormBackwardArgs& args, int64_t blocks, Stream stream) {
  if (blocks == 0) return;
  with_type(args.x_type, [&](auto zero) { launch<decltype(zero)>(args, blocks, stream); });
}

}  // namespace ligature::cuda
