// Stores past the caches in whole lines, which are what the memory takes: narrower ones are slower
// than plain stores.
#include "ligature/backend/cpu/stream.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define LIGATURE_STREAMS
#endif

namespace ligature::cpu {
namespace {

constexpr int64_t kLine = 64;

#ifdef LIGATURE_STREAMS
__attribute__((target("avx512f"))) void stream_lines_64(uint8_t* to, const uint8_t* from,
                                                        int64_t lines) {
  for (int64_t i = 0; i < lines * kLine; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
}

__attribute__((target("avx"))) void stream_lines_32(uint8_t* to, const uint8_t* from,
                                                    int64_t lines) {
  for (int64_t i = 0; i < lines * kLine; i += kLine / 2) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
}
#endif

void copy_lines(uint8_t* to, const uint8_t* from, int64_t lines) {
  std::memcpy(to, from, lines * kLine);
}

using StreamLines = void (*)(uint8_t*, const uint8_t*, int64_t);

StreamLines choose_stream_lines() {
#ifdef LIGATURE_STREAMS
  if (__builtin_cpu_supports("avx512f")) return stream_lines_64;
  if (__builtin_cpu_supports("avx")) return stream_lines_32;
#endif
  return copy_lines;
}

const StreamLines stream_lines = choose_stream_lines();

}  // namespace

void stream_copy(uint8_t* to, const uint8_t* from, int64_t n) {
  const int64_t head = std::min(n, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLine));
  const int64_t lines = (n - head) / kLine;
  const int64_t tail = head + lines * kLine;
  std::memcpy(to, from, head);
  stream_lines(to + head, from + head, lines);
  std::memcpy(to + tail, from + tail, n - tail);
}

}  // namespace ligature::cpu
