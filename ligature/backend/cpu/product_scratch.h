// Memory for packed operands that a thread keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ligature::cpu {

class Scratch {
 public:
  uint32_t* get(int64_t units) {
    if (units > size_) {
      const size_t bytes = static_cast<size_t>(units) * sizeof(uint32_t);
      data_.reset();
      data_.reset(static_cast<uint32_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
      size_ = data_ == nullptr ? 0 : units;
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(uint32_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint32_t, Free> data_;
  int64_t size_ = 0;
};

}  // namespace ligature::cpu
