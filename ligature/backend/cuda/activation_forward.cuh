// The activations forward, for one family of kinds (see activation_forward_plain.cu and
// activation_forward_gated.cu). A thread that walks down columns takes a few rows at once, so that
// enough loads are under way; where rows mean nothing, each thread has one vector.
#pragma once

#include "ligature/backend/cuda/activation_launch.h"
#include "ligature/backend/cuda/device/activation_columns.cuh"

namespace ligature::cuda {

template <typename F, typename T, int N>
__global__ void __launch_bounds__(kColumnThreads, 4)
    activation_forward_kernel(const ActivationForwardArgs args, const ColumnGrid grid) {
  constexpr int kRows = F::gated ? 2 : 4;
  const ColumnWalk<N> walk(grid, args.rows, args.columns);
  if (!walk.inside) return;
  const ActivationColumns<F::gated, N> columns(args.columns, args.params.interleave, walk.column);
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y) + walk.column;
  for (int64_t begin = walk.first + walk.row_lane; begin < walk.end;
       begin += kRows * walk.row_lanes) {
    Packed<T, N> a[kRows], b[kRows];
    float scale[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = begin + r * walk.row_lanes;
      if (row < walk.end) columns.read(x, row, a[r], b[r]);
    }
    read_scales(args.scales, args.scales_type, begin, walk.row_lanes, walk.end, scale);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = begin + r * walk.row_lanes;
      if (row >= walk.end) continue;
      float result[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float linear = 0.0f;
        if constexpr (F::gated) linear = b[r][i];
        result[i] = __fmul_rn(F::value(a[r][i], linear, args.params), scale[r]);
      }
      store<N>(y + row * args.columns, result);
    }
  }
}

template <typename F, typename T, int N>
__global__ void __launch_bounds__(kActivationThreads)
    activation_forward_flat_kernel(const ActivationForwardArgs args) {
  const int64_t count = args.rows * args.columns;
  const int64_t at = (int64_t{blockIdx.x} * kActivationThreads + threadIdx.x) * N;
  if (at >= count) return;
  const Packed<T, N> x = read_flat<N>(static_cast<const T*>(args.x), at, count);
  float y[N];
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = F::value(x[i], 0.0f, args.params);
  write_flat<N>(static_cast<T*>(args.y), at, count, y);
}

inline void launch_activation_forward_flat(const ActivationForwardArgs& args, Stream stream) {
  const bool vectors = flat_vectors(args.x, args.y, nullptr);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    with_family<false>(args.params.kind, vectors, [&](auto functor) {
      using F = decltype(functor);
      constexpr int N = std::is_same_v<F, AnyActivation<false>> ? 1 : kVector<T>;
      activation_forward_flat_kernel<F, T, N>
          <<<flat_blocks(args.rows * args.columns, N), kActivationThreads, 0, stream>>>(args);
    });
  });
}

template <bool Gated>
void launch_activation_forward_family(const ActivationForwardArgs& args, Stream stream) {
  if constexpr (!Gated) {
    if (args.scales == nullptr) return launch_activation_forward_flat(args, stream);
  }
  const int piece = activation_piece(Gated, args.type, args.x, args.y, nullptr, args.columns,
                                     args.params.interleave);
  const ColumnGrid grid = column_grid(args.rows, args.columns, piece, false, 0);
  const auto blocks = static_cast<unsigned int>(grid.across * grid.down);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    with_family<Gated>(args.params.kind, piece > 1, [&](auto functor) {
      using F = decltype(functor);
      constexpr int N = std::is_same_v<F, AnyActivation<Gated>> ? 1 : kVector<T>;
      activation_forward_kernel<F, T, N><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    });
  });
}

extern template void launch_activation_forward_family<false>(const ActivationForwardArgs&, Stream);
extern template void launch_activation_forward_family<true>(const ActivationForwardArgs&, Stream);

}  // namespace ligature::cuda
