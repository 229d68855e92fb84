// Small kernels around a matrix product: factors laid out as cuBLASLt reads them, and alpha from
// factors that only the device knows.
#pragma once

#include <cstdint>

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

enum class ScaleLayout : uint8_t {
  Turned,  ///< floats, transposed: out [columns, ld], rows filled up with 0
  Filled,  ///< floats, as they are: out [rows, ld], rows filled up with 0
  Tiled,   ///< bytes in tiles of 128 rows and 4 columns, filled up with 0
};

/// Factors of one operand, row-major [rows, columns].
struct ScaleJob {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t ld = 0;         ///< Turned, Filled
  int64_t per_block = 1;  ///< Tiled: rows of the operand that share one row of factors
  ScaleLayout layout = ScaleLayout::Turned;
};

/// Floats or bytes that a job writes.
int64_t size_of(const ScaleJob& job);

/// Up to two jobs at once.
void launch_scales(const ScaleJob* jobs, int count, Stream stream);

/// out[0] = alpha * *a * *b, out[1] = beta; a null factor is 1.
void launch_coefficients(float* out, double alpha, float beta, const float* a, const float* b,
                         Stream stream);

}  // namespace ligature::cuda
