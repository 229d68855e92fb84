// Kernels that make values of rows 16 bytes at a time and cast them from registers, a tile of
// 128x128 to a block (device/cast.cuh, device/cast_blocks.cuh); and the one that only finds their
// largest magnitude.
//
// A source of values has
//   Value              what they are rounded to: __half or __nv_bfloat16
//   kStreams           matrices it reads; kTiles: 1 or 2 that it writes, apart(plan) columns apart
//   kDepth             rows on their way to a thread; kAsync: through shared memory
//   kSums              whether it adds up columns, where wants_sums(): write_sum() has those of a
//                      tile's rows
//   Arguments, Row and Columns, what it keeps of a row and of a thread's columns
//   units(plan)        columns of a matrix that it reads
//   from(), row(), columns(), make()
#pragma once

#include <atomic>

#include "ligature/backend/cuda/device/async_copy.cuh"
#include "ligature/backend/cuda/device/cast_blocks.cuh"

namespace ligature::cuda {

/// A source's values as it reads them.
__device__ __forceinline__ uint4 read_16(const void* from) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from));
  return v;
}

/// A block's tile. Whoever wrote or read the matrix before went from its beginning to its end: what
/// the cache still has of it is the end.
__device__ __forceinline__ TilePlace last_first() {
  return {static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile,
          static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kTile};
}

template <typename T>
__device__ __forceinline__ uint32_t pack_2(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

template <typename T>
__device__ __forceinline__ float value_of(const uint4& w, int i) {
  const uint32_t word = i / 2 == 0 ? w.x : i / 2 == 1 ? w.y : i / 2 == 2 ? w.z : w.w;
  return i % 2 == 0 ? low_value<T>(word) : high_value<T>(word);
}

/// Raises plan.amax to what lower and upper half of a thread's word hold. All threads call it.
template <typename T>
__device__ __forceinline__ void raise_by_pairs(uint32_t pair, uint32_t* warps, float* amax) {
  const uint32_t largest = __reduce_max_sync(0xffffffffu, max(pair & 0xffffu, pair >> 16));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) all = max(all, warps[w]);
  raise_amax(amax, wide_bits<T>(all));
}

/// Rows of the streams from a thread's place on; beyond the matrix the last row and columns again.
template <typename Source>
struct Reader {
  const typename Source::Value* from[Source::kStreams];
  uint32_t last;  // row

  __device__ __forceinline__ Reader(const typename Source::Arguments& source,
                                    const QuantizePlan& plan, int64_t row, int64_t column) {
    const int64_t r = row < plan.rows ? row : plan.rows - 1;
    const int64_t units = Source::units(plan), c = column < units ? column : units - kSide;
#pragma unroll
    for (int s = 0; s < Source::kStreams; ++s) from[s] = Source::from(source, plan, r, c, s);
    last = static_cast<uint32_t>(min(plan.rows - 1 - r, int64_t{kSide - 1}));
  }
  // Rows are short enough for offsets of 32 bits, which one instruction adds.
  __device__ __forceinline__ const void* at(const QuantizePlan& plan, int s, int k) const {
    const auto bytes = static_cast<uint32_t>(Source::stride(plan, s)) * 2u;
    return reinterpret_cast<const char*>(from[s]) +
           wide_product(min(static_cast<uint32_t>(k), last), bytes);
  }
};

constexpr int kSumsBytes = 8 * 2 * kTile * 4;

template <typename Source, Factors F>
constexpr int cast_bytes() {
  constexpr int slots = Source::kAsync ? Source::kDepth * Source::kStreams * kCastThreads * 16 : 0;
  static_assert(!Source::kSums || slots >= kSumsBytes);
  return slots + kTurnedBytes +
         (Source::kTiles == 2 ? F == Factors::Tensor ? kTurnedBytes : kSide * kCastThreads * 16
                              : 0);
}

/// Of a warp's groups of rows by shuffles, of the warps in shared memory, in order.
template <typename Source>
__device__ __forceinline__ void put_sums(float (&sums)[Source::kTiles][kSide], float* shared,
                                         Seat seat) {
  float* mine = shared + threadIdx.x / 32 * (Source::kTiles * kTile) + seat.across * kSide;
#pragma unroll
  for (int t = 0; t < Source::kTiles; ++t) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      sums[t][j] = __fadd_rn(sums[t][j], __shfl_down_sync(0xffffffffu, sums[t][j], 16));
    }
    if (threadIdx.x % 32 < 16) {
#pragma unroll
      for (int j = 0; j < kSide; j += 4) {
        *reinterpret_cast<float4*>(mine + t * kTile + j) =
            make_float4(sums[t][j], sums[t][j + 1], sums[t][j + 2], sums[t][j + 3]);
      }
    }
  }
}

template <typename Source, Factors F, Element E>
__global__ void __launch_bounds__(kCastThreads, Source::template resident<F>())
    cast_tiles(const __grid_constant__ QuantizePlan plan,
               const __grid_constant__ typename Source::Arguments source) {
  using T = typename Source::Value;
  constexpr int S = Source::kStreams, kTiles = Source::kTiles, kDepth = Source::kDepth;
  extern __shared__ uint4 dynamic_memory[];
  __shared__ CastShared shared;
  constexpr int kSlots = Source::kAsync ? kDepth * S * kCastThreads : 0;
  [[maybe_unused]] uint4* slots = dynamic_memory + threadIdx.x;
  uint2* turned = reinterpret_cast<uint2*>(dynamic_memory + kSlots);
  [[maybe_unused]] uint4* staged = dynamic_memory + kSlots + kTurnedBytes / 16 + threadIdx.x;
  const Seat seat;
  const TilePlace place = last_first();
  const int64_t row = place.row + seat.down * kSide, column = place.column + seat.across * kSide;
  const Reader<Source> reader(source, plan, row, column);
  [[maybe_unused]] uint4 loaded[Source::kAsync ? 1 : kSide][S];
  const auto issue = [&](int k) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if constexpr (Source::kAsync) {
        copy_async(shared_address(slots + (k % kDepth * S + s) * kCastThreads),
                   reader.at(plan, s, k));
      } else {
        loaded[k][s] = read_16(reader.at(plan, s, k));
      }
    }
    if constexpr (Source::kAsync) end_batch();
  };
#pragma unroll
  for (int k = 0; k < kDepth; ++k) issue(k);

  const float factor = F == Factors::Tensor ? tensor_factor(plan) : 1.0f;
  const int64_t units = Source::units(plan);
  const typename Source::Columns columns =
      Source::columns(source, column < units ? column : units - kSide);
  // Of the thread in the matrix.
  const int rows =
      column < units ? static_cast<int>(max(min(plan.rows - row, int64_t{kSide}), int64_t{0})) : 0;
  const RowWriter writer = row_writer(plan, place, seat, rows);
  [[maybe_unused]] float sums[kTiles][kSide] = {};
  bool summed = false;
  if constexpr (Source::kSums) summed = Source::wants_sums(source);
  [[maybe_unused]] uint32_t amax = 0;
  [[maybe_unused]] uint32_t codes[kTiles][kSide][2];
  [[maybe_unused]] Words v;
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    uint4 in[S];
    if constexpr (Source::kAsync) await_batches<kDepth - 1>();
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if constexpr (Source::kAsync) {
        in[s] = slots[(k % kDepth * S + s) * kCastThreads];
      } else {
        in[s] = loaded[k][s];
      }
    }
    const typename Source::Row given = Source::row(source, min(row + k, plan.rows - 1));
    if (k + kDepth < kSide) {
      issue(k + kDepth);
    } else if constexpr (Source::kAsync) {
      end_batch();  // of nothing: one for each row
    }
    uint32_t made[kTiles][4];
    Source::make(source, in, given, columns, summed && k < rows, made, sums);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if constexpr (F == Factors::Tensor) {
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = max_pair<T>(amax, magnitudes<T>(made[t][i]));
        const uint2 row_codes = encode_row<T, E>(made[t], factor);
        codes[t][k][0] = row_codes.x;
        codes[t][k][1] = row_codes.y;
        RowWriter other = writer;
        other.to += t * Source::apart(plan);
        other.put(row_codes, k);
      } else if (t == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[k][i] = made[0][i];
      } else {
        staged[k * kCastThreads] = make_uint4(made[t][0], made[t][1], made[t][2], made[t][3]);
      }
    }
  }
  [[maybe_unused]] float* shared_sums = reinterpret_cast<float*>(dynamic_memory);
  if constexpr (Source::kSums) {
    if (summed) {
      __syncthreads();  // the slots are free
      put_sums<Source>(sums, shared_sums, seat);
      if (F != Factors::Tensor || plan.columnwise.data == nullptr) __syncthreads();
    }
  }
  const auto write_sums = [&] {
    if constexpr (Source::kSums) {
      if (!summed || threadIdx.x >= kTiles * kTile) return;
      float sum = shared_sums[threadIdx.x];
#pragma unroll
      for (int w = 1; w < 8; ++w) {
        sum = __fadd_rn(sum, shared_sums[w * (kTiles * kTile) + threadIdx.x]);
      }
      Source::write_sum(source, plan, place, static_cast<int>(threadIdx.x), sum);
    }
  };

  if constexpr (F == Factors::Tensor) {
    if (plan.columnwise.data != nullptr) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        put_all_turned(turned + t * (kTurnedBytes / 8), seat, codes[t]);
      }
      __syncthreads();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        write_turned(plan.columnwise, turned + t * (kTurnedBytes / 8),
                     {place.row, place.column + t * Source::apart(plan)});
      }
    }
    write_sums();
    if (plan.format.scaling == Scaling::Delayed && plan.amax != nullptr) {
      raise_by_pairs<T>(amax, shared.warps, plan.amax);
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) write_tensor_scale(plan, factor);
  } else {
    write_sums();
#pragma unroll 1
    for (int t = 0; t < kTiles; ++t) {
      RowWriter other = writer;
      TilePlace there = place;
      if constexpr (kTiles == 2) {
        if (t == 1) {
          __syncthreads();
          other.to += Source::apart(plan);
          there.column += Source::apart(plan);
#pragma unroll
          for (int k = 0; k < kSide; ++k) {
            const uint4 w = staged[k * kCastThreads];
            v[k][0] = w.x;
            v[k][1] = w.y;
            v[k][2] = w.z;
            v[k][3] = w.w;
          }
        }
      }
      if constexpr (F == Factors::Square128) {
        cast_square<T, E>(plan, v, there, other, seat, shared, turned);
      } else if constexpr (F == Factors::Line128) {
        cast_lines_128<T, E>(plan, v, there, other, seat, shared, turned);
      } else {
        cast_lines_32<T, E>(plan, v, there, other, seat, shared, turned);
      }
    }
  }
}

/// Down columns: a thread reads 8 of them, `rows` rows from blockIdx.y * rows on.
template <typename Source>
__global__ void __launch_bounds__(kCastThreads)
    amax_columns(const __grid_constant__ QuantizePlan plan,
                 const __grid_constant__ typename Source::Arguments source, int rows) {
  using T = typename Source::Value;
  constexpr int S = Source::kStreams, kUnroll = S == 1 ? 8 : S == 2 ? 4 : 2;
  __shared__ uint32_t warps[8];
  const int64_t units = Source::units(plan);
  const int64_t given = (static_cast<int64_t>(blockIdx.x) * kCastThreads + threadIdx.x) * kSide;
  const int64_t column = given < units ? given : units - kSide;
  const typename Source::Columns columns = Source::columns(source, column);
  float sums[Source::kTiles][kSide];
  uint32_t amax = 0;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * rows;
  const int64_t end = min(first + rows, plan.rows);
#pragma unroll 1
  for (int64_t r = first; r < end; r += kUnroll) {
    uint4 in[kUnroll][S];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = min(r + u, end - 1);
#pragma unroll
      for (int s = 0; s < S; ++s) in[u][s] = read_16(Source::from(source, plan, at, column, s));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      uint32_t made[Source::kTiles][4];
      Source::make(source, in[u], Source::row(source, min(r + u, end - 1)), columns, false, made,
                   sums);
#pragma unroll
      for (int t = 0; t < Source::kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = max_pair<T>(amax, magnitudes<T>(made[t][i]));
      }
    }
  }
  raise_by_pairs<T>(amax, warps, plan.amax);
}

// ---- Launch

/// Does cast_tiles serve a plan whose sources' rows are whole vectors, of `units` columns?
inline bool casts_directly(const QuantizePlan& plan, int64_t units) {
  const Format& format = plan.format;
  const auto aligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  return plan.rows > 0 && units > 0 && plan.columns < int64_t{1} << 26 && units % kSide == 0 &&
         plan.columns % kSide == 0 && tiles_of(plan.rows) <= 65535 &&
         format.scaling != Scaling::NV && !(format.scaling == Scaling::MX && format.block_2d) &&
         aligned(plan.rowwise.data, 8);
}

/// Lets a kernel have more shared memory than 48 KiB; asks once for each device.
template <typename Kernel>
void allow_memory(Kernel kernel, int bytes, std::atomic<uint64_t>& allowed) {
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device & 63);
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) return;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

template <typename Source, Factors F, Element E>
void launch_cast_as(const QuantizePlan& plan, const typename Source::Arguments& source, dim3 grid,
                    Stream stream) {
  constexpr int bytes = cast_bytes<Source, F>();
  const auto kernel = cast_tiles<Source, F, E>;
  if constexpr (bytes > 48 * 1024 - static_cast<int>(sizeof(CastShared))) {
    static std::atomic<uint64_t> allowed{0};
    allow_memory(kernel, bytes, allowed);
  }
  kernel<<<grid, kCastThreads, bytes, stream>>>(plan, source);
}

template <typename Source, Factors F>
void launch_cast_with(const QuantizePlan& plan, const typename Source::Arguments& source, dim3 grid,
                      Stream stream) {
  plan.format.element == Element::E4M3
      ? launch_cast_as<Source, F, Element::E4M3>(plan, source, grid, stream)
      : launch_cast_as<Source, F, Element::E5M2>(plan, source, grid, stream);
}

/// Only where casts_directly.
template <typename Source>
void launch_cast(const QuantizePlan& plan, const typename Source::Arguments& source, int64_t units,
                 Stream stream) {
  if (plan.find_amax) {
    constexpr int64_t kMost = 132 * 16, kLeast = 8;
    const int64_t across = (units + kSide * kCastThreads - 1) / (kSide * kCastThreads);
    const int64_t down = across < kMost ? kMost / across : 1;
    const int64_t given = (plan.rows + down - 1) / down;
    const int64_t rows = (given + kLeast - 1) / kLeast * kLeast;
    const dim3 grid(static_cast<unsigned>(across),
                    static_cast<unsigned>((plan.rows + rows - 1) / rows));
    amax_columns<Source><<<grid, kCastThreads, 0, stream>>>(plan, source, static_cast<int>(rows));
    return;
  }
  const dim3 grid(static_cast<unsigned>(tiles_of(units)),
                  static_cast<unsigned>(tiles_of(plan.rows)));
  switch (plan.format.scaling) {
    case Scaling::Block:
      plan.format.block_2d
          ? launch_cast_with<Source, Factors::Square128>(plan, source, grid, stream)
          : launch_cast_with<Source, Factors::Line128>(plan, source, grid, stream);
      return;
    case Scaling::MX:
      return launch_cast_with<Source, Factors::Line32>(plan, source, grid, stream);
    default:
      return launch_cast_with<Source, Factors::Tensor>(plan, source, grid, stream);
  }
}

}  // namespace ligature::cuda
