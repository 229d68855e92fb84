// Philox4x32-10: a counter and a key give four random words, in any order and on any thread.
#pragma once

#include <array>
#include <cstdint>

#include "ligature/backend/cpu/vector_math.h"

namespace ligature::cpu {

LIGATURE_INLINE std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0,
                                               uint32_t key1) {
  uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xd2511f53} * a;
    const uint64_t second = uint64_t{0xcd9e8d57} * c;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key0;
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key1;
    b = static_cast<uint32_t>(second);
    d = static_cast<uint32_t>(first);
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  return {a, b, c, d};
}

}  // namespace ligature::cpu
