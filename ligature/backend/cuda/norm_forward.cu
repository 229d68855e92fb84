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

/// `Warps` warps with `Pieces` pieces of N values per thread hold a row. Groups of one warp are
/// independent; a larger group is a block, so that its barriers are the block's.
template <typename T, int N, int Warps, int Pieces, int Groups = Warps == 1 ? 4 : 1>
__global__ void __launch_bounds__(Warps * Groups * kWarp)
    norm_forward_kernel(const NormForwardArgs args) {
  constexpr int threads = Warps * kWarp;
  constexpr int step = threads * N;
  __shared__ typename BlockSum<Warps, 2, Groups>::Shared shared;
  BlockSum<Warps, 2, Groups> block_sum(shared);
  const int group = static_cast<int>(threadIdx.x) / threads;
  const int first = static_cast<int>(threadIdx.x) % threads * N;
  const int columns = static_cast<int>(args.columns);
  const float n = static_cast<float>(columns);

  for (int64_t row = int64_t{blockIdx.x} * Groups + group; row < args.rows;
       row += int64_t{gridDim.x} * Groups) {
    const T* x_row = static_cast<const T*>(args.x) + row * columns;
    Packed<T, N> x[Pieces];
#pragma unroll
    for (int p = 0; p < Pieces; ++p) x[p] = read_piece<N>(x_row, first + p * step, columns);
    Statistics s;
    if (args.given) {
      s = kept(args, row);
    } else if (args.centered) {
      float sum[1] = {0.0f}, sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[0] += x[p][i];
      }
      block_sum(sum);
      const float rough = sum[0] / n;
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        if (first + p * step < columns) add_deviations(x[p], rough, sums);
      }
      block_sum(sums);
      s = centered_statistics(rough, sums, n, args.eps);
    } else {
      float sum[1] = {0.0f};
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[0] += x[p][i] * x[p][i];
      }
      block_sum(sum);
      s = plain_statistics(sum[0], args);
    }
    if (!args.given && first == 0) keep(args, row, s);
    if (args.y == nullptr) continue;
    with_row_types<T>(args, [&](auto w, auto y) {
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        const int at = first + p * step;
        if (at < columns) write<decltype(w), decltype(y)>(args, x[p], s, row, at);
      }
    });
  }
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

template <typename T, int N, int Warps, int Pieces>
bool launch_if_fits(const NormForwardArgs& args, Stream stream) {
  if (args.columns > Warps * kWarp * Pieces * N) return false;
  constexpr int64_t groups = Warps == 1 ? 4 : 1;
  const int64_t blocks = (args.rows + groups - 1) / groups;
  norm_forward_kernel<T, N, Warps, Pieces>
      <<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks),
         Warps * groups * kWarp, 0, stream>>>(args);
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
        launch_if_fits<T, N, 1, 4>(args, stream) || launch_if_fits<T, N, 4, 2>(args, stream) ||
        launch_if_fits<T, N, 4, 4>(args, stream) || launch_if_fits<T, N, 8, 4>(args, stream) ||
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
