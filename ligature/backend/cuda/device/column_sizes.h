// Sizes of the blocks that walk down columns, for both sides.
#pragma once

namespace ligature::cuda {

constexpr int kColumnThreads = 256;
/// How many blocks of a kernel that leaves sums a multiprocessor has room for.
constexpr int kColumnBlocks = 3;

}  // namespace ligature::cuda
