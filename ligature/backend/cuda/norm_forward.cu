// LayerNorm, RMSNorm and L2 normalization forward. A row is read once and held in the registers of
// one to 16 warps; a row too long for that is read again from the caches. How a row is cut depends
// on x alone, and every rounding of the statistics is named: whoever asks for them gets the same
// bits.
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

/// sum += the values, or their squares.
template <typename T, int N>
__device__ __forceinline__ void add_values(const Packed<T, N>& x, bool squares, float& sum) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum = squares ? __fmaf_rn(x[i], x[i], sum) : __fadd_rn(sum, x[i]);
}

/// sums[0] += deviations from `mean`, sums[1] += their squares.
template <typename T, int N>
__device__ __forceinline__ void add_deviations(const Packed<T, N>& x, float mean,
                                               float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float deviation = __fsub_rn(x[i], mean);
    sums[0] = __fadd_rn(sums[0], deviation);
    sums[1] = __fmaf_rn(deviation, deviation, sums[1]);
  }
}

// The second pass gives the squared deviations and, by the sum of the deviations, what rounding
// took from the mean.
__device__ __forceinline__ Statistics centered_statistics(float rough, const float (&sums)[2],
                                                          float n, float eps) {
  const float drift = __fdiv_rn(sums[0], n);
  const float variance = __fmaf_rn(-drift, drift, __fdiv_rn(sums[1], n));
  return {__fadd_rn(rough, drift), inverse_root(__fadd_rn(variance < 0.0f ? 0.0f : variance, eps))};
}

__device__ __forceinline__ Statistics plain_statistics(float squares, const NormForwardArgs& args) {
  const float divisor = args.averaged ? static_cast<float>(args.columns) : 1.0f;
  return {0.0f, inverse_root(__fadd_rn(__fdiv_rn(squares, divisor), args.eps))};
}

__device__ __forceinline__ void keep(const NormForwardArgs& args, int64_t row, Statistics s) {
  if (args.centered) args.mean[row] = s.mean;
  args.rstd[row] = s.rstd;
}

__device__ __forceinline__ Statistics kept(const NormForwardArgs& args, int64_t row) {
  return {args.centered ? args.mean[row] : 0.0f, args.rstd[row]};
}

/// What a kernel is made for. The general form finds out at run time which norm it is and which
/// types w and y have; the others have x's, and read w and b while the sums are made.
enum class Form { General, Centered, Plain };

/// Pieces of a parameter in x's type, `fallback` without one, zeros beyond the row.
template <typename T, int N, int Pieces>
__device__ __forceinline__ void read_pieces(const void* from, int first, int step, int columns,
                                            float fallback, Packed<T, N> (&to)[Pieces]) {
  if (from != nullptr) {
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      to[p] = read_piece<N>(static_cast<const T*>(from), first + p * step, columns);
    }
  } else {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = fallback;
#pragma unroll
    for (int p = 0; p < Pieces; ++p) to[p] = pack<T>(values);
  }
}

/// One warp holds a row, or a whole block.
template <int Warps>
constexpr int kRowsOfBlock = Warps == 1 ? 4 : 1;

/// How many blocks of four warps are wanted at once: with fewer registers more loads are under way.
template <Form form>
constexpr int kBlocksAtOnce = form == Form::General ? 1 : (form == Form::Plain ? 8 : 6);

/// `Warps` warps with `Pieces` pieces of N values per thread hold a row; `begin` is the grid's
/// first.
template <typename T, int N, int Warps, int Pieces, Form form>
__global__ void __launch_bounds__(Warps* kRowsOfBlock<Warps>* kWarp,
                                  Warps <= 4 ? kBlocksAtOnce<form> : 1)
    norm_forward_kernel(const NormForwardArgs args, const int64_t begin) {
  constexpr int threads = Warps * kWarp;
  constexpr int step = threads * N;
  constexpr bool early = form != Form::General && Pieces <= 4;
  __shared__ typename BlockSum<Warps, 2, kRowsOfBlock<Warps>>::Shared shared;
  BlockSum<Warps, 2, kRowsOfBlock<Warps>> block_sum(shared);
  const int first = static_cast<int>(threadIdx.x) % threads * N;
  const int columns = static_cast<int>(args.columns);
  const float n = static_cast<float>(columns);
  const bool centered = form == Form::General ? args.centered : form == Form::Centered;
  const int64_t row = begin + int64_t{blockIdx.x} * kRowsOfBlock<Warps> + threadIdx.x / threads;
  if (row >= args.rows) return;

  const T* x_row = static_cast<const T*>(args.x) + row * columns;
  Packed<T, N> x[Pieces];
#pragma unroll
  for (int p = 0; p < Pieces; ++p) x[p] = read_piece<N>(x_row, first + p * step, columns);
  Packed<T, N> gamma[Pieces], beta[Pieces] = {};
  if (early && args.y != nullptr) {
    read_pieces(args.w, first, step, columns, 1.0f, gamma);
    if (centered) read_pieces(args.b, first, step, columns, 0.0f, beta);
  }

  Statistics s;
  if (args.given) {
    s = kept(args, row);
  } else {
    float sum[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < Pieces; ++p) add_values(x[p], !centered, sum[0]);
    block_sum(sum);
    if (centered) {
      const float rough = __fdiv_rn(sum[0], n);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        forget(x[p]);
        if (first + p * step < columns) add_deviations(x[p], rough, sums);
      }
      block_sum(sums);
      s = centered_statistics(rough, sums, n, args.eps);
    } else {
      s = plain_statistics(sum[0], args);
    }
    if (first == 0) keep(args, row, s);
  }
  if (args.y == nullptr) return;
  if constexpr (form == Form::General) {
    with_row_types<T>(args, [&](auto w, auto y) {
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        const int at = first + p * step;
        if (at < columns) write<decltype(w), decltype(y)>(args, x[p], s, row, at);
      }
    });
  } else {
    // w + -0 is w, also where w is -0.
    const float shift = args.zero_centered && args.w != nullptr ? 1.0f : -0.0f;
    T* y_row = static_cast<T*>(args.y) + row * columns;
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      const int at = first + p * step;
      if (at >= columns) continue;
      float w[N], b[N], y[N];
      if constexpr (!early) {
        read_parameter<N, T>(args.w, at, 1.0f, w);
        read_parameter<N, T>(centered ? args.b : nullptr, at, 0.0f, b);
      }
      forget(x[p]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (early) {
          w[i] = gamma[p][i];
          b[i] = beta[p][i];
        }
        y[i] = normalized(x[p][i], s, __fadd_rn(w[i], shift), b[i]);
      }
      store<N>(y_row + at, y);
    }
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
        add_values(load_packed<N>(x_row + at), !args.centered, sum[0]);
      }
      block_sum(sum);
      if (args.centered) {
        const float rough = __fdiv_rn(sum[0], n);
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

template <typename T, int N, int Warps, int Pieces, Form form>
void launch_held(const NormForwardArgs& args, Stream stream) {
  constexpr int64_t held = kRowsOfBlock<Warps>;
  for (int64_t begin = 0; begin < args.rows; begin += kMaxBlocks * held) {
    const int64_t blocks = (args.rows - begin + held - 1) / held;
    norm_forward_kernel<T, N, Warps, Pieces, form>
        <<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks),
           Warps * held * kWarp, 0, stream>>>(args, begin);
  }
}

template <typename T, int N>
void launch_long(const NormForwardArgs& args, Stream stream) {
  const int64_t blocks = args.rows < kMaxBlocks ? args.rows : kMaxBlocks;
  norm_forward_long_kernel<T, N>
      <<<static_cast<unsigned int>(blocks), kLongWarps * kWarp, 0, stream>>>(args);
}

/// The quickest cut of a row of vectors. With two sums after each other, as the mean needs them, a
/// warp that waits for no other is ahead at a middle length.
template <typename T, Form form>
void launch_vectors(const NormForwardArgs& args, Stream stream) {
  constexpr int N = kVector<T>;
  const int64_t vectors = args.columns / N;
  if (vectors <= 2 * kWarp) return launch_held<T, N, 1, 2, form>(args, stream);
  if (vectors <= 4 * kWarp) return launch_held<T, N, 1, 4, form>(args, stream);
  if (vectors <= 8 * kWarp) {
    if constexpr (form != Form::Plain) {
      if (args.centered) return launch_held<T, N, 1, 8, form>(args, stream);
    }
    if constexpr (form != Form::Centered) return launch_held<T, N, 4, 2, form>(args, stream);
  }
  if (vectors <= 16 * kWarp) return launch_held<T, N, 4, 4, form>(args, stream);
  if (vectors <= 32 * kWarp) return launch_held<T, N, 8, 4, form>(args, stream);
  if (vectors <= 64 * kWarp) return launch_held<T, N, 16, 4, form>(args, stream);
  launch_long<T, N>(args, stream);
}

template <typename T>
void launch(const NormForwardArgs& args, Stream stream) {
  if (allows_vectors<kVector<T>>(args.x, args.x_type, args.columns)) {
    const bool one_type = (args.y == nullptr || args.y_type == args.x_type) &&
                          (args.w == nullptr || args.w_type == args.x_type) &&
                          (args.b == nullptr || args.w_type == args.x_type);
    if (one_type && args.centered) return launch_vectors<T, Form::Centered>(args, stream);
    if (one_type && args.b == nullptr) return launch_vectors<T, Form::Plain>(args, stream);
    return launch_vectors<T, Form::General>(args, stream);
  }
  if (args.columns <= 8 * kWarp) return launch_held<T, 1, 1, 8, Form::General>(args, stream);
  if (args.columns <= 64 * kWarp) return launch_held<T, 1, 4, 16, Form::General>(args, stream);
  launch_long<T, 1>(args, stream);
}

}  // namespace

void launch_norm_forward(const NormForwardArgs& args, Stream stream) {
  if (args.rows == 0) return;
  with_type(args.x_type, [&](auto zero) { launch<decltype(zero)>(args, stream); });
}

}  // namespace ligature::cuda
