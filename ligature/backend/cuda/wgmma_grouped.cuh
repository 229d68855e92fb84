// Grouped GEMMs in bfloat16 on Hopper (sm_90a). As in wgmma_gemm.cuh one block per multiprocessor
// goes from tile to tile, a thread of its first warpgroup copies boxes into stages of shared
// memory, and the two other warpgroups multiply, each one half of the tile's 128 rows, and write
// their sums. Which tile is whose is found on the device (grouped_tiles.h): the host knows no
// sizes. These kernels have been compiled, but not been run on a GPU yet.
#pragma once

#include "ligature/backend/cuda/grouped_launch.h"
#include "ligature/backend/cuda/wgmma_gemm.cuh"

namespace ligature::cuda {

/// Along: w is [columns, k]. Across: w is [k, columns]. Weights: both operands are read across the
/// rows that are summed over.
enum class GroupedForm { Along, Across, Weights };

template <GroupedForm Form>
struct GroupedTile {
  static constexpr GroupedForm kForm = Form;
  static constexpr int kCluster = 1, kStages = 4, kThreads = 384;
  static constexpr int kRows = kTileRows, kColumns = 256, kHalf = kColumns / 2, kDepth = 64;
  static constexpr int kBoxBytes = 64 * 128;  // 64 rows of 128 bytes
  static constexpr int kXBytes = kRows * 128, kWBytes = kColumns * 128;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kTurnBytes = Form == GroupedForm::Weights ? 0 : 16 * kHalf * 2;
  static constexpr int kTurns = kStages * kStageBytes;
  static constexpr int kFull = kTurns + 8 * kTurnBytes, kEmpty = kFull + 8 * kStages;
  static constexpr int kSharedBytes = kEmpty + 8 * kStages + 1024;  // to begin at 1024
  static_assert(kSharedBytes <= 232448 && kReduceRows == kDepth);
};

/// GroupedRowsArgs, in numbers that a kernel counts with.
struct GroupedRowsParams {
  GroupEnds groups;
  int columns = 0, k = 0;
  const __nv_bfloat16* bias = nullptr;
  int64_t bias_stride = 0;
  const float* scale = nullptr;
  __nv_bfloat16* out = nullptr;
};

struct GroupedWeightsParams {
  GroupEnds groups;
  int m = 0, n = 0;
  bool accumulate = false;
};

namespace hopper {

/// Barriers before, roles, and nothing after: `produce(base)` by one thread, `consume(base, group)`
/// by the two warpgroups that multiply.
template <typename C, typename Produce, typename Consume>
__device__ __forceinline__ void run_grouped(uint8_t* memory, const Produce& produce,
                                            const Consume& consume) {
  const uint32_t base = (shared_address(memory) + 1023) & ~uint32_t{1023};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      init_barrier(base + C::kFull + 8 * stage, 1);
      init_barrier(base + C::kEmpty + 8 * stage, 8);
    }
    publish_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) produce(base);
  } else {
    take_registers<232>();
    consume(base, group - 1);
  }
}

/// The sums of a tile over `blocks` stages, which are released but for the last one; zeros without
/// any. `enter(block, stage)`: when a stage has been filled, before it is read.
template <typename C, typename Enter>
__device__ __forceinline__ void multiply_stages(float (&sums)[128], StageWalk<C>& at, int blocks,
                                                uint32_t base, int group, int lane,
                                                const Enter& enter) {
  constexpr bool kAcrossX = C::kForm == GroupedForm::Weights;
  constexpr bool kAcrossW = C::kForm != GroupedForm::Along;
  const uint32_t x_place = base + group * (C::kXBytes / 2), w_place = base + C::kXBytes;
  const uint64_t x_first = kAcrossX ? operand_across_k(x_place) : operand_along_k(x_place);
  const uint64_t w_first = kAcrossW ? operand_across_k(w_place) : operand_along_k(w_place);
  if (blocks == 0) {
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
    return;
  }
  int last = 0;
  for (int block = 0; block < blocks; ++block) {
    const uint64_t x = x_first + static_cast<uint64_t>(at.stage * (C::kStageBytes >> 4));
    const uint64_t w = w_first + static_cast<uint64_t>(at.stage * (C::kStageBytes >> 4));
    wait(base + C::kFull + 8 * at.stage, at.parity);
    enter(block, at.stage);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // of 16
      const uint64_t x_part = x + k * (kAcrossX ? 2048 : 32) / 16;
      const uint64_t w_part = w + k * (kAcrossW ? 2048 : 32) / 16;
      if constexpr (kAcrossX) {
        multiply_across(sums, x_part, w_part, block > 0 || k > 0);
      } else {
        multiply<kAcrossW>(sums, x_part, w_part, block > 0 || k > 0);
      }
    }
    commit_products();
    await_products<1>();
    if (block > 0) release<C>(base + C::kEmpty + 8 * last, lane);
    last = at.stage;
    at.step();
  }
  await_products<0>();
  hold(sums);
  release<C>(base + C::kEmpty + 8 * last, lane);
}

// ---- rows in groups

/// Calls f(place) for each tile of this block.
template <typename C, typename F>
__device__ __forceinline__ void for_each_grouped_tile(const GroupedRowsParams& args, const F& f) {
  const int across = (args.columns + C::kColumns - 1) / C::kColumns;
  const int64_t tiles = int64_t{args.groups.tiles()} * across;
  int32_t from = 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const GroupedTilePlace place = grouped_tile(args.groups, tile, across, from);
    from = place.rows.group;
    f(place);
  }
}

template <typename C>
__device__ __forceinline__ void produce_rows(const CUtensorMap* x_map, const CUtensorMap* w_map,
                                             const GroupedRowsParams& args, uint32_t base) {
  const int blocks = (args.k + C::kDepth - 1) / C::kDepth;
  StageWalk<C> at{1};
  for_each_grouped_tile<C>(args, [&](const GroupedTilePlace& tile) {
    const int column = tile.column * C::kColumns;
    for (int block = 0; block < blocks; ++block) {
      const uint32_t to = base + at.stage * C::kStageBytes, w_to = to + C::kXBytes;
      const uint32_t barrier = base + C::kFull + 8 * at.stage;
      const int k = block * C::kDepth;
      wait(base + C::kEmpty + 8 * at.stage, at.parity);
      arrive_and_expect(barrier, C::kStageBytes);
      copy_box(to, x_map, k, tile.rows.begin, barrier);
      if constexpr (C::kForm == GroupedForm::Across) {
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          copy_box(w_to + box * C::kBoxBytes, w_map, column + box * 64, k, tile.rows.group,
                   barrier);
        }
      } else {
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          copy_box(w_to + box * 2 * C::kBoxBytes, w_map, k, column + box * C::kHalf,
                   tile.rows.group, barrier);
        }
      }
      at.step();
    }
  });
}

/// The bias of the lane's columns, times the scales of its two rows.
__device__ __forceinline__ void add_bias(float (&sums)[128], const GroupedRowsParams& args,
                                         const TileRows& rows, int first_row, int column,
                                         int lane) {
  float scale[2] = {1.0f, 1.0f};
  if (args.scale != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane / 4 + 8 * i;
      scale[i] = row < rows.end ? args.scale[row] : 0.0f;
    }
  }
  const __nv_bfloat16* bias = args.bias + rows.group * args.bias_stride;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int at = column + 8 * j + 2 * (lane % 4);
    if (at < args.columns) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + at);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* sum = sums + 4 * j + 2 * i;
        sum[0] = __fadd_rn(sum[0], __fmul_rn(scale[i], low_of(pair)));
        sum[1] = __fadd_rn(sum[1], __fmul_rn(scale[i], high_of(pair)));
      }
    }
  }
}

template <typename C>
__device__ __forceinline__ void consume_rows(const GroupedRowsParams& args, uint32_t base,
                                             int group) {
  const int warp = group * 4 + static_cast<int>(threadIdx.x) / 32 % 4;  // of the eight
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Turn<C::kHalf> turn{base + C::kTurns + warp * C::kTurnBytes, lane};
  const int blocks = (args.k + C::kDepth - 1) / C::kDepth;
  float sums[128];
  StageWalk<C> at{0};
  for_each_grouped_tile<C>(args, [&](const GroupedTilePlace& tile) {
    multiply_stages<C>(sums, at, blocks, base, group, lane, [](int, int) {});
    const int first_row = tile.rows.begin + warp * 16, column = tile.column * C::kColumns;
    if (args.bias != nullptr) add_bias(sums, args, tile.rows, first_row, column, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      turn.write([&](int i) {
        const int sum = half * (C::kHalf / 2) + 2 * i;
        return pack(sums[sum], sums[sum + 1]);
      });
      const int own = column + half * C::kHalf + turn.column();
#pragma unroll
      for (int step = 0; step < Turn<C::kHalf>::kSteps; ++step) {
        const int row = first_row + turn.row(step);
        store_passing(args.out + row * int64_t{args.columns} + own, turn.read(step),
                      row < tile.rows.end && own < args.columns);
      }
    }
  });
}

// ---- the sum over a group's rows

/// Calls f(tile, reduction) for each tile of this block that is to be written.
template <typename C, typename F>
__device__ __forceinline__ void for_each_weight_tile(const GroupedWeightsParams& args,
                                                     const GroupOuts& outs, const F& f) {
  const int down = (args.m + C::kRows - 1) / C::kRows;
  const int across = (args.n + C::kColumns - 1) / C::kColumns;
  const int64_t tiles = int64_t{outs.count} * down * across;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const WeightTile tile = weight_tile(index, down, across);
    const Reduction sum = reduction_of(args.groups, outs.first + tile.group);
    if (sum.blocks > 0 || !args.accumulate) f(tile, sum);
  }
}

template <typename C>
__device__ __forceinline__ void produce_weights(const CUtensorMap* dy_map, const CUtensorMap* x_map,
                                                const GroupedWeightsParams& args,
                                                const GroupOuts& outs, uint32_t base) {
  StageWalk<C> at{1};
  for_each_weight_tile<C>(args, outs, [&](const WeightTile& tile, const Reduction& sum) {
    for (int block = 0; block < sum.blocks; ++block) {
      const uint32_t to = base + at.stage * C::kStageBytes;
      const uint32_t barrier = base + C::kFull + 8 * at.stage;
      const int row = sum.first_row(block);
      wait(base + C::kEmpty + 8 * at.stage, at.parity);
      arrive_and_expect(barrier, C::kStageBytes);
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        copy_box(to + box * C::kBoxBytes, dy_map, tile.row * C::kRows + box * 64, row, barrier);
      }
#pragma unroll
      for (int box = 0; box < 4; ++box) {
        copy_box(to + C::kXBytes + box * C::kBoxBytes, x_map, tile.column * C::kColumns + box * 64,
                 row, barrier);
      }
      at.step();
    }
  });
}

/// Zeros instead of another group's rows, in both operands: a NaN there would go through a zero in
/// the other one. By the 256 threads that multiply.
template <typename C>
__device__ __forceinline__ void clear_rows(uint32_t stage, int rows) {
  constexpr int kBoxes = C::kStageBytes / C::kBoxBytes, kParts = 128 / 16;
  const int parts = (C::kDepth - rows) * kParts;
  for (int i = static_cast<int>(threadIdx.x) - 128; i < kBoxes * parts; i += 256) {
    store_shared(stage + i / parts * C::kBoxBytes + rows * 128 + i % parts * 16,
                 make_uint4(0, 0, 0, 0));
  }
  publish_shared();
  meet_named(1, 256);
}

template <typename Out>
__device__ __forceinline__ void store_sums(Out* to, float low, float high, bool accumulate) {
  if constexpr (sizeof(Out) == 4) {
    float2* pair = reinterpret_cast<float2*>(to);
    const float2 before = accumulate ? *pair : make_float2(0.0f, 0.0f);
    *pair = accumulate ? make_float2(__fadd_rn(before.x, low), __fadd_rn(before.y, high))
                       : make_float2(low, high);
  } else {
    uint32_t* pair = reinterpret_cast<uint32_t*>(to);
    const uint32_t before = accumulate ? *pair : 0;
    *pair = accumulate ? pack(__fadd_rn(low_of(before), low), __fadd_rn(high_of(before), high))
                       : pack(low, high);
  }
}

template <typename C, typename Out>
__device__ __forceinline__ void consume_weights(const GroupedWeightsParams& args,
                                                const GroupOuts& outs, uint32_t base, int group) {
  const int warp = group * 4 + static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sums[128];
  StageWalk<C> at{0};
  for_each_weight_tile<C>(args, outs, [&](const WeightTile& tile, const Reduction& sum) {
    multiply_stages<C>(sums, at, sum.blocks, base, group, lane, [&](int block, int stage) {
      const int rows = sum.rows_in(block);
      if (rows < C::kDepth) clear_rows<C>(base + stage * C::kStageBytes, rows);
    });
    Out* out = static_cast<Out*>(outs.out[tile.group]);
    const int column = tile.column * C::kColumns + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.row * C::kRows + warp * 16 + lane / 4 + 8 * i;
      if (row >= args.m) continue;
      Out* to = out + row * int64_t{args.n} + column;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (column + 8 * j >= args.n) continue;
        store_sums(to + 8 * j, sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1], args.accumulate);
      }
    }
  });
}

}  // namespace hopper

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    grouped_rows_kernel(const __grid_constant__ CUtensorMap x_map,
                        const __grid_constant__ CUtensorMap w_map, const GroupedRowsParams args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  hopper::run_grouped<C>(
      memory, [&](uint32_t base) { hopper::produce_rows<C>(&x_map, &w_map, args, base); },
      [&](uint32_t base, int group) { hopper::consume_rows<C>(args, base, group); });
#endif
}

template <typename C, typename Out>
__global__ void __launch_bounds__(C::kThreads, 1)
    grouped_weights_kernel(const __grid_constant__ CUtensorMap dy_map,
                           const __grid_constant__ CUtensorMap x_map,
                           const GroupedWeightsParams args,
                           const __grid_constant__ GroupOuts outs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  hopper::run_grouped<C>(
      memory, [&](uint32_t base) { hopper::produce_weights<C>(&dy_map, &x_map, args, outs, base); },
      [&](uint32_t base, int group) { hopper::consume_weights<C, Out>(args, outs, base, group); });
#endif
}

/// As has_wgmma_code, of any kernel.
template <auto Kernel, int SharedBytes>
bool has_hopper_code() {
  enum : int { kUnknown, kYes, kNo };
  static std::array<std::atomic<int>, 128> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= static_cast<int>(known.size())) {
    return false;
  }
  std::atomic<int>& answer = known[static_cast<size_t>(device)];
  if (answer.load(std::memory_order_relaxed) == kUnknown) {
    constexpr int kRegisters = 128;
    cudaFuncAttributes attributes{};
    const bool found = cudaFuncGetAttributes(&attributes, Kernel) == cudaSuccess &&
                       attributes.numRegs >= kRegisters &&
                       cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            SharedBytes) == cudaSuccess;
    if (!found) static_cast<void>(cudaGetLastError());
    answer.store(found ? kYes : kNo, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kYes;
}

}  // namespace ligature::cuda
