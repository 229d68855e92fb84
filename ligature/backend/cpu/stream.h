// Results too large for the caches, written past them: a plain store would first read the memory
// that it is about to overwrite.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ligature::cpu {

/// From how many bytes on a result is better not kept in the caches.
constexpr int64_t kStreamBytes = int64_t{8} << 20;
/// The same for kernels that read as much as they write: what they write, if smaller, may still be
/// in the last cache when it is read.
constexpr int64_t kStreamResultBytes = int64_t{32} << 20;

/// As memcpy, past the caches where `to` lies on a border of 16 bytes.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t n) {
  int64_t i = 0;
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; i + 16 <= n; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
  }
#endif
  std::memcpy(to + i, from + i, n - i);
}

/// Before another thread may read what was streamed.
inline void stream_end() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace ligature::cpu
