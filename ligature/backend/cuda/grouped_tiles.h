// Which rows lie in which group, which tile of a grouped GEMM is which, and where routing puts a
// row: the arithmetic that kernels and host share. Without torch and CUDA, so that it is tested
// where there is no GPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LIGATURE_BOTH __host__ __device__ __forceinline__
#else
#define LIGATURE_BOTH inline
#endif

namespace ligature::cuda {

LIGATURE_BOTH int64_t parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

// ---- groups of rows

/// Rows of a tile: a tile lies in one group, and its last one is cut off at the group's end.
constexpr int kTileRows = 128;

/// What a group's size counts as: a negative one is none, and a sum of them does not overflow.
LIGATURE_BOTH int64_t counted_size(int64_t size, int64_t rows) {
  return size < 0 ? 0 : size > rows ? rows : size;
}

/// Where a group ends, from the sum of the counted sizes up to and with its own: never before the
/// group in front of it, never behind the last row.
LIGATURE_BOTH int32_t group_end(int64_t counted_sum, int64_t rows) {
  return static_cast<int32_t>(counted_sum > rows ? rows : counted_sum);
}

/// How each group's rows are cut into parts: so many rows to one, or more where those would be more
/// than `most` parts.
struct Cut {
  int32_t rows = kTileRows;
  int32_t most = 0x7fffffff;

  LIGATURE_BOTH int32_t parts(int32_t group_rows) const {
    const auto needed = static_cast<int32_t>(parts_of(group_rows, rows));
    return needed < most ? needed : most;
  }
};

/// At most so many parts, tiles for one, have rows, however they are split: by this a launch is
/// sized.
LIGATURE_BOTH int64_t most_parts(int64_t rows, int64_t groups, Cut cut = {}) {
  return parts_of(rows, cut.rows) + groups;
}

/// The groups of a matrix as kernels know them. Both arrays count up to and with a group.
struct GroupEnds {
  const int32_t* ends = nullptr;       // rows
  const int32_t* tile_ends = nullptr;  // tiles of kTileRows, or other parts of a Cut
  int32_t count = 0;

  LIGATURE_BOTH int32_t begin(int32_t group) const { return group == 0 ? 0 : ends[group - 1]; }
  LIGATURE_BOTH int32_t end(int32_t group) const { return ends[group]; }
  LIGATURE_BOTH int32_t last() const { return count == 0 ? 0 : ends[count - 1]; }
  LIGATURE_BOTH int32_t first_tile(int32_t group) const {
    return group == 0 ? 0 : tile_ends[group - 1];
  }
  LIGATURE_BOTH int32_t tiles() const { return count == 0 ? 0 : tile_ends[count - 1]; }
};

/// The first group at or after `from` whose end lies behind `index`; `count` where none does.
LIGATURE_BOTH int32_t find_group(const int32_t* ends, int32_t count, int64_t index,
                                 int32_t from = 0) {
  int32_t low = from, high = count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (ends[middle] > index) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// A tile's rows, of which there is at least one.
struct TileRows {
  int32_t group, begin, end;
};

/// Of tile `index` below groups.tiles().
LIGATURE_BOTH TileRows rows_of_tile(const GroupEnds& groups, int32_t index, int32_t from = 0) {
  const int32_t group = find_group(groups.tile_ends, groups.count, index, from);
  const int32_t begin =
      groups.begin(group) + (index - groups.first_tile(group)) * int32_t{kTileRows};
  const int32_t left = groups.end(group) - begin;
  return {group, begin, begin + (left < kTileRows ? left : kTileRows)};
}

/// Of part `index` below groups.tiles(), for any Cut: a group's parts are equally long but for the
/// last ones, which may have no rows.
LIGATURE_BOTH TileRows rows_of_part(const GroupEnds& groups, int32_t index) {
  const int32_t group = find_group(groups.tile_ends, groups.count, index);
  const int32_t first = groups.first_tile(group), parts = groups.tile_ends[group] - first;
  const int64_t begin = groups.begin(group), end = groups.end(group);
  const int64_t length = parts_of(end - begin, parts);
  const int64_t from = begin + (index - first) * length;
  return {group, static_cast<int32_t>(from < end ? from : end),
          static_cast<int32_t>(from + length < end ? from + length : end)};
}

// ---- GEMMs whose rows are grouped: tiles of a group's rows and of columns

/// Rows of tiles that are walked through together, for L2.
constexpr int kBand = 16;

struct GroupedTilePlace {
  TileRows rows;
  int32_t column;  // in tiles
};

/// Of tile `index` below groups.tiles() * across: group after group, in a group band after band,
/// and in a band down first. `from`: a group at or before the tile's.
LIGATURE_BOTH GroupedTilePlace grouped_tile(const GroupEnds& groups, int64_t index, int32_t across,
                                            int32_t from = 0) {
  const int32_t group = find_group(groups.tile_ends, groups.count, index / across, from);
  const int32_t first = groups.first_tile(group);
  const int32_t tall = groups.tile_ends[group] - first;
  const int64_t in_group = index - int64_t{first} * across;
  const int32_t band = static_cast<int32_t>(in_group / (int64_t{kBand} * across)) * kBand;
  const int32_t down = tall - band < kBand ? tall - band : kBand;
  const int32_t in_band = static_cast<int32_t>(in_group % (int64_t{kBand} * across));
  return {rows_of_tile(groups, first + band + in_band % down, group), in_band / down};
}

// ---- GEMMs that reduce over a group's rows: every group has as many tiles of its result

/// Rows that are copied at a time.
constexpr int kReduceRows = 64;

struct WeightTile {
  int32_t group, row, column;  // row and column in tiles of a weight
};

LIGATURE_BOTH WeightTile weight_tile(int64_t index, int32_t down, int32_t across) {
  const int32_t in_group = static_cast<int32_t>(index % (int64_t{down} * across));
  return {static_cast<int32_t>(index / (int64_t{down} * across)), in_group % down, in_group / down};
}

/// The rows that a group's weight gradient is a sum over, in blocks of kReduceRows.
struct Reduction {
  int32_t begin, end, blocks;

  LIGATURE_BOTH int32_t first_row(int32_t block) const { return begin + block * kReduceRows; }
  /// How many rows of a block belong to the group; the others are to count as zeros.
  LIGATURE_BOTH int32_t rows_in(int32_t block) const {
    const int32_t left = end - first_row(block);
    return left < kReduceRows ? left : kReduceRows;
  }
};

LIGATURE_BOTH Reduction reduction_of(const GroupEnds& groups, int32_t group) {
  const int32_t begin = groups.begin(group), end = groups.end(group);
  return {begin, end, (end - begin + kReduceRows - 1) / kReduceRows};
}

// ---- routing: a stable counting sort, in which a warp has consecutive slots

/// How the slots are cut: counts [experts, warps] of each warp's slots, which become where each of
/// them begins, and each warp's slots in their order.
struct RouteGrid {
  int32_t slots = 0, warps = 0;
  int32_t per_warp = 32;  // a multiple of 32

  LIGATURE_BOTH int32_t first(int32_t warp) const { return warp * per_warp; }
  LIGATURE_BOTH int32_t end(int32_t warp) const {
    const int64_t end = int64_t{warp + 1} * per_warp;
    return static_cast<int32_t>(end < slots ? end : slots);
  }
};

/// Few slots to a warp, but no more than so many warps: they all have counts of every expert.
constexpr int kRouteWarps = 1024;

LIGATURE_BOTH RouteGrid route_grid(int32_t slots) {
  RouteGrid grid;
  grid.slots = slots;
  grid.per_warp = static_cast<int32_t>(parts_of(parts_of(slots, kRouteWarps), 32) * 32);
  if (grid.per_warp < 256) grid.per_warp = 256;
  grid.warps = static_cast<int32_t>(parts_of(slots, grid.per_warp));
  return grid;
}

/// Does a slot's number name an expert?
LIGATURE_BOTH bool is_expert(int64_t number, int64_t experts) {
  return number >= 0 && number < experts;
}

/// How many lanes before this one are in `same`, those with the same expert.
LIGATURE_BOTH int32_t lanes_before(uint32_t same, int32_t lane) {
  const uint32_t before = same & ((uint32_t{1} << lane) - 1);
#ifdef __CUDA_ARCH__
  return __popc(before);
#else
  return __builtin_popcount(before);
#endif
}

}  // namespace ligature::cuda
