// Codes of a tile, rounded to nearest. See quantize_tile.h.
//
// Two 16-bit values are taken as one 32-bit number and become one 16-bit pair of codes, which
// spares the shuffles of widening and narrowing one by one. The pairs are narrowed in a loop of
// their own: else the compiler would narrow every step of the encoding instead of its result.
#include <algorithm>
#include <cstring>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/quantize_tile.h"
#include "ligature/backend/cpu/stream.h"

namespace ligature::cpu {
namespace {

// Pairs encoded at once.
constexpr int64_t kPairs = 256;

template <typename T>
struct Pair {
  float first, second;
};

template <typename T>
LIGATURE_INLINE Pair<T> read_pair(const T* x) {
  if constexpr (std::is_same_v<T, float>) {
    return {x[0], x[1]};
  } else {
    uint32_t both;
    std::memcpy(&both, x, sizeof(both));
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      return {std::bit_cast<float>(both << 16), std::bit_cast<float>(both & 0xffff0000u)};
    } else {
      const auto half = [](uint32_t bits) {
        return Cast<T, float>::apply(T(static_cast<uint16_t>(bits), T::from_bits()));
      };
      return {half(both & 0xffffu), half(both >> 16)};
    }
  }
}

template <Element E, typename Code>
LIGATURE_INLINE void narrow(const uint32_t* from, int64_t n, uint8_t* to) {
  for (int64_t i = 0; i < n; ++i) {
    const Code code = static_cast<Code>(from[i]);
    std::memcpy(to + i * sizeof(Code), &code, sizeof(code));
  }
}

// n pairs at most kPairs; factor_of(i) is that of pair i.
template <typename T, Element E, bool held, typename Factors>
LIGATURE_INLINE void encode_pairs(const T* x, int64_t n, const Factors& factor_of, bool stream,
                                  uint8_t* codes) {
  constexpr int bits = E == Element::E2M1 ? 4 : 8;
  uint32_t both[kPairs];
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const Pair<T> pair = read_pair(x + 2 * i);
    const float factor = factor_of(i);
    const uint32_t first = encode_bits<E, held>(pair.first * factor);
    const uint32_t second = encode_bits<E, held>(pair.second * factor) << bits;
    both[i] = ((first ^ second) & ((1u << bits) - 1)) ^ second;
  }
  using Code = std::conditional_t<bits == 4, uint8_t, uint16_t>;
  if (!stream) return narrow<E, Code>(both, n, codes);
  alignas(64) uint8_t local[kPairs * sizeof(Code)];
  narrow<E, Code>(both, n, local);
  stream_copy(codes, local, n * sizeof(Code));
}

template <typename T>
LIGATURE_INLINE void fetch(const T* x, int64_t ahead, int64_t n) {
  constexpr int64_t line = 64;
  const uintptr_t first = reinterpret_cast<uintptr_t>(x) + ahead * sizeof(T);
  for (uintptr_t at = first; at < first + n * sizeof(T); at += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
  }
}

// A `size` of 0: one factor for everything.
template <typename T, Element E, int64_t size, bool held>
LIGATURE_SIMD void encode_blocks(const Tile<T>& x, int64_t group, const float* factors,
                                 Codes codes) {
  constexpr int64_t per_byte = E == Element::E2M1 ? 2 : 1;
  const int64_t blocks = size == 0 ? 1 : ceil_div(x.columns, size);
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* row = x.data + r * x.stride;
    const float* factor = factors + (group == 1 ? r : r / group) * blocks;
    uint8_t* out = codes.data + r * codes.stride;
    int64_t c = 0;
    for (; c + 1 < x.columns; c += 2 * kPairs) {
      const int64_t n = std::min(kPairs, (x.columns - c) / 2);
      if (x.ahead != 0) fetch(row + c, x.ahead, 2 * n);
      if constexpr (size == 0) {
        const float one = *factor;
        encode_pairs<T, E, held>(
            row + c, n, [=](int64_t) { return one; }, codes.stream, out + c / per_byte);
      } else {
        float each[kPairs];
        for (int64_t i = 0; i < n; i += size / 2) {
          const float one = factor[(c + 2 * i) / size];
          for (int64_t j = 0; j < size / 2; ++j) each[i + j] = one;
        }
        encode_pairs<T, E, held>(
            row + c, n, [&](int64_t i) { return each[i]; }, codes.stream, out + c / per_byte);
      }
    }
    if (x.columns % 2 != 0) {
      const float last = Cast<T, float>::apply(row[x.columns - 1]) * factor[blocks - 1];
      constexpr uint32_t bits = E == Element::E2M1 ? 15 : 255;
      out[(x.columns - 1) / per_byte] = static_cast<uint8_t>(encode_bits<E, held>(last) & bits);
    }
  }
}

template <typename T, Element E, bool held>
void encode(const Tile<T>& x, Blocks blocks, const float* factors, Codes codes) {
  if constexpr (E == Element::E2M1) {
    encode_blocks<T, E, 16, held>(x, blocks.group, factors, codes);
  } else if (blocks.size == 32) {
    encode_blocks<T, E, 32, held>(x, blocks.group, factors, codes);
  } else if (blocks.size == 128) {
    encode_blocks<T, E, 128, held>(x, blocks.group, factors, codes);
  } else {
    encode_blocks<T, E, 0, held>(x, blocks.group, factors, codes);
  }
}

template <typename T, Element E>
void encode(const Tile<T>& x, Blocks blocks, const float* factors, bool held, Codes codes) {
  held ? encode<T, E, true>(x, blocks, factors, codes)
       : encode<T, E, false>(x, blocks, factors, codes);
}

}  // namespace

template <typename T>
void encode_tile(const Tile<T>& x, Element element, Blocks blocks, const float* factors, bool held,
                 Codes codes) {
  element == Element::E4M3 ? encode<T, Element::E4M3>(x, blocks, factors, held, codes)
                           : encode<T, Element::E5M2>(x, blocks, factors, held, codes);
}

template <typename T>
void encode_tile_fp4(const Tile<T>& x, Blocks blocks, const float* factors, Codes packed) {
  encode<T, Element::E2M1, false>(x, blocks, factors, packed);
}

#define LIGATURE_INSTANTIATE(T)                                                          \
  template void encode_tile(const Tile<T>&, Element, Blocks, const float*, bool, Codes); \
  template void encode_tile_fp4(const Tile<T>&, Blocks, const float*, Codes);
LIGATURE_INSTANTIATE(float)
LIGATURE_INSTANTIATE(at::BFloat16)
LIGATURE_INSTANTIATE(at::Half)
#undef LIGATURE_INSTANTIATE

}  // namespace ligature::cpu
