// A bias and its gradient, walked down the columns like the activations.
#include "ligature/backend/cuda/activation_launch.h"
#include "ligature/backend/cuda/device/columns.cuh"

namespace ligature::cuda {
namespace {

constexpr int kRows = 4;

/// Calls f(row, values) for the thread's rows, four loads under way at a time.
template <typename T, int N, typename F>
__device__ __forceinline__ void walk_rows(const ColumnWalk<N>& walk, const T* x, int64_t columns,
                                          const F& f) {
  for (int64_t begin = walk.first + walk.row_lane; begin < walk.end;
       begin += kRows * walk.row_lanes) {
    Packed<T, N> values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = begin + r * walk.row_lanes;
      if (row < walk.end) values[r] = load_packed<N>(x + row * columns + walk.column);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = begin + r * walk.row_lanes;
      if (row < walk.end) f(row, values[r]);
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads)
    bias_forward_kernel(const BiasArgs args, const ColumnGrid grid) {
  const ColumnWalk<N> walk(grid, args.rows, args.columns);
  if (!walk.inside) return;
  float b[N];
  read_parameter<T>(args.b, args.b_type, walk.column, 0.0f, b);
  T* y = static_cast<T*>(args.y) + walk.column;
  walk_rows<T, N>(walk, static_cast<const T*>(args.x), args.columns,
                  [&](int64_t row, const Packed<T, N>& x) {
                    float sum[N];
#pragma unroll
                    for (int i = 0; i < N; ++i) sum[i] = __fadd_rn(x[i], b[i]);
                    store<N>(y + row * args.columns, sum);
                  });
}

template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    bias_backward_kernel(const BiasArgs args, const ColumnGrid grid) {
  __shared__ float shared[kColumnThreads * N];
  const ColumnWalk<N> walk(grid, args.rows, args.columns);
  float sums[N] = {};
  if (walk.inside) {
    walk_rows<T, N>(walk, static_cast<const T*>(args.x), args.columns,
                    [&](int64_t, const Packed<T, N>& x) {
#pragma unroll
                      for (int i = 0; i < N; ++i) sums[i] = __fadd_rn(sums[i], x[i]);
                    });
  }
  add_row_lanes(sums, walk, grid.lanes, shared);
  if (walk.row_lane != 0 || !walk.inside) return;
  store<N>(args.partials + blockIdx.x / grid.across * args.columns + walk.column, sums);
}

int piece_of(const BiasArgs& args) {
  int piece = 1;
  with_type(args.type, [&](auto zero) {
    constexpr int N = kVector<decltype(zero)>;
    if (allows_vectors<N>(args.x, args.type, args.columns) &&
        allows_vectors<N>(args.y, args.type, args.columns) &&
        allows_vectors<N>(args.b, args.b_type, args.columns)) {
      piece = N;
    }
  });
  return piece;
}

}  // namespace

void launch_bias_forward(const BiasArgs& args, Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  const ColumnGrid grid = column_grid(args.rows, args.columns, piece_of(args), false, 0);
  const auto blocks = static_cast<unsigned int>(grid.across * grid.down);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (grid.piece > 1) {
      bias_forward_kernel<T, kVector<T>><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    } else {
      bias_forward_kernel<T, 1><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    }
  });
}

ColumnGrid bias_backward_grid(const BiasArgs& args, int sm_count) {
  return column_grid(args.rows, args.columns, piece_of(args), true, sm_count);
}

void launch_bias_backward(const BiasArgs& args, const ColumnGrid& grid, Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  const auto blocks = static_cast<unsigned int>(grid.across * grid.down);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (grid.piece > 1) {
      bias_backward_kernel<T, kVector<T>><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    } else {
      bias_backward_kernel<T, 1><<<blocks, kColumnThreads, 0, stream>>>(args, grid);
    }
  });
}

}  // namespace ligature::cuda
