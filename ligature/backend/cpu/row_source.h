// Where quantization takes its values from: a matrix in memory, or a kernel that computes rows as
// they are asked for, so that its result is never stored in high precision.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace ligature::cpu {

class RowSource {
 public:
  /// One thread's way through the rows [first, last) that it was made for, in order.
  class Walk {
   public:
    virtual ~Walk() = default;
    /// The next rows, up to `end`, contiguous: computed into `buffer`.
    virtual void next(int64_t end, void* buffer) = 0;
    /// After the last rows.
    virtual void finish() {}
  };

  virtual ~RowSource() = default;

  int64_t rows = 0;
  int64_t columns = 0;
  at::ScalarType dtype = at::kFloat;
  bool stored = false;           ///< is the matrix in memory?
  const void* values = nullptr;  ///< then where

  /// `again`: all rows have been computed before, and what they give besides their values is known.
  virtual std::unique_ptr<Walk> walk(int64_t first, int64_t last, bool again) = 0;
};

}  // namespace ligature::cpu
