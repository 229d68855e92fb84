// Matrix products in bfloat16 on Hopper (sm_90a) whose epilogue is a gated activation or its
// gradient, so that what lies between is not written and read again:
//   Plain           out [rows, n] = x [rows, k] w [n, k]^T
//   PlainTurned     out [rows, n] = x [rows, k] w [k, n]
//   Forward         out = Plain, and activated [rows, n / 2] = act(out's gates) * out's linear
//   units BackwardBoth    out [rows, 2 n] = the activation's gradient at z [rows, 2 n] of
//   PlainTurned,
//                   and activated [rows, n]
//   Backward        the same without `activated`
// One block per multiprocessor goes from tile to tile: a thread of its first warpgroup copies boxes
// into stages of shared memory, the two other warpgroups multiply, each one half of the tile's
// rows. The blocks of a cluster share what they can: each copies a part and sends it to both.
#pragma once

#include <cuda_bf16.h>

#include "ligature/backend/cuda/device/activation.cuh"
#include "ligature/backend/cuda/device/wgmma.cuh"

namespace ligature::cuda {

enum class WgmmaForm { Plain, PlainTurned, Forward, Backward, BackwardBoth };

struct WgmmaArgs {
  int rows = 0, n = 0, k = 0;
  void* out = nullptr;
  void* activated = nullptr;
  const void* z = nullptr;
  int group = 8;  // clusters' rows of tiles that are walked through together, for L2's sake
  ActivationParams params;
};

/// Blocks beside each other share x, blocks below each other share w. With `Skew` the second
/// warpgroup stays so many stages behind the first one: one multiplies while the other is in its
/// epilogue. `Apart`: other warps do the epilogue.
template <int BlockRows, int BlockColumns, int ClusterDown, int ClusterAcross, int Stages, int Skew,
          bool Apart = false>
struct WgmmaTile {
  static constexpr int kRows = BlockRows, kColumns = BlockColumns;
  static constexpr int kDown = ClusterDown, kAcross = ClusterAcross;
  static constexpr int kCluster = kDown * kAcross;
  static constexpr int kStages = Stages, kSkew = Skew;
  static constexpr int kDepth = 64;            // of k in a stage: rows of 128 bytes
  static constexpr int kPieces = kRows / 128;  // of 64 rows, for each warpgroup
  static constexpr int kHalf = kColumns / 2;   // gates, linear units
  static constexpr int kXBytes = kRows * 128, kWBytes = kColumns * 128;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr bool kApart = Apart;
  static constexpr int kThreads = 384;
  static constexpr int kTurnBytes = 16 * kHalf * 2;
  static constexpr int kWarpBytes = kApart ? 2 * kPieces * kTurnBytes : kTurnBytes;
  static constexpr int kBarriers = kStages * kStageBytes + 8 * kWarpBytes;
  static constexpr int kSharedBytes = kBarriers + 16 * kStages + 128 + 1024;
  static_assert(kCluster <= 2 && kSharedBytes <= 232448 && kSkew < kStages);
};

namespace hopper {

__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_of(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_of(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

/// 16 rows of W columns that a warp has as sums, two neighbours in each lane, turned into 16 bytes
/// of a row in each lane. Places are swizzled: neither side meets a bank twice.
template <int W>
struct Turn {
  static constexpr int kChunks = W / 8;  // of 16 bytes in a row
  static constexpr int kRowsAtOnce = 32 / kChunks;
  static constexpr int kSteps = 16 / kRowsAtOnce;

  uint32_t place;
  int lane;

  /// value(i): columns 8 (i / 2) + 2 (lane % 4) and the next, of row lane / 4 + 8 (i % 2).
  template <typename Value>
  __device__ __forceinline__ void write(const Value& value) const {
    const int row = lane & 15;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kChunks; j += 2) {
      const int chunk = (j + (lane >> 4)) ^ (row & 7);
      store_matrices(place + row * (W * 2) + chunk * 16, value(2 * j), value(2 * j + 1),
                     value(2 * j + 2), value(2 * j + 3));
    }
    __syncwarp();
  }

  __device__ __forceinline__ int row(int step) const { return step * kRowsAtOnce + lane / kChunks; }
  __device__ __forceinline__ int column() const { return lane % kChunks * 8; }
  __device__ __forceinline__ uint4 read(int step) const {
    return load_shared(place + row(step) * (W * 2) + ((lane % kChunks) ^ (row(step) & 7)) * 16);
  }

  /// To rows of `out` that begin at the warp's first row; `rows` of them exist.
  __device__ __forceinline__ void store(__nv_bfloat16* out, int64_t width, int rows) const {
    __nv_bfloat16* to = out + row(0) * width + column();
#pragma unroll
    for (int first = 0; first < kSteps; first += 4) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = read(first + i);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_passing(to, v[i], row(first + i) < rows);
        to += kRowsAtOnce * width;
      }
    }
  }
};

struct TilePlace {
  int row, column;  // in tiles of a block
};

/// Tiles of a cluster in the order of their work: down a group of rows, then on by a column.
template <typename C>
__device__ __forceinline__ TilePlace tile_place(int index, const WgmmaArgs& args, uint32_t rank) {
  const int down = (args.rows + C::kRows * C::kDown - 1) / (C::kRows * C::kDown);
  const int across = args.n / (C::kColumns * C::kAcross);
  const int per_group = args.group * across;
  const int first = index / per_group * args.group;
  const int rows = min(args.group, down - first);
  const int in_group = index % per_group;
  const int r = static_cast<int>(rank);
  return {(first + in_group % rows) * C::kDown + (C::kDown == 2 ? r : 0),
          in_group / rows * C::kAcross + (C::kAcross == 2 ? r : 0)};
}

template <typename C>
__device__ __forceinline__ int tile_count(const WgmmaArgs& args) {
  return (args.rows + C::kRows * C::kDown - 1) / (C::kRows * C::kDown) *
         (args.n / (C::kColumns * C::kAcross));
}

template <typename C>
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
  if constexpr (C::kCluster == 1) {
    if (lane == 0) arrive(barrier);
  } else {
    if (lane < C::kCluster) arrive_at(barrier, static_cast<uint32_t>(lane));
  }
}

/// The thread that keeps the stages filled.
template <typename C, WgmmaForm Form>
__device__ __forceinline__ void produce(const CUtensorMap* x_map, const CUtensorMap* w_map,
                                        const CUtensorMap* z_map, const WgmmaArgs& args,
                                        uint32_t base, uint32_t rank) {
  constexpr bool kTurned = Form != WgmmaForm::Plain && Form != WgmmaForm::Forward;
  constexpr bool kBackward = Form == WgmmaForm::Backward || Form == WgmmaForm::BackwardBoth;
  constexpr uint16_t kAll = 3;
  const uint32_t full = base + C::kBarriers, empty = full + 8 * C::kStages;
  const int tiles = tile_count<C>(args), blocks = args.k / C::kDepth;
  const int step = static_cast<int>(gridDim.x) / C::kCluster;
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = static_cast<int>(blockIdx.x) / C::kCluster; tile < tiles; tile += step) {
    const TilePlace at = tile_place<C>(tile, args, rank);
    const int row = at.row * C::kRows, column = at.column * C::kColumns;
    for (int block = 0; block < blocks; ++block) {
      const uint32_t x_to = base + stage * C::kStageBytes, w_to = x_to + C::kXBytes;
      const uint32_t barrier = full + 8 * stage;
      const int k = block * C::kDepth;
      wait(empty + 8 * stage, parity);
      arrive_and_expect(barrier, C::kStageBytes);

      if constexpr (C::kAcross == 2) {
        const int part = static_cast<int>(rank) * (C::kRows / 2);
        copy_box_to_all(x_to + part * 128, x_map, k, row + part, barrier, kAll);
      } else {
        copy_box(x_to, x_map, k, row, barrier);
      }

      if constexpr (kTurned) {
        constexpr int kBoxes = C::kColumns / 64 / C::kDown;
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          if constexpr (C::kDown == 2) {
            const int box = static_cast<int>(rank) * kBoxes + i;
            copy_box_to_all(w_to + box * 8192, w_map, column + box * 64, k, barrier, kAll);
          } else {
            copy_box(w_to + i * 8192, w_map, column + i * 64, k, barrier);
          }
        }
      } else {
        const auto w_row = [&](int half) {
          if constexpr (Form == WgmmaForm::Forward) {
            return at.column * C::kHalf + half * (args.n / 2);
          } else {
            return column + half * C::kHalf;
          }
        };
        if constexpr (C::kDown == 2) {
          const int half = static_cast<int>(rank);
          copy_box_to_all(w_to + half * (C::kHalf * 128), w_map, k, w_row(half), barrier, kAll);
        } else {
          copy_box(w_to, w_map, k, w_row(0), barrier);
          copy_box(w_to + C::kHalf * 128, w_map, k, w_row(1), barrier);
        }
      }

      if constexpr (kBackward) {  // the epilogue's z comes from L2
        constexpr int kDown = C::kRows / 128, kBoxes = kDown * (C::kColumns / 64) * 2;
        const int box = block - (blocks - kBoxes - 4);
        if (box >= 0 && box < kBoxes) {
          const int in_half = box / 2 / kDown * 64;
          prefetch_box(z_map, column + in_half + box % 2 * args.n, row + box / 2 % kDown * 128);
        }
      }
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

/// Sums to memory, and what is made of them.
template <typename C, WgmmaForm Form, typename F>
__device__ __forceinline__ void finish_forward(const float (&sums)[C::kPieces][C::kColumns / 2],
                                               const WgmmaArgs& args, TilePlace at, int first_row,
                                               const Turn<C::kHalf>& turn) {
  constexpr bool kActivates = Form == WgmmaForm::Forward;
  const int64_t half = args.n / 2;
  const int64_t gates = int64_t{at.column} * (kActivates ? C::kHalf : C::kColumns);
  const int64_t linear = gates + (kActivates ? half : C::kHalf);
#pragma unroll
  for (int piece = 0; piece < C::kPieces; ++piece) {
    const int row = first_row + piece * 64;
    const int rows = args.rows - row;
    const auto gate = [&](int i) { return pack(sums[piece][2 * i], sums[piece][2 * i + 1]); };
    const auto unit = [&](int i) {
      return pack(sums[piece][C::kHalf / 2 + 2 * i], sums[piece][C::kHalf / 2 + 2 * i + 1]);
    };
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(args.out) + int64_t{row} * args.n;
    turn.write(gate);
    turn.store(out + gates, args.n, rows);
    turn.write(unit);
    turn.store(out + linear, args.n, rows);
    if constexpr (kActivates) {
      turn.write([&](int i) {
        const uint32_t a = gate(i), b = unit(i);
        return pack(F::value(low_of(a), low_of(b), args.params),
                    F::value(high_of(a), high_of(b), args.params));
      });
      turn.store(static_cast<__nv_bfloat16*>(args.activated) + row * half + gates, half, rows);
    }
  }
}

/// A few rows of z, of 8 gates and 8 linear units in each lane.
struct ZPart {
  static constexpr int kSteps = 4;
  uint4 gates[kSteps], linear[kSteps];
};

/// What the epilogue of a backward form reads and writes beside its sums: parts of z, dz and the
/// activation, each lane 16 bytes of every fourth or second row.
template <typename C>
struct ZWalk {
  using T = Turn<C::kHalf>;
  static constexpr int kPartsOfHalf = T::kSteps / ZPart::kSteps;
  static constexpr int kParts = C::kPieces * 2 * kPartsOfHalf;

  const __nv_bfloat16* z;
  __nv_bfloat16 *dz, *activated;  // all three at the lane's first row and gate
  int64_t n;
  int rows;  // that exist from there on

  __device__ __forceinline__ ZWalk(const WgmmaArgs& args, int row, int64_t column)
      : z(static_cast<const __nv_bfloat16*>(args.z) + row * (2 * int64_t{args.n}) + column),
        dz(static_cast<__nv_bfloat16*>(args.out) + row * (2 * int64_t{args.n}) + column),
        activated(static_cast<__nv_bfloat16*>(args.activated) + row * int64_t{args.n} + column),
        n(args.n),
        rows(args.rows - row) {}

  static __device__ __forceinline__ constexpr int row(int part, int step) {
    return part / (2 * kPartsOfHalf) * 64 +
           (part % kPartsOfHalf * ZPart::kSteps + step) * T::kRowsAtOnce;
  }
  static __device__ __forceinline__ constexpr int column(int part) {
    return part / kPartsOfHalf % 2 * C::kHalf;
  }

  __device__ __forceinline__ void read(int part, ZPart& to) const {
#pragma unroll
    for (int step = 0; step < ZPart::kSteps; ++step) {
      const __nv_bfloat16* from = z + row(part, step) * (2 * n) + column(part);
      const bool inside = row(part, step) < rows;
      to.gates[step] = load_passing(from, inside);
      to.linear[step] = load_passing(from + n, inside);
    }
  }
};

/// One part of it, with the gradients of the activation's result as `turn` holds them.
template <typename C, WgmmaForm Form, typename F>
__device__ __forceinline__ void finish_part(int part, const ZPart& z, const WgmmaArgs& args,
                                            const ZWalk<C>& walk, const Turn<C::kHalf>& turn) {
  using W = ZWalk<C>;
  uint4 grads_of[ZPart::kSteps];
#pragma unroll
  for (int step = 0; step < ZPart::kSteps; ++step) {
    grads_of[step] = turn.read(part % W::kPartsOfHalf * ZPart::kSteps + step);
  }
#pragma unroll
  for (int step = 0; step < ZPart::kSteps; ++step) {
    const uint4 d = grads_of[step], g = z.gates[step], l = z.linear[step];
    const uint32_t grads[4] = {d.x, d.y, d.z, d.w};
    const uint32_t gates[4] = {g.x, g.y, g.z, g.w}, linear[4] = {l.x, l.y, l.z, l.w};
    uint32_t to_gates[4], to_linear[4], to_activated[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Gradient low =
          F::gradient(low_of(grads[i]), low_of(gates[i]), low_of(linear[i]), args.params);
      const Gradient high =
          F::gradient(high_of(grads[i]), high_of(gates[i]), high_of(linear[i]), args.params);
      to_gates[i] = pack(low.da, high.da);
      to_linear[i] = pack(low.db, high.db);
      to_activated[i] = pack(low.y, high.y);
    }
    const int row = W::row(part, step);
    const bool inside = row < walk.rows;
    __nv_bfloat16* to = walk.dz + row * (2 * walk.n) + W::column(part);
    store_passing(to, make_uint4(to_gates[0], to_gates[1], to_gates[2], to_gates[3]), inside);
    store_passing(to + walk.n, make_uint4(to_linear[0], to_linear[1], to_linear[2], to_linear[3]),
                  inside);
    if constexpr (Form == WgmmaForm::BackwardBoth) {
      store_passing(walk.activated + row * walk.n + W::column(part),
                    make_uint4(to_activated[0], to_activated[1], to_activated[2], to_activated[3]),
                    inside);
    }
  }
}

template <typename C, WgmmaForm Form, typename F>
__device__ __forceinline__ void finish_backward(const float (&sums)[C::kPieces][C::kColumns / 2],
                                                const WgmmaArgs& args, const ZWalk<C>& walk,
                                                ZPart (&z)[2], const Turn<C::kHalf>& turn) {
  using W = ZWalk<C>;
#pragma unroll
  for (int part = 0; part < W::kParts; ++part) {
    if (part + 1 < W::kParts) walk.read(part + 1, z[(part + 1) % 2]);
    if (part % W::kPartsOfHalf == 0) {
      const int begin = part / W::kPartsOfHalf % 2 * (C::kHalf / 2);
      const int piece = part / (2 * W::kPartsOfHalf);
      turn.write(
          [&](int i) { return pack(sums[piece][begin + 2 * i], sums[piece][begin + 2 * i + 1]); });
    }
    finish_part<C, Form, F>(part, z[part % 2], args, walk, turn);
  }
}

/// The warps that make results of the sums which the others left in shared memory.
template <typename C, WgmmaForm Form, typename F>
__device__ __forceinline__ void finish_apart(const WgmmaArgs& args, uint32_t base, uint32_t rank) {
  using T = Turn<C::kHalf>;
  constexpr bool kBackward = Form == WgmmaForm::Backward || Form == WgmmaForm::BackwardBoth;
  constexpr bool kActivates = Form == WgmmaForm::Forward;
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1,
            lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t ready = base + C::kBarriers + 16 * C::kStages, taken = ready + 64;
  const int tiles = tile_count<C>(args);
  const int step = static_cast<int>(gridDim.x) / C::kCluster;
  uint32_t parity = 0;
  for (int tile = static_cast<int>(blockIdx.x) / C::kCluster; tile < tiles; tile += step) {
    const TilePlace at = tile_place<C>(tile, args, rank);
#pragma unroll 1
    for (int of = warp; of < 8; of += 3) {
      const uint32_t place = base + C::kStages * C::kStageBytes + of * C::kWarpBytes;
      const int first_row = at.row * C::kRows + of / 4 * (C::kRows / 2) + of % 4 * 16;
      if constexpr (kBackward) {
        using W = ZWalk<C>;
        const T any{place, lane};
        const W walk(args, first_row + any.row(0), int64_t{at.column} * C::kColumns + any.column());
        ZPart z[2];
        walk.read(0, z[0]);
        wait(ready + 8 * of, parity);
#pragma unroll
        for (int part = 0; part < W::kParts; ++part) {
          if (part + 1 < W::kParts) walk.read(part + 1, z[(part + 1) % 2]);
          const T turn{place + part / W::kPartsOfHalf * C::kTurnBytes, lane};
          finish_part<C, Form, F>(part, z[part % 2], args, walk, turn);
        }
      } else {
        const int64_t half = args.n / 2;
        const int64_t gates = int64_t{at.column} * (kActivates ? C::kHalf : C::kColumns);
        const int64_t linear = gates + (kActivates ? half : C::kHalf);
        wait(ready + 8 * of, parity);
#pragma unroll
        for (int piece = 0; piece < C::kPieces; ++piece) {
          const T a{place + 2 * piece * C::kTurnBytes, lane};
          const T b{place + (2 * piece + 1) * C::kTurnBytes, lane};
          const int row = first_row + piece * 64 + a.row(0);
          __nv_bfloat16* out =
              static_cast<__nv_bfloat16*>(args.out) + int64_t{row} * args.n + a.column();
          __nv_bfloat16* activated =
              static_cast<__nv_bfloat16*>(args.activated) + row * half + gates + a.column();
#pragma unroll
          for (int first = 0; first < T::kSteps; first += 4) {
            uint4 of_gates[4], of_linear[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              of_gates[i] = a.read(first + i);
              of_linear[i] = b.read(first + i);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int below = (first + i) * T::kRowsAtOnce;
              const bool inside = row + below < args.rows;
              store_passing(out + below * int64_t{args.n} + gates, of_gates[i], inside);
              store_passing(out + below * int64_t{args.n} + linear, of_linear[i], inside);
              if constexpr (kActivates) {
                const uint4 g = of_gates[i], l = of_linear[i];
                const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, ls[4] = {l.x, l.y, l.z, l.w};
                uint32_t made[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  made[j] = pack(F::value(low_of(gs[j]), low_of(ls[j]), args.params),
                                 F::value(high_of(gs[j]), high_of(ls[j]), args.params));
                }
                store_passing(activated + below * half,
                              make_uint4(made[0], made[1], made[2], made[3]), inside);
              }
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) arrive(taken + 8 * of);
    }
    parity ^= 1;
  }
}

/// A warpgroup that multiplies: `group` is 0 or 1.
template <typename C, WgmmaForm Form, typename F>
__device__ __forceinline__ void consume(const WgmmaArgs& args, uint32_t base, uint32_t rank,
                                        int group) {
  constexpr bool kTurned = Form != WgmmaForm::Plain && Form != WgmmaForm::Forward;
  constexpr bool kBackward = Form == WgmmaForm::Backward || Form == WgmmaForm::BackwardBoth;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
            lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t full = base + C::kBarriers, empty = full + 8 * C::kStages;
  const int tiles = tile_count<C>(args), blocks = args.k / C::kDepth;
  const int step = static_cast<int>(gridDim.x) / C::kCluster;
  const uint64_t x_first = operand_along_k(base + group * (C::kXBytes / 2));
  const uint64_t w_first =
      kTurned ? operand_across_k(base + C::kXBytes) : operand_along_k(base + C::kXBytes);
  const Turn<C::kHalf> turn{base + C::kStages * C::kStageBytes + (group * 4 + warp) * C::kWarpBytes,
                            lane};

  float sums[C::kPieces][C::kColumns / 2];
  int stage = 0;
  uint32_t parity = 0;
  uint32_t left = 0;
  bool begun = C::kSkew == 0;
  for (int tile = static_cast<int>(blockIdx.x) / C::kCluster; tile < tiles; tile += step) {
    const TilePlace at = tile_place<C>(tile, args, rank);
    if (!begun && group == 1) meet_named(1, 256);
    int last = 0;
    for (int block = 0; block < blocks; ++block) {
      const uint64_t x = x_first + static_cast<uint64_t>(stage * (C::kStageBytes >> 4));
      const uint64_t w = w_first + static_cast<uint64_t>(stage * (C::kStageBytes >> 4));
      wait(full + 8 * stage, parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < C::kDepth / 16; ++k) {
#pragma unroll
        for (int piece = 0; piece < C::kPieces; ++piece) {
          multiply<kTurned>(sums[piece], x + (piece * 64 * 128 + k * 32) / 16,
                            w + k * (kTurned ? 2048 : 32) / 16, block > 0 || k > 0);
        }
      }
      commit_products();
      await_products<1>();
      if (block > 0) release<C>(empty + 8 * last, lane);
      if (!begun && group == 0 && block == C::kSkew - 1) arrive_named(1, 256);
      last = stage;
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    begun = true;

    const int first_row = at.row * C::kRows + group * (C::kRows / 2) + warp * 16;
    if constexpr (C::kApart) {
      const uint32_t ready = full + 16 * C::kStages + 8 * (group * 4 + warp), taken = ready + 64;
      await_products<0>();
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) hold(sums[piece]);
      release<C>(empty + 8 * last, lane);
      wait(taken, left ^ 1);
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Turn<C::kHalf> to{turn.place + (2 * piece + half) * C::kTurnBytes, lane};
          to.write([&](int i) {
            const int sum = half * (C::kHalf / 2) + 2 * i;
            return pack(sums[piece][sum], sums[piece][sum + 1]);
          });
        }
      }
      if (lane == 0) arrive(ready);
      left ^= 1;
    } else if constexpr (kBackward) {
      const ZWalk<C> walk(args, first_row + turn.row(0),
                          int64_t{at.column} * C::kColumns + turn.column());
      ZPart z[2];
      walk.read(0, z[0]);
      await_products<0>();
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) hold(sums[piece]);
      release<C>(empty + 8 * last, lane);
      finish_backward<C, Form, F>(sums, args, walk, z, turn);
    } else {
      await_products<0>();
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) hold(sums[piece]);
      release<C>(empty + 8 * last, lane);
      finish_forward<C, Form, F>(sums, args, at, first_row, turn);
    }
  }
}

}  // namespace hopper

template <typename C, WgmmaForm Form, typename F>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
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
    const uint32_t full = base + C::kBarriers, empty = full + 8 * C::kStages;
    for (int stage = 0; stage < C::kStages; ++stage) {
      hopper::init_barrier(full + 8 * stage, 1);
      hopper::init_barrier(empty + 8 * stage, 8 * C::kCluster);
    }
    for (int i = 0; i < 16; ++i) hopper::init_barrier(full + 16 * C::kStages + 8 * i, 1);
    hopper::publish_barriers();
  }
  __syncthreads();
  if constexpr (C::kCluster > 1) hopper::meet_cluster();

  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    hopper::give_registers<C::kApart ? 136 : 40>();
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        hopper::produce<C, Form>(&x_map, &w_map, &z_map, args, base, rank);
      }
      __syncwarp();
    } else if constexpr (C::kApart) {
      hopper::finish_apart<C, Form, F>(args, base, rank);
    }
  } else {
    hopper::take_registers<C::kApart ? 184 : 232>();
    hopper::consume<C, Form, F>(args, base, rank, group - 1);
  }
  // The other block may still send here.
  if constexpr (C::kCluster > 1) hopper::meet_cluster();
#endif
}

}  // namespace ligature::cuda
