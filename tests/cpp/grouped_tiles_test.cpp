// The arithmetic of the CUDA kernels for rows in groups, on the host, against the plain way to
// count the same: which rows are whose, that every value of a result belongs to exactly one tile,
// and where routing puts a slot.
#include "ligature/backend/cuda/grouped_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace cuda = ligature::cuda;

namespace {

/// Groups as the kernel that finds their ends makes them.
struct Made {
  std::vector<int32_t> ends, tile_ends;

  Made(const std::vector<int64_t>& splits, int64_t rows, cuda::Cut cut = {}) {
    int64_t sum = 0;
    int32_t before = 0, tiles = 0;
    for (const int64_t size : splits) {
      sum += cuda::counted_size(size, rows);
      const int32_t end = cuda::group_end(sum, rows);
      ends.push_back(end);
      tile_ends.push_back(tiles += cut.parts(end - before));
      before = end;
    }
  }
  cuda::GroupEnds groups() const {
    return {ends.data(), tile_ends.data(), static_cast<int32_t>(ends.size())};
  }
};

/// The group of each row, -1 behind the last, one row after the other.
std::vector<int32_t> groups_of_rows(const std::vector<int64_t>& splits, int64_t rows) {
  std::vector<int32_t> out(static_cast<size_t>(rows), -1);
  size_t row = 0;
  for (size_t g = 0; g < splits.size(); ++g) {
    for (int64_t i = 0; i < splits[g] && row < out.size(); ++i)
      out[row++] = static_cast<int32_t>(g);
  }
  return out;
}

struct Case {
  std::vector<int64_t> splits;
  int64_t rows;
  std::string where;
};

/// Empty groups everywhere, one group, many, sums below and above the rows, negative sizes and ones
/// whose sum overflows.
std::vector<Case> cases() {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<Case> out{{{0}, 0, "no rows"},
                        {{5}, 5, "one group"},
                        {{0, 0, 0}, 700, "all empty"},
                        {{0, 128, 0, 256, 0}, 384, "whole tiles"},
                        {{127, 1, 129}, 257, "around a tile"},
                        {{-3, 7, -1, 500, 2}, 600, "negative"},
                        {{kMost, kMost, 3}, 1000, "huge"},
                        {{10, std::numeric_limits<int64_t>::min(), 10}, 15, "least"},
                        {std::vector<int64_t>(1000, 0), 40, "thousand empty"}};
  out.back().splits[17] = 39;
  std::mt19937 random(3);
  const auto below = [&](int n) {
    return static_cast<int64_t>(random() % static_cast<unsigned>(n));
  };
  for (int i = 0; i < 200; ++i) {
    Case c;
    const int64_t groups = 1 + below(i % 5 == 0 ? 300 : 12);
    const int most = i % 3 == 0 ? 900 : i % 3 == 1 ? 64 : 3;
    int64_t sum = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t size = below(3) == 0 ? 0 : below(most);
      c.splits.push_back(below(20) == 0 ? -size : size);
      sum += std::max<int64_t>(c.splits.back(), 0);
    }
    c.rows = i % 4 == 0 ? sum : i % 4 == 1 ? sum + below(400) : sum - std::min(sum, below(400));
    c.where = "random " + std::to_string(i);
    out.push_back(c);
  }
  return out;
}

TEST(GroupedTiles, EndsStayBetweenTheGroupBeforeAndTheRows) {
  for (const Case& c : cases()) {
    const Made made(c.splits, c.rows);
    const auto expected = groups_of_rows(c.splits, c.rows);
    int32_t before = 0;
    for (const int32_t end : made.ends) {
      EXPECT_GE(end, before) << c.where;
      EXPECT_LE(end, c.rows) << c.where;
      before = end;
    }
    for (int64_t row = 0; row < c.rows; ++row) {
      const int32_t group = cuda::find_group(made.ends.data(), made.groups().count, row);
      const int32_t wanted = expected[static_cast<size_t>(row)];
      ASSERT_EQ(group, wanted < 0 ? made.groups().count : wanted) << c.where << " row " << row;
    }
  }
}

TEST(GroupedTiles, FindsAGroupFromEachBeforeIt) {
  for (const Case& c : cases()) {
    const Made made(c.splits, c.rows);
    const cuda::GroupEnds groups = made.groups();
    for (int64_t row = 0; row < c.rows; row += 1 + c.rows / 7) {
      const int32_t group = cuda::find_group(groups.ends, groups.count, row);
      for (int32_t from = 0; from <= std::min(group, groups.count); ++from) {
        ASSERT_EQ(cuda::find_group(groups.ends, groups.count, row, from), group) << c.where;
      }
    }
  }
}

TEST(GroupedTiles, AreNoMoreThanALaunchIsSizedFor) {
  for (const Case& c : cases()) {
    const Made made(c.splits, c.rows);
    EXPECT_LE(made.groups().tiles(),
              cuda::most_parts(c.rows, static_cast<int64_t>(c.splits.size())))
        << c.where;
  }
}

TEST(GroupedTiles, EveryRowAndColumnIsInOneTile) {
  for (const Case& c : cases()) {
    const Made made(c.splits, c.rows);
    const cuda::GroupEnds groups = made.groups();
    const auto expected = groups_of_rows(c.splits, c.rows);
    for (const int32_t across : {1, 3}) {
      std::vector<int> seen(static_cast<size_t>(c.rows * across));
      // As blocks go: from one tile on by as many as there are, each from the group it was in.
      for (const int64_t blocks : {1, 7}) {
        std::fill(seen.begin(), seen.end(), 0);
        for (int64_t block = 0; block < blocks; ++block) {
          int32_t from = 0;
          for (int64_t tile = block; tile < int64_t{groups.tiles()} * across; tile += blocks) {
            const cuda::GroupedTilePlace place = cuda::grouped_tile(groups, tile, across, from);
            from = place.rows.group;
            ASSERT_LT(place.rows.begin, place.rows.end) << c.where;
            ASSERT_LE(place.rows.end - place.rows.begin, cuda::kTileRows) << c.where;
            ASSERT_LT(place.column, across) << c.where;
            for (int32_t row = place.rows.begin; row < place.rows.end; ++row) {
              ASSERT_EQ(expected[static_cast<size_t>(row)], from) << c.where;
              ++seen[static_cast<size_t>(row * across + place.column)];
            }
          }
        }
        for (int64_t i = 0; i < c.rows * across; ++i) {
          const int wanted = expected[static_cast<size_t>(i / across)] < 0 ? 0 : 1;
          ASSERT_EQ(seen[static_cast<size_t>(i)], wanted) << c.where << " at " << i;
        }
      }
    }
  }
}

TEST(GroupedTiles, ATileOfRowsIsTheOneThatSumsAreMadeOf) {
  for (const Case& c : cases()) {
    const Made made(c.splits, c.rows);
    const cuda::GroupEnds groups = made.groups();
    int32_t next = 0;
    for (int32_t tile = 0; tile < groups.tiles(); ++tile) {
      const cuda::TileRows rows = cuda::rows_of_tile(groups, tile);
      ASSERT_EQ(rows.begin, next) << c.where << " tile " << tile;
      ASSERT_GE(tile, groups.first_tile(rows.group)) << c.where;
      ASSERT_LT(tile, groups.tile_ends[rows.group]) << c.where;
      next = rows.end;
    }
    EXPECT_EQ(next, groups.last()) << c.where;
  }
}

TEST(GroupedTiles, PartsHaveEveryRowOfTheirGroupOnce) {
  for (const Case& c : cases()) {
    for (const cuda::Cut cut : {cuda::Cut{}, {4, 7}, {16, 1}, {1, 1000}, {128, 3}}) {
      const Made made(c.splits, c.rows, cut);
      const cuda::GroupEnds groups = made.groups();
      EXPECT_LE(groups.tiles(),
                cuda::most_parts(c.rows, static_cast<int64_t>(c.splits.size()), cut))
          << c.where;
      std::vector<int32_t> seen;
      for (int32_t part = 0; part < groups.tiles(); ++part) {
        const cuda::TileRows rows = cuda::rows_of_part(groups, part);
        ASSERT_LE(rows.begin, rows.end) << c.where;
        ASSERT_LE(groups.tile_ends[rows.group] - groups.first_tile(rows.group), cut.most)
            << c.where;
        ASSERT_EQ(rows.begin, static_cast<int32_t>(seen.size())) << c.where << " part " << part;
        seen.insert(seen.end(), static_cast<size_t>(rows.end - rows.begin), rows.group);
      }
      seen.resize(static_cast<size_t>(c.rows), -1);
      EXPECT_EQ(seen, groups_of_rows(c.splits, c.rows)) << c.where;
    }
  }
}

TEST(GroupedTiles, TilesOfABandLieTogether) {
  const Made made({20 * cuda::kTileRows - 5}, 4000);
  std::vector<int32_t> rows, columns;
  for (int64_t tile = 0; tile < 40; ++tile) {
    const cuda::GroupedTilePlace place = cuda::grouped_tile(made.groups(), tile, 2);
    rows.push_back(place.rows.begin / cuda::kTileRows);
    columns.push_back(place.column);
  }
  // Sixteen down, the next column, then the four that are left.
  EXPECT_EQ(rows[15], 15);
  EXPECT_EQ(columns[15], 0);
  EXPECT_EQ(rows[16], 0);
  EXPECT_EQ(columns[16], 1);
  EXPECT_EQ(rows[32], 16);
  EXPECT_EQ(columns[35], 0);
  EXPECT_EQ(rows[36], 16);
  EXPECT_EQ(columns[36], 1);
}

TEST(GroupedTiles, AReductionHasEveryRowOfItsGroupOnce) {
  for (const Case& c : cases()) {
    const Made made(c.splits, c.rows);
    std::vector<int32_t> seen(static_cast<size_t>(c.rows), -1);
    for (int32_t g = 0; g < made.groups().count; ++g) {
      const cuda::Reduction sum = cuda::reduction_of(made.groups(), g);
      for (int32_t block = 0; block < sum.blocks; ++block) {
        ASSERT_GT(sum.rows_in(block), 0) << c.where;
        ASSERT_LE(sum.rows_in(block), cuda::kReduceRows) << c.where;
        for (int32_t i = 0; i < sum.rows_in(block); ++i) {
          int32_t& owner = seen[static_cast<size_t>(sum.first_row(block) + i)];
          ASSERT_EQ(owner, -1) << c.where;
          owner = g;
        }
      }
    }
    EXPECT_EQ(seen, groups_of_rows(c.splits, c.rows)) << c.where;
  }
}

TEST(GroupedTiles, EveryTileOfEveryWeightComesOnce) {
  for (const auto& [down, across] : {std::pair{1, 1}, {3, 2}, {2, 5}}) {
    std::vector<int> seen(static_cast<size_t>(4 * down * across));
    for (int64_t index = 0; index < static_cast<int64_t>(seen.size()); ++index) {
      const cuda::WeightTile tile = cuda::weight_tile(index, down, across);
      ASSERT_LT(tile.row, down);
      ASSERT_LT(tile.column, across);
      ++seen[static_cast<size_t>((tile.group * down + tile.row) * across + tile.column)];
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<int64_t>(seen.size()));
  }
}

TEST(RouteTiles, EverySlotIsInOneWarp) {
  for (const int32_t slots : {0, 1, 31, 256, 257, 5000, 262144, 262145, 1000003}) {
    const cuda::RouteGrid grid = cuda::route_grid(slots);
    EXPECT_EQ(grid.per_warp % 32, 0) << slots;
    EXPECT_LE(grid.warps, cuda::kRouteWarps) << slots;
    int32_t next = 0;
    for (int32_t warp = 0; warp < grid.warps; ++warp) {
      ASSERT_EQ(grid.first(warp), next) << slots;
      ASSERT_GT(grid.end(warp), next) << slots;
      next = grid.end(warp);
    }
    EXPECT_EQ(next, slots);
  }
  const int32_t most = std::numeric_limits<int32_t>::max();
  const cuda::RouteGrid grid = cuda::route_grid(most);
  EXPECT_EQ(grid.end(grid.warps - 1), most);
}

TEST(RouteTiles, LanesBefore) {
  EXPECT_EQ(cuda::lanes_before(0xffffffffu, 0), 0);
  EXPECT_EQ(cuda::lanes_before(0xffffffffu, 31), 31);
  EXPECT_EQ(cuda::lanes_before(0x80000001u, 31), 1);
  EXPECT_EQ(cuda::lanes_before(0x0000ff00u, 12), 4);
}

/// The three launches of route, warp after warp and lane after lane.
struct Routed {
  std::vector<int64_t> splits;
  std::vector<int32_t> slot_of_row, row_of_slot;

  Routed(const std::vector<int64_t>& experts_of, int64_t experts)
      : splits(static_cast<size_t>(experts)),
        slot_of_row(experts_of.size(), -7),
        row_of_slot(experts_of.size(), -7) {
    const cuda::RouteGrid grid = cuda::route_grid(static_cast<int32_t>(experts_of.size()));
    std::vector<int32_t> counts(static_cast<size_t>(experts * grid.warps));
    const auto count_at = [&](int64_t expert, int32_t warp) -> int32_t& {
      return counts[static_cast<size_t>(expert * grid.warps + warp)];
    };
    const auto expert_at = [&](int32_t slot) {
      const int64_t number = experts_of[static_cast<size_t>(slot)];
      return cuda::is_expert(number, experts) ? number : -1;
    };
    for (int32_t warp = 0; warp < grid.warps; ++warp) {
      for (int32_t slot = grid.first(warp); slot < grid.end(warp); ++slot) {
        if (expert_at(slot) >= 0) ++count_at(expert_at(slot), warp);
      }
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
      int32_t before = 0;
      for (int32_t warp = 0; warp < grid.warps; ++warp) {
        const int32_t count = count_at(expert, warp);
        count_at(expert, warp) = before;
        before += count;
      }
      splits[static_cast<size_t>(expert)] = before;
    }
    const Made made(splits, grid.slots);
    for (int32_t warp = 0; warp < grid.warps; ++warp) {
      for (int32_t first = grid.first(warp); first < grid.end(warp); first += 32) {
        const int32_t lanes = std::min(32, grid.end(warp) - first);
        std::vector<int32_t> before(32);
        std::vector<uint32_t> same(32);
        for (int32_t lane = 0; lane < lanes; ++lane) {
          for (int32_t other = 0; other < lanes; ++other) {
            const bool equal = expert_at(first + other) == expert_at(first + lane);
            same[static_cast<size_t>(lane)] |= uint32_t{equal} << other;
          }
          const int64_t expert = expert_at(first + lane);
          if (expert >= 0) before[static_cast<size_t>(lane)] = count_at(expert, warp);
        }
        for (int32_t lane = 0; lane < lanes; ++lane) {
          const int32_t slot = first + lane;
          const int64_t expert = expert_at(slot);
          int32_t row = -1;
          if (expert >= 0) {
            row = made.groups().begin(static_cast<int32_t>(expert)) +
                  before[static_cast<size_t>(lane)] +
                  cuda::lanes_before(same[static_cast<size_t>(lane)], lane);
            slot_of_row[static_cast<size_t>(row)] = slot;
            ++count_at(expert, warp);
          }
          row_of_slot[static_cast<size_t>(slot)] = row;
          if (slot >= made.groups().last()) slot_of_row[static_cast<size_t>(slot)] = -1;
        }
      }
    }
  }
};

TEST(RouteTiles, RanksAreThoseOfAStableSort) {
  std::mt19937 random(5);
  for (const int slots : {0, 1, 33, 256, 300, 4000}) {
    for (const int experts : {1, 3, 40}) {
      std::vector<int64_t> given;
      for (int i = 0; i < slots; ++i) {
        given.push_back(static_cast<int64_t>(random() % static_cast<unsigned>(experts + 3)) - 2);
      }
      std::vector<int32_t> order;
      for (int32_t slot = 0; slot < slots; ++slot) {
        if (cuda::is_expert(given[static_cast<size_t>(slot)], experts)) order.push_back(slot);
      }
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return given[static_cast<size_t>(a)] < given[static_cast<size_t>(b)];
      });
      std::vector<int32_t> slot_of_row(static_cast<size_t>(slots), -1), row_of_slot(slot_of_row);
      for (size_t row = 0; row < order.size(); ++row) {
        slot_of_row[row] = order[row];
        row_of_slot[static_cast<size_t>(order[row])] = static_cast<int32_t>(row);
      }
      const Routed routed(given, experts);
      const std::string where = std::to_string(slots) + " to " + std::to_string(experts);
      EXPECT_EQ(routed.slot_of_row, slot_of_row) << where;
      EXPECT_EQ(routed.row_of_slot, row_of_slot) << where;
      for (int64_t expert = 0; expert < experts; ++expert) {
        EXPECT_EQ(routed.splits[static_cast<size_t>(expert)],
                  std::count(given.begin(), given.end(), expert))
            << where;
      }
    }
  }
}

}  // namespace
