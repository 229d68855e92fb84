#include "ligature/backend/cpu/content_hash.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "ligature/backend/cpu/vector_math.h"

namespace ligature::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kPiece = 1 << 15;  // words that one task hashes

// Both steps, seen as functions of the word and of the hash before, lose nothing. A difference in
// the highest bit alone would stay there in a product: the rotation takes it to the lower half,
// from where the product spreads it.
LIGATURE_INLINE uint64_t mixed(uint64_t hash, uint64_t word) {
  return std::rotl(hash ^ (word * 0x9e3779b97f4a7c15), 27) * 0xd1342543de82ef95;
}

LIGATURE_SIMD uint64_t hash_words(const uint8_t* bytes, int64_t count) {
  uint64_t lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<uint64_t>(lane);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      uint64_t word;
      std::memcpy(&word, bytes + 8 * (i + lane), sizeof(word));  // a view may begin anywhere
      lanes[lane] = mixed(lanes[lane], word);
    }
  }
  for (; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, sizeof(word));
    lanes[i % kLanes] = mixed(lanes[i % kLanes], word);
  }
  uint64_t hash = 0;
  for (const uint64_t lane : lanes) hash = mixed(hash, lane);
  return hash;
}

}  // namespace

uint64_t content_hash(const void* memory, size_t bytes) {
  const auto* data = static_cast<const uint8_t*>(memory);
  const int64_t count = static_cast<int64_t>(bytes / 8);
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<uint64_t> hashes(static_cast<size_t>(pieces));
  at::parallel_for(0, pieces, 2, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      hashes[static_cast<size_t>(p)] =
          hash_words(data + 8 * p * kPiece, std::min(kPiece, count - p * kPiece));
    }
  });
  uint64_t rest = 0;
  if (bytes % 8 != 0) std::memcpy(&rest, data + 8 * count, bytes % 8);
  uint64_t hash = mixed(bytes, rest);
  for (const uint64_t piece : hashes) hash = mixed(hash, piece);
  hash = (hash ^ (hash >> 32)) * 0x9e3779b97f4a7c15;  // what came last reaches every bit, too
  return hash ^ (hash >> 29);
}

}  // namespace ligature::cpu
