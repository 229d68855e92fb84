// How a matrix is cut for kernels that walk down its columns. No torch here.
#pragma once

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

struct ColumnGrid {
  int piece = 1;             // neighbouring columns of a thread
  int lanes = 1;             // threads of a block across a row
  int64_t across = 0;        // blocks across the columns
  int64_t down = 0;          // blocks down the rows; sums over rows leave as many partial ones
  int64_t warps_across = 0;  // sums over columns leave as many partial ones
};

/// Rows that a block has at least, with so many lanes.
int64_t least_rows(int lanes);

/// `sums`: a block takes as many rows as it can, to leave few partial sums over rows.
ColumnGrid column_grid(int64_t rows, int64_t columns, int piece, bool sums, int sm_count);

}  // namespace ligature::cuda
