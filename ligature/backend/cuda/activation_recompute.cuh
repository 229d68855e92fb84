// The activations backward, for one family of kinds (see activation_recompute_plain.cu and
// activation_recompute_gated.cu), with the forward's output again: x and dy are read once for both.
// A thread reads what it overwrites before it writes, and no other thread reads it, so dx may be
// written over x and y over dy.
#pragma once

#include "ligature/backend/cuda/activation_recompute_launch.h"
#include "ligature/backend/cuda/device/activation_columns.cuh"

namespace ligature::cuda {

/// A thread takes kRows rows at once, so that enough loads are under way.
template <typename F, typename T, int N, bool Sums, int kRows = F::gated ? 1 : 2,
          int kBlocks = Sums ? kColumnBlocks : 4>
__global__ void __launch_bounds__(kColumnThreads, kBlocks)
    activation_recompute_kernel(const ActivationRecomputeArgs args, const ColumnGrid grid) {
  const ColumnWalk<N> walk(grid, args.rows, args.columns);
  if (!Sums && !walk.inside) return;
  const ActivationColumns<F::gated, N> columns(args.columns, args.params.interleave, walk.column);
  const T* dy = static_cast<const T*>(args.dy) + walk.column;
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y) + walk.column;
  T* dx = static_cast<T*>(args.dx);
  float da_sums[N] = {}, db_sums[N] = {};

  if (walk.inside) {
    for (int64_t begin = walk.first + walk.row_lane; begin < walk.end;
         begin += kRows * walk.row_lanes) {
      Packed<T, N> a[kRows], b[kRows], g[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = begin + r * walk.row_lanes;
        if (row >= walk.end) continue;
        g[r] = load_packed<N>(dy + row * args.columns);
        columns.read(x, row, a[r], b[r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = begin + r * walk.row_lanes;
        if (row >= walk.end) continue;
        float again[N], da[N], db[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float linear = 0.0f;
          if constexpr (F::gated) linear = b[r][i];
          const Gradient result = F::gradient(g[r][i], a[r][i], linear, args.params);
          again[i] = result.y;
          da[i] = result.da;
          db[i] = result.db;
          if constexpr (Sums) {
            da_sums[i] = __fadd_rn(da_sums[i], da[i]);
            if constexpr (F::gated) db_sums[i] = __fadd_rn(db_sums[i], db[i]);
          }
        }
        store<N>(y + row * args.columns, again);
        columns.write(dx, row, da, db);
      }
    }
  }

  if constexpr (Sums) {
    __shared__ float shared[kColumnThreads * N];
    add_row_lanes(da_sums, walk, grid.lanes, shared);
    if constexpr (F::gated) add_row_lanes(db_sums, walk, grid.lanes, shared);
    if (walk.row_lane != 0 || !walk.inside) return;
    columns.write(args.dbias_partials, blockIdx.x / grid.across, da_sums, db_sums);
  }
}

template <bool Gated>
void launch_activation_recompute_family(const ActivationRecomputeArgs& args, const ColumnGrid& grid,
                                        Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  const auto blocks = static_cast<unsigned int>(grid.across * grid.down);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    with_family<Gated>(args.params.kind, grid.piece > 1, [&](auto functor) {
      using F = decltype(functor);
      constexpr int N = std::is_same_v<F, AnyActivation<Gated>> ? 1 : kVector<T>;
      if (args.dbias_partials != nullptr) {
        activation_recompute_kernel<F, T, N, true>
            <<<blocks, kColumnThreads, 0, stream>>>(args, grid);
      } else {
        activation_recompute_kernel<F, T, N, false>
            <<<blocks, kColumnThreads, 0, stream>>>(args, grid);
      }
    });
  });
}

}  // namespace ligature::cuda
