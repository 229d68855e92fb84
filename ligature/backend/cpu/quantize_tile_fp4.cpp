// FP4 codes by chance, how far off codes are, and how they are packed. See quantize_tile.h.
#include <algorithm>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/philox.h"
#include "ligature/backend/cpu/quantize_tile.h"

namespace ligature::cpu {
namespace {

constexpr int64_t kBlock = 16;
// Values taken at once.
constexpr int64_t kRun = 512;

// Random words, four to a counter.
LIGATURE_SIMD void philox_words(uint64_t seed, uint64_t first, uint32_t stream, int64_t n,
                                uint32_t* words) {
  const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    const auto four =
        philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), stream, 0},
               key0, key1);
    words[4 * i] = four[0];
    words[4 * i + 1] = four[1];
    words[4 * i + 2] = four[2];
    words[4 * i + 3] = four[3];
  }
}

// A factor for every pair of values from one for every block.
LIGATURE_INLINE void spread(const float* factors, int64_t pairs, float* each) {
  for (int64_t i = 0; i < pairs; i += kBlock / 2) {
    const float one = factors[i / (kBlock / 2)];
    for (int64_t j = 0; j < kBlock / 2; ++j) each[i + j] = one;
  }
}

// Values are widened first: the loops after that are the same for every dtype.
template <typename T>
LIGATURE_INLINE void widen(const T* x, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = Cast<T, float>::apply(x[i]);
}

// At most kRun values; `out` is one byte for two, of which a last one may be missing.
template <typename T>
LIGATURE_SIMD void encode_random(const T* x, int64_t n, const float* factors,
                                 const uint32_t* random, uint8_t* out) {
  const int64_t pairs = (n + 1) / 2;
  float values[kRun + 1], each[kRun / 2];
  uint32_t both[kRun / 2];
  values[n] = 0;
  widen(x, n, values);
  spread(factors, pairs, each);
#pragma GCC ivdep
  for (int64_t i = 0; i < pairs; ++i) {
    both[i] = encode_fp4_bits(values[2 * i] * each[i], random[2 * i]) |
              encode_fp4_bits(values[2 * i + 1] * each[i], random[2 * i + 1]) << 4;
  }
  for (int64_t i = 0; i < pairs; ++i) out[i] = static_cast<uint8_t>(both[i]);
}

LIGATURE_INLINE float sum_of_8(const float* e) {
  const float fours[4] = {e[0] + e[4], e[1] + e[5], e[2] + e[6], e[3] + e[7]};
  return (fours[0] + fours[2]) + (fours[1] + fours[3]);
}

// At most kRun values. Each block's sum is a tree over 16 terms, of which those beyond n are 0; the
// terms of even and of odd places are kept apart until the last step.
template <typename T>
LIGATURE_SIMD void add_errors(const T* x, int64_t n, const uint8_t* packed, const uint8_t* scales,
                              float upper, bool square, float* errors) {
  const int64_t blocks = ceil_div(n, kBlock), pairs = blocks * kBlock / 2;
  float values[kRun], each[kRun / 2], even[kRun / 2], odd[kRun / 2], factors[kRun / kBlock];
  uint8_t codes[kRun / 2];
  std::fill(values + n / 16 * 16, values + 2 * pairs, 0.0f);
  widen(x, n, values);
  for (int64_t b = 0; b < blocks; ++b) factors[b] = decode_fp8<Element::E4M3>(scales[b]);
  spread(factors, pairs, each);
  std::fill(codes + n / 16 * 8, codes + pairs, uint8_t{0});
  std::copy_n(packed, (n + 1) / 2, codes);
  const int32_t kept = square ? -1 : kMagnitude;  // of an error, times itself or 1
#pragma GCC ivdep
  for (int64_t i = 0; i < pairs; ++i) {
    const float first = values[2 * i] - decode_fp4(codes[i] & 15) * each[i] * upper;
    const float second = values[2 * i + 1] - decode_fp4(codes[i] >> 4) * each[i] * upper;
    even[i] =
        std::bit_cast<float>(std::bit_cast<int32_t>(first) & kept) * select(square, first, 1.0f);
    odd[i] =
        std::bit_cast<float>(std::bit_cast<int32_t>(second) & kept) * select(square, second, 1.0f);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    errors[b] += sum_of_8(even + b * kBlock / 2) + sum_of_8(odd + b * kBlock / 2);
  }
}

LIGATURE_SIMD void pack_row(const uint8_t* codes, int64_t n, uint8_t* packed) {
  for (int64_t i = 0; i < n / 2; ++i) {
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  if (n % 2 != 0) packed[n / 2] = codes[n - 1];
}

LIGATURE_SIMD void unpack_row(const uint8_t* packed, int64_t n, uint8_t* codes) {
  for (int64_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = packed[i] & 0xf;
    codes[2 * i + 1] = packed[i] >> 4;
  }
  if (n % 2 != 0) codes[n - 1] = packed[n / 2] & 0xf;
}

}  // namespace

template <typename T>
void encode_tile_fp4(const Tile<T>& x, Blocks blocks, const float* factors, const Draws& draws,
                     Codes packed) {
  uint32_t words[kRun + 8];
  const int64_t across = blocks.across(x.columns);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.columns; c += kRun) {
      const int64_t n = std::min(kRun, x.columns - c);
      const uint64_t index = static_cast<uint64_t>(draws.first + r * draws.stride + c);
      const int64_t within = static_cast<int64_t>(index % 4);
      philox_words(draws.seed, draws.offset + index / 4, draws.stream, ceil_div(within + n + 1, 4),
                   words);
      encode_random(x.data + r * x.stride + c, n, factors + r / blocks.group * across + c / kBlock,
                    words + within, packed.data + r * packed.stride + c / 2);
    }
  }
}

template <typename T>
void block_errors(const Tile<T>& x, Blocks blocks, Codes packed, const uint8_t* scales,
                  const float* upper, int64_t step, bool square, float* errors) {
  const int64_t across = blocks.across(x.columns);
  std::fill_n(errors, across * blocks.down(x.rows), 0.0f);
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t group = r / blocks.group;
    for (int64_t c = 0; c < x.columns; c += kRun) {
      const int64_t block = group * across + c / kBlock;
      add_errors(x.data + r * x.stride + c, std::min(kRun, x.columns - c),
                 packed.data + r * packed.stride + c / 2, scales + block, upper[group * step],
                 square, errors + block);
    }
  }
}

void pack_fp4(Codes codes, int64_t rows, int64_t columns, uint8_t* packed, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    pack_row(codes.data + r * codes.stride, columns, packed + r * stride);
  }
}

void unpack_fp4(const uint8_t* packed, int64_t stride, int64_t rows, int64_t columns, Codes codes) {
  for (int64_t r = 0; r < rows; ++r) {
    unpack_row(packed + r * stride, columns, codes.data + r * codes.stride);
  }
}

#define LIGATURE_INSTANTIATE(T)                                                                    \
  template void encode_tile_fp4(const Tile<T>&, Blocks, const float*, const Draws&, Codes);        \
  template void block_errors(const Tile<T>&, Blocks, Codes, const uint8_t*, const float*, int64_t, \
                             bool, float*);
LIGATURE_INSTANTIATE(float)
LIGATURE_INSTANTIATE(at::BFloat16)
LIGATURE_INSTANTIATE(at::Half)
#undef LIGATURE_INSTANTIATE

}  // namespace ligature::cpu
