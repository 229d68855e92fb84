#include "ligature/backend/cuda/column_grid.h"

#include <algorithm>

#include "ligature/backend/cuda/device/column_sizes.h"

namespace ligature::cuda {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 30;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t least_rows(int lanes) { return int64_t{4} * (kColumnThreads / lanes); }

ColumnGrid column_grid(int64_t rows, int64_t columns, int piece, bool sums, int sm_count) {
  ColumnGrid grid;
  grid.piece = piece;
  const int64_t threads = ceil_div(columns, piece);
  if (threads == 0 || rows == 0) return grid;
  while (grid.lanes < kColumnThreads && grid.lanes < threads) grid.lanes *= 2;
  // Rather narrower than with many idle threads; a whole warp stays.
  while (grid.lanes > 32 && ceil_div(threads, grid.lanes) * grid.lanes > threads + threads / 8) {
    grid.lanes /= 2;
  }
  grid.across = ceil_div(threads, grid.lanes);
  grid.warps_across = ceil_div(threads, 32);
  // A few rows for each thread at least; with sums all blocks at once, since they take equally
  // long.
  grid.down = ceil_div(rows, least_rows(grid.lanes));
  if (sums) {
    const int64_t at_once = std::max<int64_t>(kColumnBlocks * int64_t{sm_count} / grid.across, 1);
    grid.down = std::min(grid.down, at_once);
  }
  grid.down = std::min(grid.down, std::max<int64_t>(kMaxBlocks / grid.across, 1));
  return grid;
}

}  // namespace ligature::cuda
