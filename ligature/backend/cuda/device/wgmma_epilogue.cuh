// What becomes of a tile's sums: they go through shared memory, so that each lane has 16 bytes of a
// row, and from there to memory, with the activation or its gradient on the way. Values are rounded
// to bfloat16 where the separate kernels would have written them, so the bits are the same.
#pragma once

#include <cuda_bf16.h>

#include "ligature/backend/cuda/device/activation.cuh"
#include "ligature/backend/cuda/device/cast.cuh"
#include "ligature/backend/cuda/device/wgmma_tile.cuh"

namespace ligature::cuda::hopper {

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
/// of a row in each lane, and of the rows below it step by step. Places are swizzled: neither side
/// meets a bank twice.
template <int W>
struct Turn {
  static constexpr int kChunks = W / 8;             // of 16 bytes in a row
  static constexpr int kSteps = kChunks * 16 / 32;  // rows of a lane

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

  __device__ __forceinline__ int row(int step) const { return lane / kChunks * kSteps + step; }
  __device__ __forceinline__ int column() const { return lane % kChunks * 8; }
  __device__ __forceinline__ uint4 read(int step) const {
    return load_shared(place + row(step) * (W * 2) + ((lane % kChunks) ^ (row(step) & 7)) * 16);
  }
};

/// Half of a warpgroup's columns, of the 16 rows whose sums this warp has.
template <typename C>
__device__ __forceinline__ void write_half(const Turn<C::kHalf>& turn,
                                           const float (&sums)[C::kColumns / 2], float factor,
                                           int half) {
  turn.write([&](int i) {
    const int sum = half * (C::kHalf / 2) + 2 * i;
    if constexpr (C::kCodes) return pack(sums[sum] * factor, sums[sum + 1] * factor);
    return pack(sums[sum], sums[sum + 1]);
  });
}

/// What the warps of an epilogue have of the activation's codes.
struct CodesState {
  float factor = 1.0f;
  uint32_t amax = 0;  // two magnitudes

  template <typename C>
  __device__ __forceinline__ void begin(const GatedCodes& codes) {
    if constexpr (C::kCast) factor = *codes.factor;
  }
  __device__ __forceinline__ void note(const uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      amax = max_pair<__nv_bfloat16>(amax, magnitudes<__nv_bfloat16>(pairs[i]));
    }
  }
  /// By whole warps; `first`: one thread of all.
  template <typename C>
  __device__ __forceinline__ void end(const GatedCodes& codes, bool first) const {
    if constexpr (C::kCodes) {
      const uint32_t largest = __reduce_max_sync(0xffffffffu, max(amax & 0xffffu, amax >> 16));
      if (codes.amax != nullptr && threadIdx.x % 32 == 0) {
        raise_amax(codes.amax, wide_bits<__nv_bfloat16>(largest));
      }
    }
    if constexpr (C::kCast) {
      if (first) *codes.scale = __fdiv_rn(1.0f, factor);
    }
  }
};

/// Codes of 8 rows and 8 units in each lane, whose neighbour by 16 lanes has the other 8 of 16
/// rows, to memory as 16 rows of a unit: each lane does four units. `to`: the first row of the
/// lane's first unit.
__device__ __forceinline__ void store_columns(const uint32_t (&codes)[8][2], uint8_t* to,
                                              int64_t stride, int lane) {
  uint32_t turned[2][2][4];  // units by fours, rows by fours, unit
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    turn_4(codes[0][half], codes[1][half], codes[2][half], codes[3][half], turned[half][0]);
    turn_4(codes[4][half], codes[5][half], codes[6][half], codes[7][half], turned[half][1]);
  }
  const bool lower = lane >= 16;
  if (lower) to += 4 * stride;
#pragma unroll
  for (int unit = 0; unit < 4; ++unit) {
    uint32_t own[2], other[2];
#pragma unroll
    for (int rows = 0; rows < 2; ++rows) {
      own[rows] = lower ? turned[1][rows][unit] : turned[0][rows][unit];
      const uint32_t sent = lower ? turned[0][rows][unit] : turned[1][rows][unit];
      other[rows] = __shfl_xor_sync(0xffffffffu, sent, 16);
    }
    *reinterpret_cast<uint4*>(to + unit * stride) =
        lower ? make_uint4(other[0], other[1], own[0], own[1])
              : make_uint4(own[0], own[1], other[0], other[1]);
  }
}

/// z and the activation, of 16 rows that lie in shared memory at `place`.
template <typename C, typename F>
__device__ __forceinline__ void finish_forward(uint32_t place, int lane, int first_row, int column,
                                               const WgmmaArgs& args, CodesState& state) {
  using T = Turn<C::kHalf>;
  constexpr int kAtOnce = 4;
  if (C::kCast && first_row >= args.rows) return;  // by sixteens, so all of them
  const T gates{place, lane}, linear{place + C::kTurnBytes, lane};
  const int64_t units = args.units, width = 2 * units;
  const int row = first_row + gates.row(0);
  const int64_t unit = int64_t{column} * C::kUnits + gates.column();
  __nv_bfloat16* z = static_cast<__nv_bfloat16*>(args.out) + row * width + unit;
  __nv_bfloat16* activated = static_cast<__nv_bfloat16*>(args.activated) + row * units + unit;
  const bool wants_z = !C::kCodes || args.out != nullptr;
  [[maybe_unused]] const bool by_rows = args.codes.rowwise != nullptr;
  [[maybe_unused]] uint32_t codes[T::kSteps][2];
#pragma unroll
  for (int first = 0; first < T::kSteps; first += kAtOnce) {
    uint4 of_gates[kAtOnce], of_linear[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      of_gates[i] = gates.read(first + i);
      of_linear[i] = linear.read(first + i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int below = first + i;
      const bool inside = row + below < args.rows;
      const uint4 g = of_gates[i], l = of_linear[i];
      store_passing(z + below * width, g, inside && wants_z);
      store_passing(z + below * width + units, l, inside && wants_z);
      const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, ls[4] = {l.x, l.y, l.z, l.w};
      uint32_t made[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        made[j] = pack(F::value(low_of(gs[j]), low_of(ls[j]), args.params),
                       F::value(high_of(gs[j]), high_of(ls[j]), args.params));
      }
      if constexpr (C::kCodes) state.note(made);
      if constexpr (C::kCast) {
        const uint2 of_row = encode_row<__nv_bfloat16, Element::E4M3>(made, state.factor);
        store_passing(args.codes.rowwise + (row + below) * units + unit, of_row, by_rows);
        codes[below][0] = of_row.x;
        codes[below][1] = of_row.y;
      } else {
        store_passing(activated + below * units, make_uint4(made[0], made[1], made[2], made[3]),
                      inside);
      }
    }
  }
  if constexpr (C::kCast) {
    if (args.codes.columnwise != nullptr) {
      store_columns(codes, args.codes.columnwise + unit * args.rows + first_row, args.rows, lane);
    }
  }
}

/// A few rows of z, of 8 gates and 8 linear units in each lane.
struct ZPart {
  static constexpr int kSteps = 4;
  uint4 gates[kSteps], linear[kSteps];
};

/// What the epilogue of a backward form reads and writes beside its sums: 16 rows of z, dz and the
/// activation, in parts. A lane writes dz just where it has read z before, and no other lane reads
/// there, so that dz may lie over z.
template <typename C>
struct ZWalk {
  using T = Turn<C::kHalf>;
  static constexpr int kPartsOfHalf = T::kSteps / ZPart::kSteps;
  static constexpr int kParts = 2 * kPartsOfHalf;

  const __nv_bfloat16* z;
  __nv_bfloat16 *dz, *activated;  // all three at the lane's first row and gate
  int64_t units;
  int rows;  // that exist from there on

  __device__ __forceinline__ ZWalk(const WgmmaArgs& args, int row, int64_t unit)
      : z(static_cast<const __nv_bfloat16*>(args.z) + row * (2 * int64_t{args.units}) + unit),
        dz(static_cast<__nv_bfloat16*>(args.out) + row * (2 * int64_t{args.units}) + unit),
        activated(static_cast<__nv_bfloat16*>(args.activated) + row * int64_t{args.units} + unit),
        units(args.units),
        rows(args.rows - row) {}

  static __device__ __forceinline__ constexpr int row(int part, int step) {
    return part % kPartsOfHalf * ZPart::kSteps + step;
  }
  static __device__ __forceinline__ constexpr int column(int part) {
    return part / kPartsOfHalf * C::kHalf;
  }

  __device__ __forceinline__ void read(int part, ZPart& to) const {
#pragma unroll
    for (int step = 0; step < ZPart::kSteps; ++step) {
      const __nv_bfloat16* from = z + row(part, step) * (2 * units) + column(part);
      const bool inside = row(part, step) < rows;
      to.gates[step] = load_passing(from, inside);
      to.linear[step] = load_passing(from + units, inside);
    }
  }
};

/// One part of it, with the gradients of the activation's result as `turn` holds them.
template <typename C, typename F>
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
    __nv_bfloat16* to = walk.dz + row * (2 * walk.units) + W::column(part);
    store_passing(to, make_uint4(to_gates[0], to_gates[1], to_gates[2], to_gates[3]), inside);
    store_passing(to + walk.units,
                  make_uint4(to_linear[0], to_linear[1], to_linear[2], to_linear[3]), inside);
    if constexpr (C::kBoth) {
      store_passing(walk.activated + row * walk.units + W::column(part),
                    make_uint4(to_activated[0], to_activated[1], to_activated[2], to_activated[3]),
                    inside);
    }
  }
}

/// All parts. `begin` is called when the first part of z is on its way, `turn_for(half)` before the
/// first part of each half of the columns: the gradients as they lie in shared memory.
template <typename C, typename F, typename Begin, typename TurnFor>
__device__ __forceinline__ void finish_backward(const WgmmaArgs& args, int first_row, int column,
                                                int lane, const Begin& begin,
                                                const TurnFor& turn_for) {
  using W = ZWalk<C>;
  const Turn<C::kHalf> any{0, lane};
  const W walk(args, first_row + any.row(0), int64_t{column} * C::kUnits + any.column());
  ZPart z[2];
  walk.read(0, z[0]);
  begin();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Turn<C::kHalf> turn = turn_for(half);
#pragma unroll
    for (int i = 0; i < W::kPartsOfHalf; ++i) {
      const int part = half * W::kPartsOfHalf + i;
      if (part + 1 < W::kParts) walk.read(part + 1, z[(part + 1) % 2]);
      finish_part<C, F>(part, z[part % 2], args, walk, turn);
    }
  }
}

}  // namespace ligature::cuda::hopper
