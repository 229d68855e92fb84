// The hash that tells whether a weight has changed: no bit is lost, and none cancels another.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "ligature/backend/cpu/content_hash.h"

namespace ligature::cpu {
namespace {

std::vector<uint8_t> random_bytes(size_t size) {
  std::mt19937 generator(7);
  std::vector<uint8_t> out(size);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(generator());
  return out;
}

uint64_t hash_of(const std::vector<uint8_t>& bytes) {
  return content_hash(bytes.data(), bytes.size());
}

TEST(ContentHashTest, EveryByteCountsAtEverySize) {
  for (const size_t size : {0, 1, 3, 4, 7, 8, 9, 127, 128, 129, 1000, 300000}) {
    SCOPED_TRACE(size);
    std::vector<uint8_t> bytes = random_bytes(size);
    std::set<uint64_t> seen{hash_of(bytes)};
    const size_t step = size < 2000 ? 1 : 997;
    size_t count = 1;
    for (size_t i = 0; i < size; i += step, ++count) {
      bytes[i] ^= 0x80;
      seen.insert(hash_of(bytes));
      bytes[i] ^= 0x80;
    }
    EXPECT_EQ(seen.size(), count);
    EXPECT_TRUE(seen.contains(hash_of(bytes)));
    if (size == 0) continue;
    bytes.pop_back();
    EXPECT_FALSE(seen.contains(hash_of(bytes)));
    bytes.push_back(0);  // what is missing is no zero
    bytes.back() = 0;
    EXPECT_NE(hash_of(bytes), content_hash(bytes.data(), bytes.size() - 1));
  }
}

TEST(ContentHashTest, NoTwoBitsCancelEachOther) {
  std::vector<uint8_t> bytes = random_bytes(2048);
  std::set<uint64_t> seen{hash_of(bytes)};
  size_t count = 1;
  const auto flip = [&](size_t bit) { bytes[bit / 8] ^= uint8_t(1) << (bit % 8); };
  for (size_t first = 0; first < 64; ++first) {
    flip(first);
    for (size_t second = first + 1; second < 8 * bytes.size(); second += second < 4096 ? 1 : 61) {
      flip(second);
      seen.insert(hash_of(bytes));
      flip(second);
      ++count;
    }
    flip(first);
  }
  EXPECT_EQ(seen.size(), count);
}

TEST(ContentHashTest, NoPatternsOfSignsCancelEachOther) {
  // 8 bytes have the signs of two floats, or of four values of 16 bits.
  for (const size_t apart : {1, 2, 8, 15, 16, 17, 32, 64, 128}) {
    std::vector<uint8_t> bytes = random_bytes(2048);
    std::set<uint64_t> seen;
    for (unsigned first = 0; first < 16; ++first) {
      for (unsigned second = 0; second < 16; ++second) {
        std::vector<uint8_t> changed = bytes;
        for (size_t i = 0; i < 4; ++i) {
          if ((first >> i & 1) != 0) changed[2 * i + 1] ^= 0x80;
          if ((second >> i & 1) != 0) changed[8 * apart + 2 * i + 1] ^= 0x80;
        }
        seen.insert(hash_of(changed));
      }
    }
    EXPECT_EQ(seen.size(), 256u) << apart;
  }
}

TEST(ContentHashTest, OrderCounts) {
  std::vector<uint8_t> bytes = random_bytes(600000);
  const uint64_t before = hash_of(bytes);
  for (const auto& [a, b] : {std::pair<size_t, size_t>{0, 8}, {0, 128}, {0, 262144}, {8, 262144}}) {
    std::vector<uint8_t> changed = bytes;
    std::swap_ranges(changed.begin() + static_cast<std::ptrdiff_t>(a),
                     changed.begin() + static_cast<std::ptrdiff_t>(a) + 8,
                     changed.begin() + static_cast<std::ptrdiff_t>(b));
    EXPECT_NE(hash_of(changed), before);
  }
  // Whole pieces, as threads take them.
  std::vector<uint8_t> changed = bytes;
  std::swap_ranges(changed.begin(), changed.begin() + 262144, changed.begin() + 262144);
  EXPECT_NE(hash_of(changed), before);
}

TEST(ContentHashTest, EveryBitOfTheHashDependsOnEveryBit) {
  std::vector<uint8_t> bytes = random_bytes(512);
  const uint64_t before = hash_of(bytes);
  std::vector<int> changes(64);
  int count = 0;
  for (size_t bit = 0; bit < 8 * bytes.size(); bit += 3, ++count) {
    bytes[bit / 8] ^= uint8_t(1) << (bit % 8);
    const uint64_t difference = hash_of(bytes) ^ before;
    bytes[bit / 8] ^= uint8_t(1) << (bit % 8);
    for (size_t i = 0; i < 64; ++i) changes[i] += static_cast<int>(difference >> i & 1);
  }
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(changes[i], count / 2, count / 8) << i;
}

TEST(ContentHashTest, TheSameForMemoryThatBeginsAnywhere) {
  const std::vector<uint8_t> bytes = random_bytes(5000);
  std::vector<uint8_t> moved(bytes.size() + 8);
  for (size_t offset = 0; offset < 8; ++offset) {
    std::memcpy(moved.data() + offset, bytes.data(), bytes.size());
    EXPECT_EQ(content_hash(moved.data() + offset, bytes.size()), hash_of(bytes));
  }
}

}  // namespace
}  // namespace ligature::cpu
