// Largest magnitudes of a tile, and the factors they give. See quantize_tile.h.
#include "ligature/backend/cpu/quantize_tile.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/float8.h"

namespace ligature::cpu {
namespace {

// Magnitudes compare as integers of the dtype's own size, which is faster than as floats.
template <typename T>
struct Bits {
  using Int = int16_t;
  static constexpr Int magnitudes = 0x7fff;
  static constexpr Int infinity = std::is_same_v<T, at::Half> ? 0x7c00 : 0x7f80;
  LIGATURE_INLINE static Int magnitude(T v) { return static_cast<Int>(v.x & 0x7fff); }
  LIGATURE_INLINE static uint32_t widen(Int m) {
    return std::bit_cast<uint32_t>(
        Cast<T, float>::apply(T(static_cast<uint16_t>(m), T::from_bits())));
  }
};

template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr Int magnitudes = kMagnitude;
  static constexpr Int infinity = kInfinity;
  LIGATURE_INLINE static Int magnitude(float v) { return std::bit_cast<int32_t>(v) & kMagnitude; }
  LIGATURE_INLINE static uint32_t widen(Int m) { return static_cast<uint32_t>(m); }
};

template <typename T, bool keep_nan>
LIGATURE_INLINE typename Bits<T>::Int counted(T v) {
  using Int = typename Bits<T>::Int;
  const Int m = Bits<T>::magnitude(v);
  if constexpr (keep_nan) return m;
  return static_cast<Int>(m & -static_cast<Int>(m <= Bits<T>::infinity));
}

template <typename T, bool keep_nan>
LIGATURE_INLINE typename Bits<T>::Int amax_of(const T* x, int64_t n) {
  typename Bits<T>::Int largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, counted<T, keep_nan>(x[i]));
  return largest;
}

template <typename T, bool keep_nan>
LIGATURE_SIMD uint32_t whole_amax(const Tile<T>& x) {
  typename Bits<T>::Int largest = 0;
  for (int64_t r = 0; r < x.rows; ++r) {
    largest = std::max(largest, amax_of<T, keep_nan>(x.data + r * x.stride, x.columns));
  }
  return Bits<T>::widen(largest);
}

template <typename T>
LIGATURE_SIMD void raise_columns(const T* x, int64_t n, uint32_t* amax) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float v = Cast<T, float>::apply(x[i]);
    amax[i] = std::max(amax[i], static_cast<uint32_t>(counted<float, false>(v)));
  }
}

// As many blocks at once as a vector of 16 bytes has lanes: first a vector of each, then two
// vectors are interleaved and the larger of what came from the same block is kept, until there is
// one.
template <typename T, int64_t size>
struct BlockVectors {
  using Int = typename Bits<T>::Int;
  typedef Int Row __attribute__((vector_size(16)));
  static constexpr int64_t lanes = 16 / sizeof(Int);

  LIGATURE_INLINE static Row larger(Row a, Row b) { return a > b ? a : b; }

  template <size_t... lane>
  LIGATURE_INLINE static Row merge(Row a, Row b, std::index_sequence<lane...>) {
    constexpr int64_t half = lanes / 2;
    return larger(__builtin_shufflevector(a, b, (lane / 2 + lane % 2 * lanes)...),
                  __builtin_shufflevector(a, b, (half + lane / 2 + lane % 2 * lanes)...));
  }

  /// The largest magnitudes of `lanes` blocks.
  LIGATURE_INLINE static Row amax(const T* x) {
    Row v[lanes];
#pragma GCC unroll 8
    for (int64_t b = 0; b < lanes; ++b) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < size; i += lanes) {
        Row part;
        std::memcpy(&part, x + b * size + i, sizeof(part));
        part &= Bits<T>::magnitudes;
        v[b] = i == 0 ? part : larger(v[b], part);
      }
    }
#pragma GCC unroll 3
    for (int64_t half = lanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < half; ++i) {
        v[i] = merge(v[i], v[i + half], std::make_index_sequence<lanes>());
      }
    }
    return v[0];
  }
};

// Blocks whose magnitudes are widened at once.
constexpr int64_t kRun = 64;

// Of the blocks of a row: stored, or where a block has rows above this one, raised.
template <typename T, int64_t size, bool keep_nan>
LIGATURE_INLINE void row_blocks_amax(const T* x, int64_t n, bool raise, uint32_t* amax) {
  using Vectors = BlockVectors<T, size>;
  const int64_t blocks = ceil_div(n, size);
  for (int64_t first = 0; first < blocks; first += kRun) {
    typename Vectors::Int largest[kRun];
    const int64_t count = std::min(kRun, blocks - first);
    int64_t b = 0;
    if constexpr (keep_nan && size < 128) {
      for (; b + Vectors::lanes <= count && (first + b + Vectors::lanes) * size <= n;
           b += Vectors::lanes) {
        const auto found = Vectors::amax(x + (first + b) * size);
        std::memcpy(largest + b, &found, sizeof(found));
      }
    }
    for (; b < count; ++b) {
      const int64_t at = (first + b) * size;
      largest[b] = amax_of<T, keep_nan>(x + at, std::min(size, n - at));
    }
    uint32_t* out = amax + first;
    if (raise) {
      for (b = 0; b < count; ++b) out[b] = std::max(out[b], Bits<T>::widen(largest[b]));
    } else {
      for (b = 0; b < count; ++b) out[b] = Bits<T>::widen(largest[b]);
    }
  }
}

template <typename T, int64_t size, bool keep_nan>
LIGATURE_SIMD void blocks_amax(const Tile<T>& x, int64_t group, uint32_t* amax) {
  const int64_t blocks = ceil_div(x.columns, size);
  for (int64_t first = 0; first < x.rows; first += group, amax += blocks) {
    for (int64_t r = first; r < std::min(first + group, x.rows); ++r) {
      row_blocks_amax<T, size, keep_nan>(x.data + r * x.stride, x.columns, r > first, amax);
    }
  }
}

template <typename T, bool keep_nan>
void blocks_amax(const Tile<T>& x, Blocks blocks, uint32_t* amax) {
  switch (blocks.size) {
    case 16:
      return blocks_amax<T, 16, keep_nan>(x, blocks.group, amax);
    case 32:
      return blocks_amax<T, 32, keep_nan>(x, blocks.group, amax);
    default:
      return blocks_amax<T, 128, keep_nan>(x, blocks.group, amax);
  }
}

LIGATURE_SIMD void float_factors(const uint32_t* amax, int64_t n, float max, float epsilon,
                                 bool power_of_2, float* factors, float* scales) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    factors[i] = factor_of(std::bit_cast<float>(amax[i]), max, epsilon, power_of_2);
    scales[i] = 1.0f / factors[i];
  }
}

LIGATURE_SIMD void e8m0_factors(const uint32_t* amax, int64_t n, float max, float* factors,
                                uint8_t* scales) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const int32_t code = encode_e8m0(std::bit_cast<float>(amax[i]) / max);
    factors[i] = e8m0_factor(code);
    scales[i] = static_cast<uint8_t>(code);
  }
}

LIGATURE_SIMD void e4m3_factors(const uint32_t* amax, int64_t n, float upper, float top,
                                float* factors, uint8_t* scales) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t code = encode_fp8<Element::E4M3>(std::bit_cast<float>(amax[i]) / top / upper);
    const float f = decode_fp8<Element::E4M3>(code) * upper;
    const float inverse = 1.0f / f;
    const float finite = select(inverse == std::bit_cast<float>(kInfinity),
                                std::bit_cast<float>(kInfinity - 1), inverse);
    factors[i] = select(f == 0.0f, 0.0f, finite);
    scales[i] = code;
  }
}

}  // namespace

template <typename T>
uint32_t tile_amax(const Tile<T>& x, bool keep_nan) {
  return keep_nan ? whole_amax<T, true>(x) : whole_amax<T, false>(x);
}

template <typename T>
void row_amax(const Tile<T>& x, uint32_t* amax) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const Tile<T> row{x.data + r * x.stride, x.stride, 1, x.columns};
    amax[r] = std::max(amax[r], whole_amax<T, false>(row));
  }
}

template <typename T>
void column_amax(const Tile<T>& x, uint32_t* amax) {
  for (int64_t r = 0; r < x.rows; ++r) raise_columns(x.data + r * x.stride, x.columns, amax);
}

template <typename T>
void block_amax(const Tile<T>& tile, Blocks blocks, bool keep_nan, uint32_t* amax) {
  Tile<T> x = tile;
  if (blocks.group == 1 && x.stride == x.columns && x.columns % blocks.size == 0) {
    x = {x.data, 0, 1, x.rows * x.columns};  // blocks are as good as in one row
  }
  keep_nan ? blocks_amax<T, true>(x, blocks, amax) : blocks_amax<T, false>(x, blocks, amax);
}

void block_factors(const uint32_t* amax, int64_t n, const Format& format, float* factors,
                   float* scales) {
  float_factors(amax, n, max_value(format.element), format.amax_epsilon, format.power_of_2_scales,
                factors, scales);
}

void mx_factors(const uint32_t* amax, int64_t n, Element element, float* factors, uint8_t* scales) {
  e8m0_factors(amax, n, max_value(element), factors, scales);
}

void nv_factors(const uint32_t* amax, int64_t rows, int64_t n, const float* upper, int64_t step,
                float top, float* factors, uint8_t* scales) {
  if (step == 0) return e4m3_factors(amax, rows * n, *upper, top, factors, scales);
  for (int64_t r = 0; r < rows; ++r) {
    e4m3_factors(amax + r * n, n, upper[r * step], top, factors + r * n, scales + r * n);
  }
}

#define LIGATURE_INSTANTIATE(T)                         \
  template uint32_t tile_amax(const Tile<T>&, bool);    \
  template void row_amax(const Tile<T>&, uint32_t*);    \
  template void column_amax(const Tile<T>&, uint32_t*); \
  template void block_amax(const Tile<T>&, Blocks, bool, uint32_t*);
LIGATURE_INSTANTIATE(float)
LIGATURE_INSTANTIATE(at::BFloat16)
LIGATURE_INSTANTIATE(at::Half)
#undef LIGATURE_INSTANTIATE

}  // namespace ligature::cpu
