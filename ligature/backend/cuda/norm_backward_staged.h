// The norms backward for rows of whole vectors, up to a length; see norm_backward_staged.cu.
#pragma once

#include "ligature/backend/cuda/norm_launch.h"

namespace ligature::cuda {

/// How many rows a block works on at a time, and how many blocks a multiprocessor has room for.
/// 0 rows: they are too long.
struct StagedShape {
  int rows, blocks;
};

StagedShape staged_shape(int64_t columns, Type x_type);

/// All memory begins at whole vectors of 16 bytes, rows too, and the rows are not too long.
void launch_norm_backward_staged(const NormBackwardArgs& args, int64_t blocks, Stream stream);

}  // namespace ligature::cuda
