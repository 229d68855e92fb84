// The scaled activations backward with the forward's output again, and the sums for dscales on the
// way: activation_backward_kernel with y beside dx. A thread reads what it overwrites before it
// writes, and no other thread reads it, so dx may be written over x and y over dy.
// These kernels have been compiled, but not been run on a GPU yet.
#pragma once

#include "ligature/backend/cuda/activation_recompute_launch.h"
#include "ligature/backend/cuda/device/activation_columns.cuh"

namespace ligature::cuda {

template <typename F, typename T, int N>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    activation_recompute_scaled_kernel(const ActivationRecomputeScaledArgs args,
                                       const ColumnGrid grid) {
  constexpr int kRows = F::gated ? 1 : 2;
  const ColumnWalk<N> walk(grid, args.rows, args.columns);
  const ActivationColumns<F::gated, N> columns(args.columns, args.params.interleave, walk.column);
  const T* dy = static_cast<const T*>(args.dy) + walk.column;
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y) + walk.column;
  T* dx = static_cast<T*>(args.dx);
  // A row of threads narrower than a warp shares its warp with other rows.
  const int warp_lanes = grid.lanes < kWarp ? grid.lanes : kWarp;

  // All threads go round equally often, for the sums over warps; those without a row add nothing.
  const int64_t length = walk.end - walk.first;
  for (int64_t done = 0; done < length; done += kRows * walk.row_lanes) {
    Packed<T, N> a[kRows], b[kRows], g[kRows];
    float scale[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = walk.first + done + r * walk.row_lanes + walk.row_lane;
      if (row >= walk.end || !walk.inside) continue;
      g[r] = load_packed<N>(dy + row * args.columns);
      columns.read(x, row, a[r], b[r]);
    }
    read_scales(args.scales, args.scales_type, walk.first + done + walk.row_lane, walk.row_lanes,
                walk.end, scale);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = walk.first + done + r * walk.row_lanes + walk.row_lane;
      float along = 0.0f;
      if (row < walk.end && walk.inside) {
        float again[N], da[N], db[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float linear = 0.0f;
          if constexpr (F::gated) linear = b[r][i];
          const float grad = g[r][i];
          const Gradient result =
              F::gradient(__fmul_rn(grad, scale[r]), a[r][i], linear, args.params);
          again[i] = __fmul_rn(result.y, scale[r]);
          da[i] = result.da;
          db[i] = result.db;
          along = __fmaf_rn(grad, result.y, along);
        }
        store<N>(y + row * args.columns, again);
        columns.write(dx, row, da, db);
      }
      if (args.dscales_partials != nullptr) {
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2) {
          along = __fadd_rn(along, __shfl_xor_sync(0xffffffffu, along, distance));
        }
        const int64_t warp = walk.column / N / warp_lanes;
        if (row < walk.end && walk.lane % warp_lanes == 0 && warp < grid.warps_across) {
          args.dscales_partials[row * grid.warps_across + warp] = along;
        }
      }
    }
  }
}

template <bool Gated>
void launch_activation_recompute_scaled_family(const ActivationRecomputeScaledArgs& args,
                                               const ColumnGrid& grid, Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  const auto blocks = static_cast<unsigned int>(grid.across * grid.down);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    with_family<Gated>(args.params.kind, grid.piece > 1, [&](auto functor) {
      using F = decltype(functor);
      constexpr int N = std::is_same_v<F, AnyActivation<Gated>> ? 1 : kVector<T>;
      activation_recompute_scaled_kernel<F, T, N>
          <<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    });
  });
}

}  // namespace ligature::cuda
