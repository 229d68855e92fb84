#include "ligature/backend/cpu/product_tile.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#include <array>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

namespace ligature::cpu {
namespace {

constexpr int kAhead = 1;            // of the left operand, in groups of 16 units
constexpr int kRightAhead = 8 * 32;  // of the right one, in units

template <bool Pairs>
[[gnu::always_inline]] inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
  if constexpr (Pairs) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  } else {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
}

/// Sums over all units, in order, into rows of floats that are `stride` apart, or added to them.
/// Where `rounded` is not null, they are written there in bfloat16 instead, and true is returned,
/// if that can be done at once.
template <int Rows, int Vectors, bool Pairs>
bool sums_of(const uint32_t* left, const uint32_t* right, int64_t units, float* to, int64_t stride,
             bool more, uint16_t* rounded, int64_t rounded_stride, bool streams) {
  __m512 sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      sum[r][v] = more ? _mm512_loadu_ps(to + r * stride + v * kLanes) : _mm512_setzero_ps();
    }
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
  // The processor's own conversion makes zeros of the smallest numbers, which sums of pairs never
  // are, and keeps what NaN carries.
  if constexpr (Pairs && Vectors == 2) {
    __mmask16 nan = rounded == nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      nan = _kor_mask16(nan, _mm512_cmp_ps_mask(sum[r][0], sum[r][1], _CMP_UNORD_Q));
    }
    if (nan == 0) {
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const __m512bh two = _mm512_cvtne2ps_pbh(sum[r][1], sum[r][0]);
        uint16_t* const place = rounded + r * rounded_stride;
        if (streams) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(place), reinterpret_cast<__m512i>(two));
        } else {
          _mm512_storeu_si512(place, reinterpret_cast<__m512i>(two));
        }
      }
      return true;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      _mm512_storeu_ps(to + r * stride + v * kLanes, sum[r][v]);
    }
  }
  return false;
}

using Sums = bool (*)(const uint32_t*, const uint32_t*, int64_t, float*, int64_t, bool, uint16_t*,
                      int64_t, bool);

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

/// To the nearest, ties to even, as everywhere else, in the upper halves: the processor's own
/// conversion would make zeros of the smallest numbers.
[[gnu::always_inline]] inline __m512i rounded_to_bfloat16(__m512 y) {
  const __m512i bits = _mm512_castps_si512(y);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}

[[gnu::always_inline]] inline void store(const ProductMatrix& m, int64_t at, __mmask16 mask,
                                         __m512 y) {
  if (!m.bfloat16) {
    _mm512_mask_storeu_ps(static_cast<float*>(m.data) + at, mask, y);
    return;
  }
  const __m512i high = _mm512_srli_epi32(rounded_to_bfloat16(y), 16);
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(m.data) + at, mask, _mm512_cvtepi32_epi16(high));
}

/// 32 of them: the processor is slow to write parts of lines under a mask.
[[gnu::always_inline]] inline void store_two(const ProductMatrix& m, int64_t at, __m512 y, __m512 z,
                                             bool streams) {
  const auto put = [&](uint32_t* to, __m512i bits) {
    if (streams) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
    } else {
      _mm512_storeu_si512(to, bits);
    }
  };
  if (!m.bfloat16) {
    uint32_t* const to = static_cast<uint32_t*>(m.data) + at;
    put(to, _mm512_castps_si512(y));
    put(to + kLanes, _mm512_castps_si512(z));
    return;
  }
  alignas(64) static constexpr std::array<uint16_t, 32> kUpper = [] {
    std::array<uint16_t, 32> order{};
    for (uint16_t i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(2 * i + 1);
    return order;
  }();
  const __m512i both = _mm512_permutex2var_epi16(
      rounded_to_bfloat16(y), _mm512_load_si512(kUpper.data()), rounded_to_bfloat16(z));
  put(reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(m.data) + at), both);
}

[[gnu::always_inline]] inline __m512 with_terms(__m512 y, const ProductTerms& terms, int64_t row,
                                                int64_t column, __mmask16 mask) {
  __m512 bias = _mm512_setzero_ps();
  if (terms.bias.data != nullptr) bias = load(terms.bias, column, mask);
  if (terms.row_scale != nullptr) bias = _mm512_mul_ps(bias, _mm512_set1_ps(terms.row_scale[row]));
  y = _mm512_fmadd_ps(y, _mm512_set1_ps(terms.alpha), bias);
  if (terms.add.data == nullptr) return y;
  return _mm512_add_ps(y, load(terms.add, row * terms.add.stride + column, mask));
}

bool is_plain(const ProductTerms& terms) {
  return terms.alpha == 1.0f && terms.bias.data == nullptr && terms.add.data == nullptr;
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

void sum_tile(const uint32_t* left, const uint32_t* right, int64_t rows, int64_t columns,
              int64_t units, bool bfloat16, const TileSums& sums, bool more) {
  kSums[bfloat16][columns > kLanes][rows - 1](left, right, units, sums.data, sums.stride, more,
                                              nullptr, 0, false);
}

void write_tile(const TileSums& sums, int64_t rows, int64_t columns, const ProductTerms& terms,
                int64_t row, int64_t column) {
  if (columns == kTileColumns) {
    const bool plain = is_plain(terms);
    for (int64_t r = 0; r < rows; ++r) {
      __m512 y = _mm512_loadu_ps(sums.data + r * sums.stride);
      __m512 z = _mm512_loadu_ps(sums.data + r * sums.stride + kLanes);
      if (!plain) {
        y = with_terms(y, terms, row + r, column, 0xffff);
        z = with_terms(z, terms, row + r, column + kLanes, 0xffff);
      }
      store_two(terms.out, (row + r) * terms.out.stride + column, y, z, terms.streams);
    }
    return;
  }
  for (int64_t v = 0; v * kLanes < columns; ++v) {
    const __mmask16 mask = first_bits(columns - v * kLanes) & 0xffff;
    const int64_t at = column + v * kLanes;
    for (int64_t r = 0; r < rows; ++r) {
      const __m512 y = _mm512_loadu_ps(sums.data + r * sums.stride + v * kLanes);
      store(terms.out, (row + r) * terms.out.stride + at, mask,
            with_terms(y, terms, row + r, at, mask));
    }
  }
}

void multiply_tile(const uint32_t* left, const uint32_t* right, int64_t rows, int64_t columns,
                   int64_t units, bool bfloat16, const ProductTerms& terms, int64_t row,
                   int64_t column) {
  for (int64_t r = 0; r < rows && !terms.streams; ++r) {
    const int64_t at = ((row + r) * terms.out.stride + column) * (terms.out.bfloat16 ? 2 : 4);
    __builtin_prefetch(static_cast<char*>(terms.out.data) + at, 1);
    if (!terms.out.bfloat16) __builtin_prefetch(static_cast<char*>(terms.out.data) + at + 64, 1);
  }
  const bool whole = columns == kLanes || columns == kTileColumns;
  if (is_plain(terms) && whole && !terms.out.bfloat16 && !terms.streams) {
    float* const out = static_cast<float*>(terms.out.data) + row * terms.out.stride + column;
    sum_tile(left, right, rows, columns, units, bfloat16, {out, terms.out.stride}, false);
    return;
  }
  alignas(64) float data[kTileRows * kTileColumns];
  const TileSums sums{data, kTileColumns};
  uint16_t* rounded = nullptr;
  if (is_plain(terms) && columns == kTileColumns && terms.out.bfloat16) {
    rounded = static_cast<uint16_t*>(terms.out.data) + row * terms.out.stride + column;
  }
  if (kSums[bfloat16][columns > kLanes][rows - 1](left, right, units, data, kTileColumns, false,
                                                  rounded, terms.out.stride, terms.streams)) {
    return;
  }
  write_tile(sums, rows, columns, terms, row, column);
}

}  // namespace ligature::cpu

#pragma GCC pop_options
#else
namespace ligature::cpu {

bool has_product_tiles(bool) { return false; }
bool gains_by_product_tiles() { return false; }
void sum_tile(const uint32_t*, const uint32_t*, int64_t, int64_t, int64_t, bool, const TileSums&,
              bool) {}
void write_tile(const TileSums&, int64_t, int64_t, const ProductTerms&, int64_t, int64_t) {}
void multiply_tile(const uint32_t*, const uint32_t*, int64_t, int64_t, int64_t, bool,
                   const ProductTerms&, int64_t, int64_t) {}

}  // namespace ligature::cpu
#endif
