// Descriptions of matrices for Hopper's bulk tensor copy engine. No torch here.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace ligature::cuda {

/// Can this driver describe matrices?
bool has_tensor_maps();

/// A row-major matrix of bfloat16 or, with one byte to an element, of codes, copied in boxes of
/// `box_rows` rows and 128 bytes, which lie in shared memory as such rows, swizzled. What a box has
/// beyond the matrix is zero. False where the driver refuses.
bool encode_boxes(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int box_rows,
                  int element_bytes);

/// The same of `matrices` of them in bfloat16, each `stride` elements behind the one before: a box
/// lies in one matrix, and what it has beyond that one is zero.
bool encode_stack(CUtensorMap* map, const void* data, int64_t matrices, int64_t stride,
                  int64_t rows, int64_t columns, int box_rows);

}  // namespace ligature::cuda
