#include "ligature/backend/cpu/product_tile.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

namespace ligature::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kAhead = 1;            // of the left operand, in groups of 16 units
constexpr int kRowsAhead = 16;       // of an operand that is packed
constexpr int kRightAhead = 8 * 32;  // of the right one, in units

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

[[gnu::always_inline]] inline uint32_t first_bits(int64_t n) {
  return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1;
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

/// One unit of each of 16 rows that follow each other.
template <bool Pairs>
[[gnu::always_inline]] inline __m512i along_rows(const void* data, int64_t offset, int64_t stride,
                                                 uint32_t rows, bool second) {
  if constexpr (Pairs) {
    const uint16_t* at = static_cast<const uint16_t*>(data) + offset;
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rows, at));
    if (!second) return even;
    const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rows, at + stride));
    return _mm512_or_epi32(even, _mm512_slli_epi32(odd, 16));
  } else {
    return _mm512_maskz_loadu_epi32(rows, static_cast<const uint32_t*>(data) + offset);
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
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    const int64_t offset = (row + r) * side.row_stride + unit * per_unit;
    if (r < rows) prefetch<Pairs>(side, offset + 4 * kLanes * per_unit);
    s.row[r] = r < rows ? along_k<Pairs>(side.data, offset, left) : _mm512_setzero_si512();
  }
  transpose(s);
}

/// 16 units of `rows` rows.
template <bool Pairs>
[[gnu::always_inline]] inline void pack_left_block(const ProductSide& side, int64_t first,
                                                   int64_t rows, int64_t unit, int64_t k,
                                                   uint32_t* to) {
  const int64_t per_unit = Pairs ? 2 : 1;
  if (side.k_stride == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t offset = (first + r) * side.row_stride + unit * per_unit;
      _mm512_storeu_si512(to + r * kLanes, along_k<Pairs>(side.data, offset, k - unit * per_unit));
    }
    return;
  }
  Square s;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    const int64_t at = (unit + j) * per_unit;
    s.row[j] = at < k ? along_rows<Pairs>(side.data, first + at * side.k_stride, side.k_stride,
                                          first_bits(rows), at + 1 < k)
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
  const bool by_part = side.k_stride == 1;
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

template <bool Pairs>
void pack_right_of(const ProductSide& side, int64_t first, int64_t rows, int64_t k, uint32_t* to) {
  const int64_t units = side.units(k);
  const int64_t per_unit = Pairs ? 2 : 1;
  const int64_t vectors = rows > kLanes ? 2 : 1;
  if (side.k_stride == 1) {
    for (int64_t unit = 0; unit < units; unit += kLanes) {
      const int64_t count = units - unit < kLanes ? units - unit : kLanes;
      for (int64_t v = 0; v < vectors; ++v) {
        Square s;
        load_transposed<Pairs>(side, first + v * kLanes, rows - v * kLanes, unit, k, s);
        for (int64_t j = 0; j < count; ++j) {
          _mm512_storeu_si512(to + ((unit + j) * vectors + v) * kLanes, s.row[j]);
        }
      }
    }
    return;
  }
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t at = unit * per_unit;
    for (int64_t v = 0; v < vectors; ++v, to += kLanes) {
      const uint32_t mask = first_bits(rows - v * kLanes) & 0xffff;
      const int64_t offset = first + v * kLanes + at * side.k_stride;
      for (int64_t next = 0; next < per_unit; ++next) {
        prefetch<Pairs>(side, offset + (kRowsAhead * per_unit + next) * side.k_stride);
      }
      _mm512_storeu_si512(to,
                          along_rows<Pairs>(side.data, offset, side.k_stride, mask, at + 1 < k));
    }
  }
}

template <bool Pairs>
[[gnu::always_inline]] inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
  if constexpr (Pairs) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  } else {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
}

/// Sums over all units, in order, into rows of floats that are `stride` apart.
template <int Rows, int Vectors, bool Pairs>
void sums_of(const uint32_t* left, const uint32_t* right, int64_t units, float* to,
             int64_t stride) {
  __m512 sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (; units > 0; units -= kLanes, left += (Rows - 1) * kLanes) {
    const uint32_t* const end = left + (units < kLanes ? units : kLanes);
    const uint32_t* ahead = left + kAhead * Rows * kLanes;
    for (; left != end; ++left, right += Vectors * kLanes, ahead += kLanes) {
      _mm_prefetch(ahead, _MM_HINT_T0);
      __m512i b[Vectors];
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        _mm_prefetch(right + kRightAhead + v * kLanes, _MM_HINT_T0);
      }
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) b[v] = _mm512_loadu_si512(right + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const __m512i a = _mm512_set1_epi32(static_cast<int32_t>(left[r * kLanes]));
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sum[r][v] = multiply_add<Pairs>(sum[r][v], a, b[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      _mm512_storeu_ps(to + r * stride + v * kLanes, sum[r][v]);
    }
  }
}

using Sums = void (*)(const uint32_t*, const uint32_t*, int64_t, float*, int64_t);

#define LIGATURE_TILES(vectors, pairs)                                                    \
  {sums_of<1, vectors, pairs>,  sums_of<2, vectors, pairs>,  sums_of<3, vectors, pairs>,  \
   sums_of<4, vectors, pairs>,  sums_of<5, vectors, pairs>,  sums_of<6, vectors, pairs>,  \
   sums_of<7, vectors, pairs>,  sums_of<8, vectors, pairs>,  sums_of<9, vectors, pairs>,  \
   sums_of<10, vectors, pairs>, sums_of<11, vectors, pairs>, sums_of<12, vectors, pairs>, \
   sums_of<13, vectors, pairs>, sums_of<14, vectors, pairs>}
constexpr Sums kSums[2][2][kTileRows] = {{LIGATURE_TILES(1, false), LIGATURE_TILES(2, false)},
                                         {LIGATURE_TILES(1, true), LIGATURE_TILES(2, true)}};
#undef LIGATURE_TILES

[[gnu::always_inline]] inline __m512 load(const ProductMatrix& m, int64_t at, __mmask16 mask) {
  if (!m.bfloat16) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(m.data) + at);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(m.data) + at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/// To the nearest, ties to even, as everywhere else: the processor's own conversion would make
/// zeros of the smallest numbers.
[[gnu::always_inline]] inline __m256i to_bfloat16(__m512 y) {
  const __m512i bits = _mm512_castps_si512(y);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
  const __m512i out = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16));
}

}  // namespace

bool has_product_tiles(bool bfloat16) {
  static const bool floats =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool pairs = floats && __builtin_cpu_supports("avx512bf16");
  return bfloat16 ? pairs : floats;
}

// Measured on AMD's processors, for which MKL is not made.
bool gains_by_product_tiles() {
  static const bool gains = __builtin_cpu_is("amd");
  return gains;
}

void pack_left(const ProductSide& side, int64_t first, const Parts& parts, int64_t begin,
               int64_t end, int64_t k, uint32_t* to) {
  (side.bfloat16 ? pack_left_of<true> : pack_left_of<false>)(side, first, parts, begin, end, k, to);
}

void pack_right(const ProductSide& side, int64_t first, int64_t rows, int64_t k, uint32_t* to) {
  (side.bfloat16 ? pack_right_of<true> : pack_right_of<false>)(side, first, rows, k, to);
}

void multiply_tile(const uint32_t* left, const uint32_t* right, int64_t rows, int64_t columns,
                   int64_t units, bool bfloat16, const ProductTerms& terms, int64_t row,
                   int64_t column) {
  alignas(64) float sums[kTileRows * kTileColumns];
  const int64_t vectors = columns > kLanes ? 2 : 1;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = ((row + r) * terms.out.stride + column) * (terms.out.bfloat16 ? 2 : 4);
    __builtin_prefetch(static_cast<char*>(terms.out.data) + at, 1);
    if (!terms.out.bfloat16) __builtin_prefetch(static_cast<char*>(terms.out.data) + at + 64, 1);
  }
  const Sums sum = kSums[bfloat16][vectors - 1][rows - 1];
  const bool plain = terms.alpha == 1.0f && terms.bias.data == nullptr && terms.add.data == nullptr;
  if (plain && !terms.out.bfloat16 && columns == vectors * kLanes) {
    float* const out = static_cast<float*>(terms.out.data) + row * terms.out.stride + column;
    sum(left, right, units, out, terms.out.stride);
    return;
  }
  sum(left, right, units, sums, kTileColumns);
  for (int64_t v = 0; v < vectors; ++v) {
    const __mmask16 mask = first_bits(columns - v * kLanes) & 0xffff;
    const int64_t at = column + v * kLanes;
    const __m512 bias =
        terms.bias.data != nullptr ? load(terms.bias, at, mask) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; ++r) {
      __m512 y = _mm512_load_ps(sums + r * kTileColumns + v * kLanes);
      y = _mm512_fmadd_ps(y, _mm512_set1_ps(terms.alpha), bias);
      if (terms.add.data != nullptr) {
        y = _mm512_add_ps(y, load(terms.add, (row + r) * terms.add.stride + at, mask));
      }
      const int64_t place = (row + r) * terms.out.stride + at;
      if (terms.out.bfloat16) {
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(terms.out.data) + place, mask,
                                 to_bfloat16(y));
      } else {
        _mm512_mask_storeu_ps(static_cast<float*>(terms.out.data) + place, mask, y);
      }
    }
  }
}

}  // namespace ligature::cpu

#pragma GCC pop_options
#else
namespace ligature::cpu {

bool has_product_tiles(bool) { return false; }
bool gains_by_product_tiles() { return false; }
void pack_left(const ProductSide&, int64_t, const Parts&, int64_t, int64_t, int64_t, uint32_t*) {}
void pack_right(const ProductSide&, int64_t, int64_t, int64_t, uint32_t*) {}
void multiply_tile(const uint32_t*, const uint32_t*, int64_t, int64_t, int64_t, bool,
                   const ProductTerms&, int64_t, int64_t) {}

}  // namespace ligature::cpu
#endif
