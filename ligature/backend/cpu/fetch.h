// Memory asked for while a result goes past the caches: between its lines nothing else is read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ligature::cpu {

/// For elements of this size and more; with smaller ones there is enough to compute meanwhile.
constexpr size_t kFetchedSize = 4;

/// The lines of n elements, `ahead` elements behind `p`; they need not be there.
template <typename T>
void fetch_lines(const T* p, int64_t ahead, int64_t n) {
  constexpr uintptr_t line = 64;
  const uintptr_t first = reinterpret_cast<uintptr_t>(p) + ahead * sizeof(T);
  for (uintptr_t at = first; at < first + n * sizeof(T); at += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 3);
  }
}

}  // namespace ligature::cpu
