// Rows on their way into and out of a grouped GEMM that is not ours: gathered before it, finished
// after it with a bias and zeros behind the last group.
#include <cuda_runtime.h>

#include <algorithm>

#include "ligature/backend/cuda/device/row_access.cuh"
#include "ligature/backend/cuda/grouped_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 256;

/// Threads across a row: a power of two.
int lanes_for(int64_t units) {
  int lanes = 1;
  while (lanes < kThreads && lanes < units) lanes *= 2;
  return lanes;
}

unsigned int blocks_for(int64_t rows, int lanes) {
  return static_cast<unsigned int>(std::min<int64_t>(parts_of(rows, kThreads / lanes), 1 << 30));
}

/// Where this thread stands in rows of which a block has several at a time.
struct RowLanes {
  int lane, lanes;
  int64_t first, step;

  __device__ __forceinline__ explicit RowLanes(int lanes_across)
      : lane(static_cast<int>(threadIdx.x) % lanes_across),
        lanes(lanes_across),
        first(int64_t{blockIdx.x} * (kThreads / lanes_across) +
              static_cast<int>(threadIdx.x) / lanes_across),
        step(int64_t{gridDim.x} * (kThreads / lanes_across)) {}
};

/// The row of x, or -1.
__device__ __forceinline__ int64_t source_of(const GatherArgs& args, int64_t row) {
  if (args.groups.ends != nullptr && row >= args.groups.last()) return -1;
  const int32_t index = args.index[row];
  if (index < 0) return -1;
  const int32_t from = index / args.divisor;
  return from < args.x_rows ? from : -1;
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const GatherArgs args, int64_t units, int lanes) {
  const RowLanes at(lanes);
  const Unit* x = static_cast<const Unit*>(args.x);
  Unit* y = static_cast<Unit*>(args.y);
  for (int64_t row = at.first; row < args.rows; row += at.step) {
    const int64_t from = source_of(args, row);
    for (int64_t unit = at.lane; unit < units; unit += at.lanes) {
      y[row * units + unit] = from < 0 ? Unit{} : x[from * units + unit];
    }
  }
}

template <typename Unit>
bool goes_by(const GatherArgs& args) {
  const auto fits = [](uintptr_t n) { return n % sizeof(Unit) == 0; };
  return fits(reinterpret_cast<uintptr_t>(args.x)) && fits(reinterpret_cast<uintptr_t>(args.y)) &&
         fits(static_cast<uintptr_t>(args.row_bytes));
}

template <typename Unit>
void gather(const GatherArgs& args, Stream stream) {
  const int64_t units = args.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int lanes = lanes_for(units);
  gather_rows_kernel<Unit>
      <<<blocks_for(args.rows, lanes), kThreads, 0, stream>>>(args, units, lanes);
}

__global__ void __launch_bounds__(kThreads) zero_tail_kernel(const TailArgs args) {
  uint16_t* out = static_cast<uint16_t*>(args.out);
  const int64_t columns = args.row_bytes / 2, end = args.rows * columns;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = args.groups.last() * columns + thread; i < end; i += step) out[i] = 0;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(const FinishRowsArgs args, int lanes) {
  const RowLanes at(lanes);
  const T* y = static_cast<const T*>(args.y);
  T* out = static_cast<T*>(args.out);
  for (int64_t row = at.first; row < args.rows; row += at.step) {
    const bool inside = row < args.groups.last();
    int64_t of_group = 0;
    float scale = 1.0f;
    if (inside && args.bias != nullptr) {
      of_group = find_group(args.groups.ends, args.groups.count, row) * args.bias_stride;
      if (args.scale != nullptr) scale = args.scale[row];
    }
    for (int64_t column = at.lane * N; column < args.columns; column += int64_t{at.lanes} * N) {
      const int64_t place = row * args.columns + column;
      Packed<T, N> values{};
      if (inside) {
        values = load_packed<N>(y + place);
        if (args.bias != nullptr) {
          float bias[N], sums[N];
          read_parameter<T>(args.bias, args.bias_type, of_group + column, 0.0f, bias);
#pragma unroll
          for (int i = 0; i < N; ++i) sums[i] = __fadd_rn(values[i], __fmul_rn(scale, bias[i]));
          values = pack<T>(sums);
        }
      }
      store_packed<N>(out + place, values);
    }
  }
}

template <typename T>
void finish(const FinishRowsArgs& args, Stream stream) {
  constexpr int N = kVector<T>;
  const bool vectors = allows_vectors<N>(args.y, args.type, args.columns) &&
                       allows_vectors<N>(args.out, args.type, args.columns) &&
                       allows_vectors<N>(args.bias, args.bias_type, args.columns) &&
                       (args.bias == nullptr || args.bias_stride % N == 0);
  const int lanes = lanes_for(vectors ? args.columns / N : args.columns);
  const unsigned int blocks = blocks_for(args.rows, lanes);
  if (vectors) {
    finish_rows_kernel<T, N><<<blocks, kThreads, 0, stream>>>(args, lanes);
  } else {
    finish_rows_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(args, lanes);
  }
}

/// Sizes and addresses are those of whole vectors: GEMMs ask for that too.
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    finish_weights_kernel(const FinishWeightsArgs args, const __grid_constant__ GroupOuts outs) {
  constexpr int N = 8;
  const int32_t group = outs.first + static_cast<int32_t>(blockIdx.y);
  const bool empty = args.groups.begin(group) == args.groups.end(group);
  if (empty && args.accumulate) return;
  const __nv_bfloat16* dw = static_cast<const __nv_bfloat16*>(args.dw) + group * args.size;
  Out* out = static_cast<Out*>(outs.out[blockIdx.y]);
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = thread * N; i < args.size; i += int64_t{gridDim.x} * kThreads * N) {
    float values[N] = {};
    if (!empty) load<N>(dw + i, values);
    if (args.accumulate) {
      float before[N];
      load<N>(out + i, before);
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = __fadd_rn(before[j], values[j]);
    }
    store<N>(out + i, values);
  }
}

}  // namespace

void launch_gather_rows(const GatherArgs& args, Stream stream) {
  if (args.rows == 0 || args.row_bytes == 0) return;
  if (goes_by<uint4>(args)) return gather<uint4>(args, stream);
  if (goes_by<uint32_t>(args)) return gather<uint32_t>(args, stream);
  if (goes_by<uint16_t>(args)) return gather<uint16_t>(args, stream);
  gather<uint8_t>(args, stream);
}

void launch_zero_tail(const TailArgs& args, int sm_count, Stream stream) {
  if (args.rows == 0 || args.row_bytes == 0) return;
  const int64_t blocks =
      std::min<int64_t>(parts_of(args.rows * args.row_bytes / 2, kThreads), int64_t{sm_count} * 4);
  zero_tail_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(args);
}

void launch_finish_rows(const FinishRowsArgs& args, Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  with_type(args.type, [&](auto zero) { finish<decltype(zero)>(args, stream); });
}

void launch_finish_weights(const FinishWeightsArgs& args, const GroupOuts& outs, Stream stream) {
  if (args.size == 0 || outs.count == 0) return;
  const int64_t across = std::min<int64_t>(parts_of(args.size, kThreads * 8), 1024);
  const dim3 grid(static_cast<unsigned int>(across), static_cast<unsigned int>(outs.count));
  if (args.type == Type::Float32) {
    finish_weights_kernel<float><<<grid, kThreads, 0, stream>>>(args, outs);
  } else {
    finish_weights_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(args, outs);
  }
}

}  // namespace ligature::cuda
