// Results too large for the caches, written past them: a plain store would first read the memory
// that it is about to overwrite.
#pragma once

#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ligature::cpu {

/// From how many bytes on a result is better not kept in the caches.
constexpr int64_t kStreamBytes = int64_t{8} << 20;
/// The same for kernels that read as much as they write: of what is smaller, a part may still be in
/// the last cache when it is read again.
constexpr int64_t kStreamResultBytes = int64_t{16} << 20;

/// As memcpy, past the caches but for the ends of lines.
void stream_copy(uint8_t* to, const uint8_t* from, int64_t n);

/// Before another thread may read what was streamed.
inline void stream_end() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace ligature::cpu
