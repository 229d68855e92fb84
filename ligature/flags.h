// Any number of flags. Those of a usual operation need no heap allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ligature {

class Flags {
 public:
  bool operator[](size_t i) const {
    if (i < kInline) return ((first_ >> i) & 1U) != 0;
    return i - kInline < more_.size() && more_[i - kInline];
  }
  void set(size_t i) {
    if (i < kInline) {
      first_ |= uint64_t{1} << i;
      return;
    }
    if (i - kInline >= more_.size()) more_.resize(i - kInline + 1);
    more_[i - kInline] = true;
  }
  /// The last of the flags beyond the first ones is always set.
  bool any() const { return first_ != 0 || !more_.empty(); }
  /// No flag from here on is set.
  size_t size() const { return kInline + more_.size(); }
  void clear() { *this = {}; }

 private:
  static constexpr size_t kInline = 64;
  uint64_t first_ = 0;
  std::vector<bool> more_;
};

}  // namespace ligature
