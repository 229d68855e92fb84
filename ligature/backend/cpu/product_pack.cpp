// Operands as the tiles read them.
#include "ligature/backend/cpu/product_tile.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <type_traits>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

namespace ligature::cpu {
namespace {

constexpr int kRowsAhead = 16;  // of an operand that is packed, in units

struct Square {
  __m512i row[kLanes];
};

[[gnu::always_inline]] inline __m512i low(__m512i a, __m512i b) {
  return _mm512_unpacklo_epi64(a, b);
}
[[gnu::always_inline]] inline __m512i high(__m512i a, __m512i b) {
  return _mm512_unpackhi_epi64(a, b);
}

/// 16 x 16 units: within quarters of the vectors first, then the quarters.
[[gnu::always_inline]] inline void transpose(Square& s) {
  __m512i t[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(s.row[i], s.row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(s.row[i], s.row[i + 1]);
  }
  __m512i u[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 4) {
    u[i] = low(t[i], t[i + 2]);
    u[i + 1] = high(t[i], t[i + 2]);
    u[i + 2] = low(t[i + 1], t[i + 3]);
    u[i + 3] = high(t[i + 1], t[i + 3]);
  }
  // u[4 g + j] holds column j of each quarter, for the rows 4 g to 4 g + 3.
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[j + 4], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(u[j], u[j + 4], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(u[j + 8], u[j + 12], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(u[j + 8], u[j + 12], 0xee);
    s.row[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    s.row[j + 4] = _mm512_shuffle_i32x4(a, c, 0xdd);
    s.row[j + 8] = _mm512_shuffle_i32x4(b, d, 0x88);
    s.row[j + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

/// 16 units along k of one row; what lies behind `k` is zero.
template <bool Pairs>
[[gnu::always_inline]] inline __m512i along_k(const void* data, int64_t offset, int64_t left) {
  if constexpr (Pairs) {
    return _mm512_maskz_loadu_epi16(first_bits(left), static_cast<const uint16_t*>(data) + offset);
  } else {
    return _mm512_maskz_loadu_epi32(first_bits(left), static_cast<const uint32_t*>(data) + offset);
  }
}

/// Of one that is gathered, where row i, or the i-th along k, begins.
[[gnu::always_inline]] inline int64_t row_at(const ProductSide& side, int64_t i) {
  return (side.index != nullptr && !side.gathers_k ? side.index[i] : i) * side.row_stride;
}
[[gnu::always_inline]] inline int64_t k_at(const ProductSide& side, int64_t i) {
  return (side.index != nullptr && side.gathers_k ? side.index[i] : i) * side.k_stride;
}

/// One unit of each of 16 rows that follow each other.
template <bool Pairs>
[[gnu::always_inline]] inline __m512i along_rows(const ProductSide& side, int64_t row, int64_t at,
                                                 int64_t k, uint32_t rows) {
  if constexpr (Pairs) {
    const uint16_t* data = static_cast<const uint16_t*>(side.data) + row;
    const __m512i even =
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rows, data + k_at(side, at)));
    if (at + 1 >= k) return even;
    const __m512i odd =
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rows, data + k_at(side, at + 1)));
    return _mm512_or_epi32(even, _mm512_slli_epi32(odd, 16));
  } else {
    return _mm512_maskz_loadu_epi32(rows,
                                    static_cast<const uint32_t*>(side.data) + row + k_at(side, at));
  }
}

template <bool Pairs>
[[gnu::always_inline]] inline void prefetch(const ProductSide& side, int64_t offset) {
  _mm_prefetch(static_cast<const char*>(side.data) + offset * (Pairs ? 2 : 4), _MM_HINT_T0);
}

/// Units k to k + 15 of 16 rows, as [k, row].
template <bool Pairs>
[[gnu::always_inline]] inline void load_transposed(const ProductSide& side, int64_t row,
                                                   int64_t rows, int64_t unit, int64_t k,
                                                   Square& s) {
  const int64_t per_unit = Pairs ? 2 : 1;
  const int64_t left = k - unit * per_unit;
  // Behind the row's end, of the rows that the next tile begins with.
  int64_t ahead = 4 * kLanes * per_unit;
  if (ahead >= left) ahead += kTileColumns * side.row_stride - k;
  if (rows >= kLanes && left >= kLanes * per_unit && side.index == nullptr) {
    constexpr int64_t kBytes = Pairs ? 2 : 4;
    const int64_t stride = side.row_stride * kBytes;
    const char* at =
        static_cast<const char*>(side.data) + (row * side.row_stride + unit * per_unit) * kBytes;
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r, at += stride) {
      _mm_prefetch(at + ahead * kBytes, _MM_HINT_T0);
      s.row[r] = _mm512_loadu_si512(at);
    }
    transpose(s);
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    s.row[r] = _mm512_setzero_si512();
    if (r < rows) {
      const int64_t offset = row_at(side, row + r) + unit * per_unit;
      prefetch<Pairs>(side, offset + ahead);
      s.row[r] = along_k<Pairs>(side.data, offset, left);
    }
  }
  transpose(s);
}

/// 16 units of `rows` rows.
template <bool Pairs>
[[gnu::always_inline]] inline void pack_left_block(const ProductSide& side, int64_t first,
                                                   int64_t rows, int64_t unit, int64_t k,
                                                   uint32_t* to) {
  const int64_t per_unit = Pairs ? 2 : 1;
  if (side.follows_k()) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t offset = row_at(side, first + r) + unit * per_unit;
      _mm512_storeu_si512(to + r * kLanes, along_k<Pairs>(side.data, offset, k - unit * per_unit));
    }
    return;
  }
  Square s;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    const int64_t at = (unit + j) * per_unit;
    s.row[j] = at < k ? along_rows<Pairs>(side, first, at, k, first_bits(rows) & 0xffff)
                      : _mm512_setzero_si512();
  }
  transpose(s);
  for (int64_t r = 0; r < rows; ++r) _mm512_storeu_si512(to + r * kLanes, s.row[r]);
}

// What lies together in memory is read together: rows one after the other, or all parts' pieces of
// the same k.
template <bool Pairs>
void pack_left_of(const ProductSide& side, int64_t first, const Parts& parts, int64_t begin,
                  int64_t end, int64_t k, uint32_t* to) {
  const int64_t units = side.units(k);
  const int64_t stride = padded(units);
  const bool by_part = side.follows_k();
  const int64_t outer = by_part ? end - begin : stride / kLanes;
  const int64_t inner = by_part ? stride / kLanes : end - begin;
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) {
      const int64_t part = begin + (by_part ? i : j);
      const int64_t unit = (by_part ? j : i) * kLanes;
      const int64_t row = parts.begin(part), rows = parts.begin(part + 1) - row;
      pack_left_block<Pairs>(side, first + row, rows, unit, k, to + row * stride + rows * unit);
    }
  }
}

struct TwoVectors {
  __m512i first, second;
};

/// Two bfloat16 along k of each of 32 rows that follow each other.
[[gnu::always_inline]] inline TwoVectors interleaved(const uint16_t* even, const uint16_t* odd) {
  alignas(64) static constexpr std::array<uint16_t, 64> kOrder = [] {
    std::array<uint16_t, 64> order{};
    for (uint16_t i = 0; i < 32; ++i) {
      order[2 * i] = i;
      order[2 * i + 1] = static_cast<uint16_t>(i + 32);
    }
    return order;
  }();
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  return {_mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder.data()), b),
          _mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder.data() + 32), b)};
}

/// Whole units of 32 rows that follow each other.
template <bool Pairs>
uint32_t* pack_32_rows(const ProductSide& side, int64_t row, int64_t unit, int64_t last_unit,
                       int64_t k, bool columns_follow, uint32_t* to) {
  using T = std::conditional_t<Pairs, uint16_t, uint32_t>;
  constexpr int64_t kPerUnit = Pairs ? 2 : 1;
  const T* const data = static_cast<const T*>(side.data) + row;
  const int32_t* const index = side.index;
  const auto at = [&](int64_t i) {
    return data + (index == nullptr ? i : index[i]) * side.k_stride;
  };
  // Not into the nearest cache: rows that are a power of two apart compete for one part of it.
  const int64_t next_columns = columns_follow ? 2 * kLanes : 0;
  const auto fetch = [&](const T* p) { _mm_prefetch(p + next_columns, _MM_HINT_T1); };
  for (; unit < last_unit; ++unit, to += 2 * kLanes) {
    const int64_t i = unit * kPerUnit;
    int64_t ahead = i;
    if (!columns_follow) {
      ahead += kRowsAhead * kPerUnit;
      if (index != nullptr) ahead = std::min(ahead, k - kPerUnit);
    }
    const T* const next = at(ahead);
    fetch(next);
    if constexpr (Pairs) {
      fetch(at(ahead + 1));
      const auto [low_pairs, high_pairs] = interleaved(at(i), at(i + 1));
      _mm512_storeu_si512(to, low_pairs);
      _mm512_storeu_si512(to + kLanes, high_pairs);
    } else {
      fetch(next + kLanes);
      const T* const from = at(i);
      _mm512_storeu_si512(to, _mm512_loadu_si512(from));
      _mm512_storeu_si512(to + kLanes, _mm512_loadu_si512(from + kLanes));
    }
  }
  return to;
}

template <bool Pairs>
void pack_right_of(const ProductSide& side, int64_t first, int64_t rows, int64_t k,
                   int64_t first_unit, int64_t last_unit, bool columns_follow, uint32_t* to) {
  const int64_t per_unit = Pairs ? 2 : 1;
  const int64_t vectors = rows > kLanes ? 2 : 1;
  if (side.follows_k()) {
    for (int64_t unit = first_unit; unit < last_unit; unit += kLanes) {
      const int64_t count = last_unit - unit < kLanes ? last_unit - unit : kLanes;
      for (int64_t v = 0; v < vectors; ++v) {
        Square s;
        load_transposed<Pairs>(side, first + v * kLanes, rows - v * kLanes, unit, k, s);
        for (int64_t j = 0; j < count; ++j) {
          _mm512_storeu_si512(to + (j * vectors + v) * kLanes, s.row[j]);
        }
      }
      to += kLanes * vectors * kLanes;
    }
    return;
  }
  int64_t unit = first_unit;
  if (rows == 2 * kLanes) {
    const int64_t whole = std::min(last_unit, k / per_unit);
    if (unit < whole) to = pack_32_rows<Pairs>(side, first, unit, whole, k, columns_follow, to);
    unit = std::max(unit, whole);
  }
  for (; unit < last_unit; ++unit) {
    for (int64_t v = 0; v < vectors; ++v, to += kLanes) {
      const uint32_t mask = first_bits(rows - v * kLanes) & 0xffff;
      _mm512_storeu_si512(to,
                          along_rows<Pairs>(side, first + v * kLanes, unit * per_unit, k, mask));
    }
  }
}

}  // namespace

void pack_left(const ProductSide& side, int64_t first, const Parts& parts, int64_t begin,
               int64_t end, int64_t k, uint32_t* to) {
  (side.bfloat16 ? pack_left_of<true> : pack_left_of<false>)(side, first, parts, begin, end, k, to);
}

void pack_right(const ProductSide& side, int64_t first, int64_t rows, int64_t k, uint32_t* to) {
  (side.bfloat16 ? pack_right_of<true> : pack_right_of<false>)(side, first, rows, k, 0,
                                                               side.units(k), false, to);
}

void pack_right_part(const ProductSide& side, int64_t first, int64_t rows, int64_t k, int64_t unit,
                     int64_t units, uint32_t* to) {
  (side.bfloat16 ? pack_right_of<true> : pack_right_of<false>)(side, first, rows, k, unit,
                                                               unit + units, true, to);
}

}  // namespace ligature::cpu

#pragma GCC pop_options
#else
namespace ligature::cpu {

void pack_left(const ProductSide&, int64_t, const Parts&, int64_t, int64_t, int64_t, uint32_t*) {}
void pack_right(const ProductSide&, int64_t, int64_t, int64_t, uint32_t*) {}
void pack_right_part(const ProductSide&, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t*) {}

}  // namespace ligature::cpu
#endif
