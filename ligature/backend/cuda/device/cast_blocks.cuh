// The formats with a factor per block, for a thread's 8 rows of 8 columns: 128x128, lines of 128
// and lines of 32. Row-wise and column-wise codes and scales of a tile.
#pragma once

#include "ligature/backend/cuda/device/cast.cuh"

namespace ligature::cuda {

template <typename T, Element E>
__device__ __forceinline__ void cast_square(const QuantizePlan& plan, const Words& v,
                                            TilePlace place, const RowWriter& writer, Seat seat,
                                            CastShared& shared, uint2* turned) {
  uint32_t pair = 0;
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair = max_pair<T>(pair, magnitudes<T>(v[k][i]));
  }
  const uint32_t largest = __reduce_max_sync(0xffffffffu, max(pair & 0xffffu, pair >> 16));
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = largest;
  __syncthreads();
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) all = max(all, shared.warps[w]);
  const float factor = factor_of(wide_bits<T>(all), kMaxCode<E>, plan.format.amax_epsilon,
                                 plan.format.power_of_2_scales);
  if (threadIdx.x == 0) {
    const int64_t r = place.row / kTile, c = place.column / kTile;
    if (plan.rowwise.data != nullptr) put_scale(plan.rowwise, r, c, factor);
    if (plan.columnwise.data != nullptr) put_scale(plan.columnwise, c, r, factor);
  }
  uint32_t codes[kSide][2];
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    const uint2 row = encode_row<T, E>(v[k], factor);
    codes[k][0] = row.x;
    codes[k][1] = row.y;
    writer.put(row, k);
  }
  if (plan.columnwise.data == nullptr) return;
  put_all_turned(turned, seat, codes);
  __syncthreads();
  write_turned(plan.columnwise, turned, place);
}

/// Largest magnitudes of the rows, two of them to a word, and of the columns.
template <typename T>
__device__ __forceinline__ void find_lines(const Words& v, uint32_t (&rows)[4],
                                           uint32_t (&columns)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) columns[i] = 0;
#pragma unroll
  for (int k = 0; k < kSide; k += 2) {
    uint32_t largest[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t pair = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t m = magnitudes<T>(v[k + u][i]);
        pair = max_pair<T>(pair, m);
        columns[i] = max_pair<T>(columns[i], m);
      }
      largest[u] = pair;
    }
    rows[k / 2] = __vmaxu2(__byte_perm(largest[0], largest[1], 0x5410),
                           __byte_perm(largest[0], largest[1], 0x7632));
  }
}

/// What a warp knows of the columns, for all warps: after a barrier, [warp][column].
__device__ __forceinline__ void share_columns(uint32_t (&columns)[4], Seat seat,
                                              CastShared& shared) {
  halve<4>(columns, 16);
  *reinterpret_cast<uint2*>(
      &shared.columns[threadIdx.x / 32][seat.across * kSide + (threadIdx.x & 16) / 4]) =
      make_uint2(columns[0], columns[1]);
}

/// Column-wise codes, with the factors of the tile's columns.
template <typename T, Element E>
__device__ __forceinline__ void write_columns(const QuantizePlan& plan, const Words& v,
                                              TilePlace place, Seat seat, const float* given,
                                              uint2* turned) {
#pragma unroll
  for (int j = 0; j < kSide; j += 4) {
    const float4 f = *reinterpret_cast<const float4*>(given + seat.across * kSide + j);
    const float factors[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      put_turned(turned, seat, j + u, encode_column<T, E>(v, j + u, factors[u]));
    }
  }
  __syncthreads();
  write_turned(plan.columnwise, turned, place);
}

template <typename T, Element E>
__device__ __forceinline__ void cast_lines_128(const QuantizePlan& plan, const Words& v,
                                               TilePlace place, const RowWriter& writer, Seat seat,
                                               CastShared& shared, uint2* turned) {
  const Format& format = plan.format;
  const int lane = threadIdx.x % 32;
  uint32_t rows[4], columns[4];
  find_lines<T>(v, rows, columns);
  if (plan.rowwise.data != nullptr) {
    halve<4>(rows, 8);
    halve<2>(rows, 4);
    uint32_t pair = rows[0];
    pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffffu, pair, 2));
    pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffffu, pair, 1));
    const int mine = lane >> 1 & 7;  // the row whose factor this lane makes
    const uint32_t bits = wide_bits<T>((mine & 1) != 0 ? pair >> 16 : pair & 0xffffu);
    const float factor =
        factor_of(bits, kMaxCode<E>, format.amax_epsilon, format.power_of_2_scales);
    const int64_t line = place.row + seat.down * kSide + mine;
    if ((lane & 1) == 0 && line < plan.rows) {
      put_scale(plan.rowwise, line, place.column / kTile, factor);
    }
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const float f = __shfl_sync(0xffffffffu, factor, (lane & 16) | k << 1);
      writer.put(encode_row<T, E>(v[k], f), k);
    }
  }
  if (plan.columnwise.data == nullptr) return;
  share_columns(columns, seat, shared);
  __syncthreads();
  if (threadIdx.x < kTile) {
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      largest = max(largest, static_cast<uint32_t>(shared.columns[w][threadIdx.x]));
    }
    const float factor = factor_of(wide_bits<T>(largest), kMaxCode<E>, format.amax_epsilon,
                                   format.power_of_2_scales);
    shared.factors[0][threadIdx.x] = factor;
    const int64_t line = place.column + threadIdx.x;
    if (line < plan.columns) put_scale(plan.columnwise, line, place.row / kTile, factor);
  }
  __syncthreads();
  write_columns<T, E>(plan, v, place, seat, shared.factors[0], turned);
}

template <typename T, Element E>
__device__ __forceinline__ void cast_lines_32(const QuantizePlan& plan, const Words& v,
                                              TilePlace place, const RowWriter& writer, Seat seat,
                                              CastShared& shared, uint2* turned) {
  const int lane = threadIdx.x % 32;
  const int64_t row = place.row + seat.down * kSide, column = place.column + seat.across * kSide;
  uint32_t rows[4], columns[4];
  find_lines<T>(v, rows, columns);
  // Both orientations' codes of scales, four to a word, where words of them lie in memory.
  const bool gathers = plan.rows % kTile == 0 && plan.columns % kTile == 0 &&
                       plan.rowwise.data != nullptr && plan.columnwise.data != nullptr;
  if (plan.rowwise.data != nullptr) {
    halve<4>(rows, 2);
    halve<2>(rows, 1);
    const BlockFactor even = mx_factor(wide_bits<T>(rows[0] & 0xffffu), kMaxCode<E>);
    const BlockFactor odd = mx_factor(wide_bits<T>(rows[0] >> 16), kMaxCode<E>);
    const int64_t r = row + (lane & 3) * 2;
    if (gathers) {
      const int within = seat.down * kSide + (lane & 3) * 2, across = seat.across / 4;
      shared.codes[0][within][across] = static_cast<uint8_t>(even.code);
      shared.codes[0][within + 1][across] = static_cast<uint8_t>(odd.code);
    } else if (column / 32 * 32 < plan.columns && r < plan.rows) {
      uint8_t* scale =
          static_cast<uint8_t*>(plan.rowwise.scale) + r * plan.rowwise.scale_stride + column / 32;
      scale[0] = static_cast<uint8_t>(even.code);
      if (r + 1 < plan.rows) scale[plan.rowwise.scale_stride] = static_cast<uint8_t>(odd.code);
    }
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const float f =
          __shfl_sync(0xffffffffu, k % 2 == 0 ? even.factor : odd.factor, (lane & 28) | k >> 1);
      writer.put(encode_row<T, E>(v[k], f), k);
    }
  }
  if (plan.columnwise.data == nullptr) return;
  share_columns(columns, seat, shared);
  __syncthreads();
  {
    // Of 32 rows each: two warps'.
    const int block = threadIdx.x / 64, pair = threadIdx.x % 64 * 2;
    const uint32_t largest =
        __vmaxu2(*reinterpret_cast<const uint32_t*>(&shared.columns[2 * block][pair]),
                 *reinterpret_cast<const uint32_t*>(&shared.columns[2 * block + 1][pair]));
    const BlockFactor even = mx_factor(wide_bits<T>(largest & 0xffffu), kMaxCode<E>);
    const BlockFactor odd = mx_factor(wide_bits<T>(largest >> 16), kMaxCode<E>);
    *reinterpret_cast<float2*>(&shared.factors[block][pair]) = make_float2(even.factor, odd.factor);
    const int64_t line = place.column + pair, first = place.row + block * 32;
    if (gathers) {
      shared.codes[1][pair][block] = static_cast<uint8_t>(even.code);
      shared.codes[1][pair + 1][block] = static_cast<uint8_t>(odd.code);
    } else if (line < plan.columns && first < plan.rows) {
      uint8_t* scale = static_cast<uint8_t*>(plan.columnwise.scale) +
                       line * plan.columnwise.scale_stride + first / 32;
      scale[0] = static_cast<uint8_t>(even.code);
      scale[plan.columnwise.scale_stride] = static_cast<uint8_t>(odd.code);
    }
  }
  __syncthreads();
  if (gathers) {
    const int t = threadIdx.x % kTile;
    const bool turn = threadIdx.x >= kTile;
    const QuantizeOutput& out = turn ? plan.columnwise : plan.rowwise;
    const int64_t line = (turn ? place.column : place.row) + t;
    const int64_t block = (turn ? place.row : place.column) / 32;
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(out.scale) + line * out.scale_stride +
                                 block) =
        *reinterpret_cast<const uint32_t*>(shared.codes[turn ? 1 : 0][t]);
  }
  write_columns<T, E>(plan, v, place, seat, shared.factors[seat.down / 4], turned);
}

}  // namespace ligature::cuda
