// The activations backward, for one family of kinds (see activation_backward_plain.cu and
// activation_backward_gated.cu), with the sums for dbias and dscales on the way: dbias over a
// block's rows, dscales over a warp's part of a row. Both are added up by a second kernel. Where
// rows mean nothing, each thread has one vector.
#pragma once

#include "ligature/backend/cuda/activation_launch.h"
#include "ligature/backend/cuda/device/activation_columns.cuh"

namespace ligature::cuda {

template <typename F, typename T, int N, bool Sums>
__global__ void __launch_bounds__(kColumnThreads, Sums ? kColumnBlocks : 4)
    activation_backward_kernel(const ActivationBackwardArgs args, const ColumnGrid grid) {
  constexpr int kRows = F::gated ? 1 : 2;
  const ColumnWalk<N> walk(grid, args.rows, args.columns);
  if (!Sums && !walk.inside) return;
  const ActivationColumns<F::gated, N> columns(args.columns, args.params.interleave, walk.column);
  const T* dy = static_cast<const T*>(args.dy) + walk.column;
  const T* x = static_cast<const T*>(args.x);
  T* dx = static_cast<T*>(args.dx);
  // A row of threads narrower than a warp shares its warp with other rows.
  const int warp_lanes = grid.lanes < kWarp ? grid.lanes : kWarp;
  float da_sums[N] = {}, db_sums[N] = {};

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
        float da[N], db[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float linear = 0.0f;
          if constexpr (F::gated) linear = b[r][i];
          const float grad = g[r][i];
          const Gradient result =
              F::gradient(__fmul_rn(grad, scale[r]), a[r][i], linear, args.params);
          da[i] = result.da;
          db[i] = result.db;
          if constexpr (Sums) {
            along = __fmaf_rn(grad, result.y, along);
            da_sums[i] = __fadd_rn(da_sums[i], da[i]);
            if constexpr (F::gated) db_sums[i] = __fadd_rn(db_sums[i], db[i]);
          }
        }
        columns.write(dx, row, da, db);
      }
      if (Sums && args.dscales_partials != nullptr) {
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

  if constexpr (Sums) {
    if (args.dbias_partials == nullptr) return;
    __shared__ float shared[kColumnThreads * N];
    add_row_lanes(da_sums, walk, grid.lanes, shared);
    if constexpr (F::gated) add_row_lanes(db_sums, walk, grid.lanes, shared);
    if (walk.row_lane != 0 || !walk.inside) return;
    columns.write(args.dbias_partials, blockIdx.x / grid.across, da_sums, db_sums);
  }
}

template <typename F, typename T, int N>
__global__ void __launch_bounds__(kActivationThreads)
    activation_backward_flat_kernel(const ActivationBackwardArgs args) {
  const int64_t count = args.rows * args.columns;
  const int64_t at = (int64_t{blockIdx.x} * kActivationThreads + threadIdx.x) * N;
  if (at >= count) return;
  const Packed<T, N> x = read_flat<N>(static_cast<const T*>(args.x), at, count);
  const Packed<T, N> dy = read_flat<N>(static_cast<const T*>(args.dy), at, count);
  float dx[N];
#pragma unroll
  for (int i = 0; i < N; ++i) dx[i] = F::gradient(dy[i], x[i], 0.0f, args.params).da;
  write_flat<N>(static_cast<T*>(args.dx), at, count, dx);
}

inline void launch_activation_backward_flat(const ActivationBackwardArgs& args, Stream stream) {
  const bool vectors = flat_vectors(args.x, args.dy, args.dx);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    with_family<false>(args.params.kind, vectors, [&](auto functor) {
      using F = decltype(functor);
      constexpr int N = std::is_same_v<F, AnyActivation<false>> ? 1 : kVector<T>;
      activation_backward_flat_kernel<F, T, N>
          <<<flat_blocks(args.rows * args.columns, N), kActivationThreads, 0, stream>>>(args);
    });
  });
}

template <bool Gated>
void launch_activation_backward_family(const ActivationBackwardArgs& args, const ColumnGrid& grid,
                                       Stream stream) {
  const bool sums = args.dbias_partials != nullptr || args.dscales_partials != nullptr;
  if constexpr (!Gated) {
    if (!sums && args.scales == nullptr) return launch_activation_backward_flat(args, stream);
  }
  const auto blocks = static_cast<unsigned int>(grid.across * grid.down);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    with_family<Gated>(args.params.kind, grid.piece > 1, [&](auto functor) {
      using F = decltype(functor);
      constexpr int N = std::is_same_v<F, AnyActivation<Gated>> ? 1 : kVector<T>;
      if (sums) {
        activation_backward_kernel<F, T, N, true>
            <<<blocks, kColumnThreads, 0, stream>>>(args, grid);
      } else {
        activation_backward_kernel<F, T, N, false>
            <<<blocks, kColumnThreads, 0, stream>>>(args, grid);
      }
    });
  });
}

extern template void launch_activation_backward_family<false>(const ActivationBackwardArgs&,
                                                              const ColumnGrid&, Stream);
extern template void launch_activation_backward_family<true>(const ActivationBackwardArgs&,
                                                             const ColumnGrid&, Stream);

}  // namespace ligature::cuda
