// LayerNorm, RMSNorm and L2 normalization forward. A row is read once and held in the registers of
// one to 16 warps; a row too long for that is read again from the caches.
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/device/norm.cuh"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/device/row_access.cuh"
#include "ligature/backend/cuda/norm_launch.h"

namespace ligature::cuda {
namespace {

template <int N, typename W>
__device__ __forceinline__ void read_parameter(const void* w, int64_t at, float fallback,
                                               float (&values)[N]) {
  if (w != nullptr) {
    load<N>(static_cast<const W*>(w) + at, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = fallback;
  }
}

/// y of the piece at `at`, which is in the row.
template <typename W, typename Y, typename T, int N>
__device__ __forceinline__ void write(const NormForwardArgs& args, const Packed<T, N>& x,
                                      Statistics s, int64_t row, int64_t at) {
  float gamma[N], beta[N], y[N];
  read_parameter<N, W>(args.w, at, 1.0f, gamma);
  read_parameter<N, W>(args.b, at, 0.0f, beta);
  const bool zero_centered = args.zero_centered && args.w != nullptr;
#pragma unroll
  for (int i = 0; i < N; ++i)
    y[i] = normalized(x[i], s, gamma_of(gamma[i], zero_centered), beta[i]);
  store<N>(static_cast<Y*>(args.y) + row * args.columns + at, y);
}

/// Calls f(W(), Y()) with the types of the parameters and of y. One choice for a whole row: made
/// for each piece, the compiler would take apart all their combinations.
template <typename T, typename F>
__device__ __forceinline__ void with_row_types(const NormForwardArgs& args, const F& f) {
  if constexpr (std::is_same_v<T, float>) {
    with_type(args.y_type, [&](auto y) { f(float(), y); });
  } else {
    const bool float_w = args.w_type != kTypeOf<T>, float_y = args.y_type != kTypeOf<T>;
    if (float_w && float_y) return f(float(), float());
    if (float_w) return f(float(), T());
    if (float_y) return f(T(), float());
    f(T(), T());
  }
}

/// sums[0] += deviations from `mean`, sums[1] += their squares.
template <typename T, int N>
__device__ __forceinline__ void add_deviations(const Packed<T, N>& x, float mean,
                                               float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float deviation = x[i] - mean;
    sums[0] += deviation;
    sums[1] += deviation * deviation;
  }
}

// The second pass gives the squared deviations and, by the sum of the deviations, what rounding
// took from the mean.
__device__ __forceinline__ Statistics centered_statistics(float rough, const float (&sums)[2],
                                                          float n, float eps) {
  const float drift = sums[0] / n;
  const float variance = sums[1] / n - drift * drift;
  return {rough + drift, inverse_root((variance < 0.0f ? 0.0f : variance) + eps)};
}

__device__ __forceinline__ Statistics plain_statistics(float squares, const NormForwardArgs& args) {
  const float divisor = args.averaged ? static_cast<float>(args.columns) : 1.0f;
  return {0.0f, inverse_root(squares / divisor + args.eps)};
}

__device__ __forceinline__ void keep(const NormForwardArgs& args, int64_t row, Statistics s) {
  if (args.centered) args.mean[row] = s.mean;
  args.rstd[row] = s.rstd;
}

__device__ __forceinline__ Statistics kept(const NormForwardArgs& args, int64_t row) {
  return {args.centered ? args.mean[row] : 0.0f, args.rstd[row]};
}

/// A row's statistics from its pieces.
template <int Warps, int Groups, typename T, int N, int Pieces>
__device__ __forceinline__ Statistics row_statistics(const NormForwardArgs& args,
                                                     const Packed<T, N> (&x)[Pieces], int first,
                                                     BlockSum<Warps, 2, Groups>& block_sum) {
  constexpr int step = Warps * kWarp * N;
  const int columns = static_cast<int>(args.columns);
  const float n = static_cast<float>(columns);
  float sum[1] = {0.0f};
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[0] += args.centered ? x[p][i] : x[p][i] * x[p][i];
  }
  block_sum(sum);
  if (!args.centered) return plain_statistics(sum[0], args);
  const float rough = sum[0] / n;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    if (first + p * step < columns) add_deviations(x[p], rough, sums);
  }
  block_sum(sums);
  return centered_statistics(rough, sums, n, args.eps);
}

/// The rows of a group of warps, which takes every so many of them: the next row is on its way
/// while this one is summed, and the parameters stay in registers.
template <typename W, typename Y, typename T, int N, int Warps, int Pieces, int Groups>
__device__ __forceinline__ void norm_rows(const NormForwardArgs& args,
                                          BlockSum<Warps, 2, Groups>& block_sum) {
  constexpr int threads = Warps * kWarp;
  constexpr int step = threads * N;
  const int group = static_cast<int>(threadIdx.x) / threads;
  const int first = static_cast<int>(threadIdx.x) % threads * N;
  const int columns = static_cast<int>(args.columns);
  const int64_t stride = int64_t{gridDim.x} * Groups;
  const bool has_w = args.w != nullptr, has_b = args.b != nullptr;
  const bool zero_centered = args.zero_centered && has_w;

  int64_t row = int64_t{blockIdx.x} * Groups + group;
  if (row >= args.rows) return;
  Packed<T, N> x[Pieces], next[Pieces];
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    x[p] = read_piece<N>(static_cast<const T*>(args.x) + row * columns, first + p * step, columns);
  }
  for (; row < args.rows; row += stride) {
    if (row + stride < args.rows) {
      const T* next_row = static_cast<const T*>(args.x) + (row + stride) * columns;
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        next[p] = read_piece<N>(next_row, first + p * step, columns);
      }
    }
    Packed<W, N> gamma[Pieces], beta[Pieces];
    if (args.y != nullptr) {
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        const int at = first + p * step;
        if (has_w) gamma[p] = read_piece<N>(static_cast<const W*>(args.w), at, columns);
        if (has_b) beta[p] = read_piece<N>(static_cast<const W*>(args.b), at, columns);
      }
    }
    Statistics s;
    if (args.given) {
      s = kept(args, row);
    } else {
      s = row_statistics<Warps, Groups>(args, x, first, block_sum);
      if (first == 0) keep(args, row, s);
    }
    if (args.y != nullptr) {
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        const int at = first + p * step;
        if (at >= columns) continue;
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          y[i] = normalized(x[p][i], s, gamma_of(has_w ? gamma[p][i] : 1.0f, zero_centered),
                            has_b ? beta[p][i] : 0.0f);
        }
        store<N>(static_cast<Y*>(args.y) + row * columns + at, y);
      }
    }
#pragma unroll
    for (int p = 0; p < Pieces; ++p) x[p] = next[p];
  }
}

/// `Warps` warps with `Pieces` pieces of N values per thread hold a row. Groups of one warp are
/// independent; a larger group is a block, so that its barriers are the block's.
template <typename W, typename Y, typename T, int N, int Warps, int Pieces,
          int Groups = Warps == 1 ? 4 : 1>
__global__ void __launch_bounds__(Warps * Groups * kWarp, 24 / (Warps * Groups))
    norm_forward_kernel(const NormForwardArgs args) {
  __shared__ typename BlockSum<Warps, 2, Groups>::Shared shared;
  BlockSum<Warps, 2, Groups> block_sum(shared);
  norm_rows<W, Y, T, N, Warps, Pieces, Groups>(args, block_sum);
}

constexpr int kLongWarps = 16;

/// For rows of any length: a block per row, which is read once per pass.
template <typename T, int N>
__global__ void __launch_bounds__(kLongWarps* kWarp)
    norm_forward_long_kernel(const NormForwardArgs args) {
  constexpr int64_t step = kLongWarps * kWarp * N;
  __shared__ typename BlockSum<kLongWarps, 2>::Shared shared;
  BlockSum<kLongWarps, 2> block_sum(shared);
  const int64_t first = int64_t{threadIdx.x} * N;
  const int64_t columns = args.columns;
  const float n = static_cast<float>(columns);

  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* x_row = static_cast<const T*>(args.x) + row * columns;
    Statistics s;
    if (args.given) {
      s = kept(args, row);
    } else {
      float sum[1] = {0.0f}, sums[2] = {0.0f, 0.0f};
#pragma unroll 4
      for (int64_t at = first; at < columns; at += step) {
        const Packed<T, N> x = load_packed<N>(x_row + at);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[0] += args.centered ? x[i] : x[i] * x[i];
      }
      block_sum(sum);
      if (args.centered) {
        const float rough = sum[0] / n;
#pragma unroll 4
        for (int64_t at = first; at < columns; at += step) {
          add_deviations(load_packed<N>(x_row + at), rough, sums);
        }
        block_sum(sums);
        s = centered_statistics(rough, sums, n, args.eps);
      } else {
        s = plain_statistics(sum[0], args);
      }
      if (threadIdx.x == 0) keep(args, row, s);
    }
    if (args.y == nullptr) continue;
    with_row_types<T>(args, [&](auto w, auto y) {
      for (int64_t at = first; at < columns; at += step) {
        write<decltype(w), decltype(y)>(args, load_packed<N>(x_row + at), s, row, at);
      }
    });
  }
}

constexpr int64_t kMaxBlocks = int64_t{1} << 30;

/// How many blocks of a kernel the device holds at once.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads) {
  int device = 0, sm_count = 1, per_sm = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, 0);
  return int64_t{sm_count} * (per_sm > 0 ? per_sm : 1);
}

template <typename W, typename Y, typename T, int N, int Warps, int Pieces>
void launch_rows(const NormForwardArgs& args, Stream stream) {
  constexpr int groups = Warps == 1 ? 4 : 1, threads = Warps * groups * kWarp;
  constexpr auto kernel = norm_forward_kernel<W, Y, T, N, Warps, Pieces>;
  static const int64_t most = resident_blocks(kernel, threads);
  const int64_t blocks = (args.rows + groups - 1) / groups;
  kernel<<<static_cast<unsigned int>(blocks < most ? blocks : most), threads, 0, stream>>>(args);
}

template <typename T, int N, int Warps, int Pieces>
bool launch_if_fits(const NormForwardArgs& args, Stream stream) {
  if (args.columns > Warps * kWarp * Pieces * N) return false;
  if constexpr (std::is_same_v<T, float>) {
    with_type(args.y_type,
              [&](auto y) { launch_rows<float, decltype(y), T, N, Warps, Pieces>(args, stream); });
  } else {
    const bool float_w = args.w_type != kTypeOf<T>, float_y = args.y_type != kTypeOf<T>;
    if (float_w && float_y) {
      launch_rows<float, float, T, N, Warps, Pieces>(args, stream);
    } else if (float_w) {
      launch_rows<float, T, T, N, Warps, Pieces>(args, stream);
    } else if (float_y) {
      launch_rows<T, float, T, N, Warps, Pieces>(args, stream);
    } else {
      launch_rows<T, T, T, N, Warps, Pieces>(args, stream);
    }
  }
  return true;
}

template <typename T, int N>
void launch_long(const NormForwardArgs& args, Stream stream) {
  const int64_t blocks = args.rows < kMaxBlocks ? args.rows : kMaxBlocks;
  norm_forward_long_kernel<T, N>
      <<<static_cast<unsigned int>(blocks), kLongWarps * kWarp, 0, stream>>>(args);
}

template <typename T>
void launch(const NormForwardArgs& args, Stream stream) {
  constexpr int N = kVector<T>;
  if (allows_vectors<N>(args.x, args.x_type, args.columns) &&
      allows_vectors<N>(args.w, args.w_type, args.columns) &&
      allows_vectors<N>(args.b, args.w_type, args.columns) &&
      allows_vectors<N>(args.y, args.y_type, args.columns)) {
    if (launch_if_fits<T, N, 1, 1>(args, stream) || launch_if_fits<T, N, 1, 2>(args, stream) ||
        launch_if_fits<T, N, 4, 1>(args, stream) || launch_if_fits<T, N, 4, 2>(args, stream) ||
        launch_if_fits<T, N, 8, 2>(args, stream) || launch_if_fits<T, N, 16, 2>(args, stream) ||
        launch_if_fits<T, N, 16, 4>(args, stream)) {
      return;
    }
    launch_long<T, N>(args, stream);
  } else if (!launch_if_fits<T, 1, 1, 8>(args, stream) &&
             !launch_if_fits<T, 1, 4, 16>(args, stream)) {
    launch_long<T, 1>(args, stream);
  }
}

}  // namespace

void launch_norm_forward(const NormForwardArgs& args, Stream stream) {
  if (args.rows == 0) return;
  with_type(args.x_type, [&](auto zero) { launch<decltype(zero)>(args, stream); });
}

}  // namespace ligature::cuda
