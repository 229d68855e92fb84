// What a plan remembers of the small buffers of its runs; kernels/small_buffers.h makes them.
#pragma once

#include <atomic>
#include <cstdint>

namespace ligature {

/// Bytes that the last run took; none where one allocation would not save another.
class SmallBytes {
 public:
  SmallBytes() = default;
  explicit SmallBytes(int64_t bytes) : bytes_(bytes) {}
  SmallBytes(const SmallBytes&) {}  // what is copied has not run yet
  SmallBytes& operator=(const SmallBytes&) = delete;

  operator int64_t() const { return bytes_.load(std::memory_order_relaxed); }  // NOLINT
  void set(int64_t bytes) { bytes_.store(bytes, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> bytes_{0};
};

}  // namespace ligature
