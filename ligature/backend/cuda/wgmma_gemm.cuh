// Matrix products in bfloat16 and FP8 on Hopper (sm_90a) whose epilogue is a gated activation or
// its gradient, so that what lies between is not written and read again; see wgmma_launch.h for
// what they compute. One block per multiprocessor goes from tile to tile: a thread of its first
// warpgroup copies boxes into stages of shared memory, the two other warpgroups multiply, each one
// half of the tile's rows. The rest of the first warpgroup does the epilogue where it is apart.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "ligature/backend/cuda/device/wgmma_epilogue.cuh"
#include "ligature/backend/cuda/tensor_map.h"
#include "ligature/backend/cuda/wgmma_launch.h"

namespace ligature::cuda {
namespace hopper {

/// A stage's place in the ring, and the parity of its phase.
template <typename C>
struct StageWalk {
  uint32_t parity;
  int stage = 0;

  __device__ __forceinline__ void step() {
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// A warp is done with a stage: both blocks write to it.
template <typename C>
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
  if constexpr (C::kCluster == 1) {
    if (lane == 0) arrive(barrier);
  } else {
    if (lane < C::kCluster) arrive_at(barrier, static_cast<uint32_t>(lane));
  }
}

/// w's part of a stage. In a cluster each block copies one half and sends it to both.
template <typename C>
__device__ __forceinline__ void copy_w(uint32_t to, const CUtensorMap* map, const WgmmaArgs& args,
                                       int column, int k, uint32_t barrier, uint32_t rank) {
  constexpr int kBoxes = (C::kBackward ? 4 : 2) / C::kCluster;
  constexpr int kBoxBytes = C::kBackward ? 8192 : C::kHalf * 128;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const int box = (C::kCluster == 1 ? 0 : static_cast<int>(rank) * kBoxes) + i;
    const int x = C::kBackward ? column * C::kUnits + box * 64 : k;
    const int y = C::kBackward ? k : column * C::kUnits + box * args.units;
    if constexpr (C::kCluster == 1) {
      copy_box(to + box * kBoxBytes, map, x, y, barrier);
    } else {
      copy_box_to_all(to + box * kBoxBytes, map, x, y, barrier, uint16_t{3});
    }
  }
}

/// The thread that keeps the stages filled.
template <typename C>
__device__ __forceinline__ void produce(const CUtensorMap* x_map, const CUtensorMap* w_map,
                                        const CUtensorMap* z_map, const WgmmaArgs& args,
                                        uint32_t base, uint32_t rank) {
  const int blocks = args.k / C::kDepth;
  StageWalk<C> at{1};
  for_each_tile<C>(args, rank, [&](TilePlace tile) {
    const int row = tile.row * C::kRows;
    for (int block = 0; block < blocks; ++block) {
      const uint32_t to = base + at.stage * C::kStageBytes;
      const uint32_t barrier = base + C::kFull + 8 * at.stage;
      const int k = block * C::kDepth;
      wait(base + C::kEmpty + 8 * at.stage, at.parity);
      arrive_and_expect(barrier, C::kStageBytes);
      copy_box(to, x_map, k, row, barrier);
      copy_w<C>(to + C::kXBytes, w_map, args, tile.column, k, barrier, rank);
      if constexpr (C::kBackward) {  // the epilogue's z comes from L2
        constexpr int kBoxes = C::kColumns / 64 * 2;
        const int box = block - (blocks - kBoxes - 4);
        if (box >= 0 && box < kBoxes) {
          prefetch_box(z_map, tile.column * C::kUnits + box / 2 * 64 + box % 2 * args.units, row);
        }
      }
      at.step();
    }
  });
}

/// The warps that make results of the sums which the others left in shared memory.
template <typename C, typename F>
__device__ __forceinline__ void finish_apart(const WgmmaArgs& args, uint32_t base, uint32_t rank) {
  constexpr int kWarps = 3;
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t parity = 0;
  CodesState state;
  state.begin<C>(args.codes);
  for_each_tile<C>(args, rank, [&](TilePlace tile) {
#pragma unroll 1
    for (int of = warp; of < 8; of += kWarps) {
      const uint32_t place = base + C::kTurns + of * C::kWarpBytes;
      const uint32_t ready = base + C::kReady + 8 * of;
      const int row = tile.row * C::kRows + of * 16;
      if constexpr (C::kBackward) {
        finish_backward<C, F>(
            args, row, tile.column, lane, [&] { wait(ready, parity); },
            [&](int half) { return Turn<C::kHalf>{place + half * C::kTurnBytes, lane}; });
      } else {
        wait(ready, parity);
        finish_forward<C, F>(place, lane, row, tile.column, args, state);
      }
      __syncwarp();
      if (lane == 0) arrive(base + C::kTaken + 8 * of);
    }
    parity ^= 1;
  });
  state.end<C>(args.codes, blockIdx.x == 0 && threadIdx.x == 32);
}

/// A warpgroup that multiplies: `group` is 0 or 1.
template <typename C, typename F>
__device__ __forceinline__ void consume(const WgmmaArgs& args, uint32_t base, uint32_t rank,
                                        int group) {
  const int warp = group * 4 + static_cast<int>(threadIdx.x) / 32 % 4;  // of the eight
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t full = base + C::kFull, empty = base + C::kEmpty;
  const uint32_t place = base + C::kTurns + warp * C::kWarpBytes;
  const int blocks = args.k / C::kDepth;
  const uint64_t x_first = operand_along_k(base + group * (C::kXBytes / 2));
  const uint64_t w_first =
      C::kBackward ? operand_across_k(base + C::kXBytes) : operand_along_k(base + C::kXBytes);

  float sums[C::kColumns / 2];
  float factor = 1.0f;
  if constexpr (C::kCodes) factor = *args.codes.x_scale * *args.codes.w_scale;
  StageWalk<C> at{0};
  uint32_t left = 0;
  bool begun = C::kSkew == 0;
  for_each_tile<C>(args, rank, [&](TilePlace tile) {
    if (!begun && group == 1) meet_named(1, 256);
    int last = 0;
    for (int block = 0; block < blocks; ++block) {
      const uint64_t x = x_first + static_cast<uint64_t>(at.stage * (C::kStageBytes >> 4));
      const uint64_t w = w_first + static_cast<uint64_t>(at.stage * (C::kStageBytes >> 4));
      wait(full + 8 * at.stage, at.parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // of 32 bytes
        const uint64_t x_part = x + k * 32 / 16, w_part = w + k * (C::kBackward ? 2048 : 32) / 16;
        if constexpr (C::kCodes) {
          multiply_codes(sums, x_part, w_part, block > 0 || k > 0);
        } else {
          multiply<C::kBackward>(sums, x_part, w_part, block > 0 || k > 0);
        }
      }
      commit_products();
      await_products<1>();
      if (block > 0) release<C>(empty + 8 * last, lane);
      if (!begun && group == 0 && block == C::kSkew - 1) arrive_named(1, 256);
      last = at.stage;
      at.step();
    }
    begun = true;

    const auto end_products = [&] {
      await_products<0>();
      hold(sums);
      release<C>(empty + 8 * last, lane);
    };
    if constexpr (C::kApart) {
      end_products();
      wait(base + C::kTaken + 8 * warp, left ^ 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        write_half<C>(Turn<C::kHalf>{place + half * C::kTurnBytes, lane}, sums, factor, half);
      }
      if (lane == 0) arrive(base + C::kReady + 8 * warp);
      left ^= 1;
    } else {
      finish_backward<C, F>(args, tile.row * C::kRows + warp * 16, tile.column, lane, end_products,
                            [&](int half) {
                              const Turn<C::kHalf> turn{place, lane};
                              write_half<C>(turn, sums, factor, half);
                              return turn;
                            });
    }
  });
}

}  // namespace hopper

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define LIGATURE_CLUSTER(blocks)
#else
#define LIGATURE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

template <typename C, typename F>
__global__ void LIGATURE_CLUSTER(C::kCluster) __launch_bounds__(C::kThreads, 1)
    wgmma_kernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap z_map, const WgmmaArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  const uint32_t base = (hopper::shared_address(memory) + 1023) & ~uint32_t{1023};
  const uint32_t rank = C::kCluster == 1 ? 0 : hopper::cluster_rank();
  if (threadIdx.x == 0) {
    hopper::prefetch_map(&x_map);
    hopper::prefetch_map(&w_map);
    for (int stage = 0; stage < C::kStages; ++stage) {
      hopper::init_barrier(base + C::kFull + 8 * stage, 1);
      hopper::init_barrier(base + C::kEmpty + 8 * stage, 8 * C::kCluster);
    }
    for (int warp = 0; warp < 8; ++warp) {
      hopper::init_barrier(base + C::kReady + 8 * warp, 1);
      hopper::init_barrier(base + C::kTaken + 8 * warp, 1);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  if constexpr (C::kCluster > 1) hopper::meet_cluster();

  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    hopper::give_registers<C::kApart ? 136 : 40>();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) hopper::produce<C>(&x_map, &w_map, &z_map, args, base, rank);
      __syncwarp();
    } else if constexpr (C::kApart) {
      hopper::finish_apart<C, F>(args, base, rank);
    }
  } else {
    hopper::take_registers<C::kApart ? 184 : 232>();
    hopper::consume<C, F>(args, base, rank, group - 1);
  }
  // The other block may still send here.
  if constexpr (C::kCluster > 1) hopper::meet_cluster();
#endif
}

#undef LIGATURE_CLUSTER

/// Is there code in this build for the current device? Where it was compiled for another
/// architecture than sm_90a the kernel is empty, which shows in its registers. Once per device; the
/// kernel's shared memory is allowed then too.
template <typename C, typename F>
bool has_wgmma_code() {
  enum : int { kUnknown, kYes, kNo };
  static std::array<std::atomic<int>, 128> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= static_cast<int>(known.size())) {
    return false;
  }
  std::atomic<int>& answer = known[static_cast<size_t>(device)];
  if (answer.load(std::memory_order_relaxed) == kUnknown) {
    constexpr int kRegisters = 128;
    const auto kernel = wgmma_kernel<C, F>;
    cudaFuncAttributes attributes{};
    const bool found = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                       attributes.numRegs >= kRegisters &&
                       cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            C::kSharedBytes) == cudaSuccess;
    if (!found) static_cast<void>(cudaGetLastError());
    answer.store(found ? kYes : kNo, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kYes;
}

/// Whether it was launched; cudaPeekAtLastError() then tells of errors.
template <typename C, typename F>
bool launch_wgmma(const GatedLinearArgs& from, int sm_count, Stream stream) {
  if (!has_wgmma_code<C, F>()) return false;
  CUtensorMap x_map, w_map, z_map;
  const int64_t w_rows = C::kBackward ? from.k : 2 * from.units;
  const int64_t w_columns = C::kBackward ? from.units : from.k;
  constexpr int kBytes = C::kCodes ? 1 : 2;
  if (!encode_boxes(&x_map, from.x, from.rows, from.k, C::kRows, kBytes) ||
      !encode_boxes(&w_map, from.w, w_rows, w_columns, C::kBackward ? C::kDepth : C::kHalf,
                    kBytes)) {
    return false;
  }
  z_map = x_map;
  if (C::kBackward && !encode_boxes(&z_map, from.z, from.rows, 2 * from.units, C::kRows, kBytes)) {
    return false;
  }
  WgmmaArgs args;
  args.rows = static_cast<int>(from.rows);
  args.units = static_cast<int>(from.units);
  args.k = static_cast<int>(from.k);
  args.z = from.z;
  args.out = from.out;
  args.activated = from.activated;
  args.params = from.params;
  args.codes = from.codes;
  const int blocks = std::min(hopper::tile_count<C>(args), sm_count / C::kCluster) * C::kCluster;
  wgmma_kernel<C, F><<<blocks, C::kThreads, C::kSharedBytes, stream>>>(x_map, w_map, z_map, args);
  return true;
}

}  // namespace ligature::cuda
