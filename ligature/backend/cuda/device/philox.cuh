// Philox4x32-10: a counter and a key give four random words, in any order and on any thread; the
// words of backend/cpu/philox.h.
#pragma once

#include <cstdint>

#include "ligature/backend/cuda/device/float8.cuh"

namespace ligature::cuda {

LIGATURE_BOTH void philox(uint64_t counter, uint64_t stream, uint64_t seed, uint32_t* words) {
  uint32_t a = static_cast<uint32_t>(counter), b = static_cast<uint32_t>(counter >> 32);
  uint32_t c = static_cast<uint32_t>(stream), d = static_cast<uint32_t>(stream >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  LIGATURE_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = wide_product(a, 0xd2511f53u);
    const uint64_t second = wide_product(c, 0xcd9e8d57u);
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key0;
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key1;
    b = static_cast<uint32_t>(second);
    d = static_cast<uint32_t>(first);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  words[0] = a;
  words[1] = b;
  words[2] = c;
  words[3] = d;
}

}  // namespace ligature::cuda
