// A hash of memory, to notice that it has changed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ligature::cpu {

/// 64 bits, on which every bit of the memory has an effect: a change within 8 bytes always gives
/// another hash, any other change does but for a chance of 2^-64.
uint64_t content_hash(const void* memory, size_t bytes);

}  // namespace ligature::cpu
