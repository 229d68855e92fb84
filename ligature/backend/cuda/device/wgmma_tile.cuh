// What the parts of the kernel in wgmma_gemm.cuh agree on: which product it is, how shared memory
// is laid out, and in which order the tiles come.
#pragma once

#include "ligature/backend/cuda/device/wgmma.cuh"
#include "ligature/backend/cuda/wgmma_launch.h"

namespace ligature::cuda {

/// ForwardCodes: x and w are FP8 codes, the activation is bfloat16; ForwardCast: that is codes too.
enum class WgmmaForm { Forward, ForwardCodes, ForwardCast, Backward, BackwardBoth };

/// GatedLinearArgs, in numbers that a kernel counts with.
struct WgmmaArgs {
  int rows = 0, units = 0, k = 0;
  const void* z = nullptr;
  void* out = nullptr;
  void* activated = nullptr;
  ActivationParams params;
  GatedCodes codes;
};

/// A block's tile is 128 rows and 256 columns of the product; forward these are 128 gates and the
/// 128 linear units that belong to them. The two blocks of a cluster lie below each other and share
/// w. `Apart`: other warps than those that multiply do the epilogue. Else, with `Skew`, the second
/// warpgroup stays so many stages behind the first, and one multiplies while the other is in its
/// epilogue; k must then be that many stages long.
template <WgmmaForm Form, int Cluster, int Stages, int Skew, bool Apart>
struct WgmmaTile {
  static constexpr bool kBoth = Form == WgmmaForm::BackwardBoth;
  static constexpr bool kBackward = Form == WgmmaForm::Backward || kBoth;
  static constexpr bool kCast = Form == WgmmaForm::ForwardCast;
  static constexpr bool kCodes = Form == WgmmaForm::ForwardCodes || kCast;
  static constexpr bool kApart = Apart;
  static constexpr int kCluster = Cluster, kStages = Stages, kSkew = Skew;
  static constexpr int kRows = 128, kColumns = 256, kHalf = kColumns / 2;
  static constexpr int kUnits = kBackward ? kColumns : kHalf;
  static constexpr int kDepth = kCodes ? 128 : 64;  // of k in a stage: rows of 128 bytes
  static constexpr int kGroup = 16 / Cluster;       // rows of tiles walked through together, for L2
  static constexpr int kThreads = 384;

  static constexpr int kXBytes = kRows * 128, kWBytes = kColumns * 128;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kTurnBytes = 16 * kHalf * 2;  // 16 rows of half the columns
  static constexpr int kWarpBytes = (kApart ? 2 : 1) * kTurnBytes;
  static constexpr int kTurns = kStages * kStageBytes;       // first byte of the eight warps' own
  static constexpr int kBarriers = kTurns + 8 * kWarpBytes;  // of the barriers, 8 bytes each
  static constexpr int kFull = kBarriers, kEmpty = kFull + 8 * kStages;
  static constexpr int kReady = kEmpty + 8 * kStages, kTaken = kReady + 64;  // one for each warp
  static constexpr int kSharedBytes = kTaken + 64 + 1024;                    // to begin at 1024
  static_assert(Cluster == 1 || Cluster == 2);
  static_assert(kBackward || Apart);
  static_assert(kSharedBytes <= 232448 && kSkew < kStages);
};

namespace hopper {

struct TilePlace {
  int row, column;  // in tiles of a block
};

template <typename C>
__host__ __device__ __forceinline__ int clusters_down(const WgmmaArgs& args) {
  return (args.rows + C::kRows * C::kCluster - 1) / (C::kRows * C::kCluster);
}

/// Tiles of a cluster.
template <typename C>
__host__ __device__ __forceinline__ int tile_count(const WgmmaArgs& args) {
  return clusters_down<C>(args) * (args.units / C::kUnits);
}

/// In the order of their work: down a group of rows, then on by a column.
template <typename C>
__device__ __forceinline__ TilePlace tile_place(int index, const WgmmaArgs& args, uint32_t rank) {
  const int per_group = C::kGroup * (args.units / C::kUnits);
  const int first = index / per_group * C::kGroup;
  const int rows = min(C::kGroup, clusters_down<C>(args) - first);
  const int in_group = index % per_group;
  return {(first + in_group % rows) * C::kCluster + static_cast<int>(rank), in_group / rows};
}

/// Calls f(place) for each tile of this block.
template <typename C, typename F>
__device__ __forceinline__ void for_each_tile(const WgmmaArgs& args, uint32_t rank, const F& f) {
  const int tiles = tile_count<C>(args);
  const int step = static_cast<int>(gridDim.x) / C::kCluster;
  for (int tile = static_cast<int>(blockIdx.x) / C::kCluster; tile < tiles; tile += step) {
    f(tile_place<C>(tile, args, rank));
  }
}

}  // namespace hopper
}  // namespace ligature::cuda
