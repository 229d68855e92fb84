// Sums over rows of a matrix of partial sums, in order: the second stage of every sum over rows.
#pragma once

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

struct PartialSums {
  const float* partials = nullptr;  // [count, columns]
  void* out = nullptr;              // [columns]; null: nothing to do
  Type type = Type::Float32;        // of out
};

/// Both at once; either may be empty. With count 0 the sums are 0.
void launch_sum_partials(const PartialSums& first, const PartialSums& second, int64_t count,
                         int64_t columns, Stream stream);

/// The same along rows: out[r] = sum of partials[r, 0 .. count).
void launch_sum_row_partials(const PartialSums& sums, int64_t rows, int64_t count, Stream stream);

}  // namespace ligature::cuda
