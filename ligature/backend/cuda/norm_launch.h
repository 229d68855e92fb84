// The launches of the norm kernels. No torch here. The three norms differ in two things: whether
// the mean is taken out (`centered`), and whether the sum of squares is divided by n (`averaged`).
#pragma once

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

struct NormForwardArgs {
  int64_t rows = 0, columns = 0;
  const void* x = nullptr;
  // These three begin at whole vectors of 16 bytes, so that x alone decides how rows are read.
  const void* w = nullptr;  // null: a factor of 1
  const void* b = nullptr;  // may be null
  void* y = nullptr;        // null: only the statistics are wanted
  float* mean = nullptr;    // null unless centered
  float* rstd = nullptr;
  Type x_type = Type::Float32;
  Type w_type = Type::Float32;  // of w and b: x's, or Float32
  Type y_type = Type::Float32;  // x's, or Float32, or any where x is Float32
  float eps = 0.0f;
  bool zero_centered = false, centered = false, averaged = true;
  bool given = false;  // the statistics are read, not written
};

void launch_norm_forward(const NormForwardArgs& args, Stream stream);

struct NormBackwardArgs {
  int64_t rows = 0, columns = 0;
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* add = nullptr;  // may be null; like dy of x's type
  const void* w = nullptr;    // may be null
  const float* mean = nullptr;
  const float* rstd = nullptr;
  void* dx = nullptr;            // null: not wanted; of dx_type
  float* dw_partials = nullptr;  // [blocks, columns], null: not wanted
  float* db_partials = nullptr;
  Type x_type = Type::Float32, w_type = Type::Float32, dx_type = Type::Float32;
  bool zero_centered = false, centered = false, averaged = true;
};

/// How many blocks a backward has: each sums dw and db over its rows.
int64_t norm_backward_blocks(int64_t rows, int64_t columns, Type x_type, int sm_count);

void launch_norm_backward(const NormBackwardArgs& args, int64_t blocks, Stream stream);

}  // namespace ligature::cuda
