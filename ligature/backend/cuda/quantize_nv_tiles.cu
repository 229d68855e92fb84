// NVFP4 with blocks of 16 in a line, row-wise or both orientations at once and from registers, for
// the sizes and options that models train with; quantize_nv.cu has the rest. A thread has 8 rows of
// 8 columns: two lanes side by side have a block of a row, two lanes 16 apart one of a column.
#include "ligature/backend/cuda/device/cast_tiles.cuh"
#include "ligature/backend/cuda/device/draws.cuh"
#include "ligature/backend/cuda/device/float4.cuh"

namespace ligature::cuda {

bool launch_quantize_nv_tiles(const void* x, Type type, const QuantizePlan& plan, Stream stream);

namespace {

__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

/// Of two pairs; a NaN wins.
template <typename T>
__device__ __forceinline__ uint32_t max_pair_nan(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

/// Magnitudes' codes of 8 products, the first in the lowest bits. A sum just below 2^24 is rounded
/// to whole numbers and one above to even ones, and its bits go on counting: the first sum has
/// E2M1's steps up to 2, the second those beyond, and the code is the lesser.
__device__ __forceinline__ uint32_t encode_8_fp4(const float (&p)[8]) {
  constexpr uint32_t zero = 0x4b7ffffau;  // 2^24 - 6
  uint32_t codes = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const uint32_t half_steps = __float_as_uint(__fmaf_rn(fabsf(p[i]), 2.0f, 16777210.0f));
    const uint32_t steps = __float_as_uint(__fadd_rn(fabsf(p[i]), 16777212.0f));
    codes = codes * 16u + min(min(half_steps, steps), zero + 7u);
  }
  return codes - zero * 0x11111111u;
}

/// With their signs; `index` is that of the first in the orientation's matrix.
__device__ __forceinline__ uint32_t encode_8_random(const float (&p)[8], uint64_t index,
                                                    const Draws& draws) {
  uint32_t codes = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t words[4];
    philox(draws.first + index / 4 + h, draws.stream, draws.seed, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= encode_fp4(p[4 * h + i], words[i]) << (16 * h + 4 * i);
  }
  return codes;
}

/// The factor above the blocks' own, and what it takes to divide by it.
struct Upper {
  float value, inverse;
  /// Far from the ends of float's range: what is too small for quotient_by() has the code 0.
  __device__ __forceinline__ bool is_plain() const { return value > 0x1p-60f && value < 0x1p60f; }
};

/// The quotient as a division rounds it, given the divisor's reciprocal.
__device__ __forceinline__ float quotient_by(float a, float b, float inverse) {
  const float q = __fmul_rn(a, inverse);
  return __fmaf_rn(__fmaf_rn(-b, q, a), inverse, q);
}

static __device__ __noinline__ float2 divided_pair(float low, float high, float upper) {
  return make_float2(rounded_quotient(rounded_quotient(low, 6.0f), upper),
                     rounded_quotient(rounded_quotient(high, 6.0f), upper));
}

/// Two blocks' E4M3 codes of scales in the lower bytes, from the bits of their largest magnitudes;
/// 0x7f for NaN.
__device__ __forceinline__ uint32_t scale_pair(uint32_t low, uint32_t high, const Upper& upper) {
  const float a = __uint_as_float(low), b = __uint_as_float(high);
  float2 scales;
  if (upper.is_plain()) {
    constexpr float sixth = 1.0f / 6.0f;
    scales.x = quotient_by(quotient_by(a, 6.0f, sixth), upper.value, upper.inverse);
    scales.y = quotient_by(quotient_by(b, 6.0f, sixth), upper.value, upper.inverse);
  } else {
    scales = divided_pair(a, b, upper.value);
  }
  return encode_fp8_pair(scales.x, scales.y, Element::E4M3);
}

/// Four, from the magnitudes in two words.
template <typename T>
__device__ __forceinline__ uint32_t scales_of(const uint32_t* pairs, const Upper& upper) {
  const auto two = [&](uint32_t pair) {
    return scale_pair(wide_bits<T>(pair & 0xffffu), wide_bits<T>(pair >> 16), upper);
  };
  return two(pairs[0]) | two(pairs[1]) << 16;
}

/// As forget() of memory.cuh.
__device__ __forceinline__ void forget_words(uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(words[i]));
}

struct NvShared {
  float upper[2];
  float inverse[2][128];  // by a scale's code; below zero: the block has a NaN
  alignas(16) uint8_t scales[2][kTile][8];
  alignas(16) uint32_t turned[kTile * kTile / 8];
};

template <typename T>
__device__ __forceinline__ void read_words(const QuantizePlan& plan, const T* x, TilePlace place,
                                           int across, int down, Words& v) {
  const T* from = x + (place.row + down * kSide) * plan.columns + place.column + across * kSide;
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    const uint4 w = read_16(from + k * plan.columns);
    v[k][0] = w.x;
    v[k][1] = w.y;
    v[k][2] = w.z;
    v[k][3] = w.w;
  }
}

/// The signed Hadamard transform / 4 of a column whose other 8 rows the lane 16 apart has; and the
/// largest magnitude of the lane's own.
__device__ __forceinline__ uint32_t transform(float (&q)[8], bool lower) {
  constexpr uint32_t minus = 0xd7e8u;  // as hadamard_16
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    q[k] = ((lower ? minus : minus >> 8) >> k & 1u) != 0 ? -q[k] : q[k];
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int at = pair / step * 2 * step + pair % step;
      const float a = q[at], b = q[at + step];
      q[at] = __fadd_rn(a, b);
      q[at + step] = __fadd_rn(a, -b);
    }
  }
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    const float other = __shfl_xor_sync(0xffffffffu, q[k], 16);
    q[k] = __fmul_rn(lower ? __fadd_rn(q[k], other) : __fadd_rn(other, -q[k]), 0.25f);
    largest = max(largest, __float_as_uint(q[k]) & kMagnitudeBits);
  }
  return largest;
}

/// To nearest, or by random words: of the seed, whose keys the compiler keeps out of the threads'
/// registers, or of the generator.
enum class Rounding : uint8_t { Nearest, Seeded, Drawn };

template <Rounding kRounding>
__device__ __forceinline__ Draws draws_for(const QuantizePlan& plan, uint32_t stream) {
  return kRounding == Rounding::Drawn ? generator_draws(plan, stream) : seeded_draws(plan, stream);
}

template <typename T, Rounding kRounding, bool kHadamard>
__global__ void __launch_bounds__(kCastThreads, kRounding == Rounding::Nearest ? 4 : 2)
    nv_tiles(const __grid_constant__ QuantizePlan plan, const T* x) {
  constexpr bool kStochastic = kRounding != Rounding::Nearest;
  __shared__ NvShared shared;
  const int lane = threadIdx.x % 32, across = threadIdx.x % 16, down = threadIdx.x / 16;
  const TilePlace place = last_first();
  Words v;
  read_words(plan, x, place, across, down, v);
  const bool columnwise = plan.columnwise.data != nullptr;
  {
    const int which = threadIdx.x / 128, code = threadIdx.x % 128;
    const float* amax = which == 0 || !columnwise ? plan.rowwise.amax : plan.columnwise.amax;
    const float upper = nv_upper(amax[0], false);
    const float f = rounded_product(decode_fp8<Element::E4M3>(code), upper);
    const float inverse = rounded_quotient(1.0f, f);
    if (code == 0) shared.upper[which] = upper;
    shared.inverse[which][code] = code == 127                         ? -1.0f
                                  : f == 0.0f                         ? 0.0f
                                  : bits_of(inverse) == kInfinityBits ? float_of(kLargestBits)
                                                                      : inverse;
  }
  __syncthreads();
  constexpr int kOne = 0x38;  // the code of 1
  const Upper upper_row{shared.upper[0], shared.inverse[0][kOne]};
  const Upper upper_column{shared.upper[1], shared.inverse[1][kOne]};
  uint32_t rows[4], columns[4] = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < kSide; k += 2) {
    uint32_t largest[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t pair = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t m = magnitudes<T>(v[k + u][i]);
        pair = max_pair_nan<T>(pair, m);
        if constexpr (!kHadamard) columns[i] = max_pair_nan<T>(columns[i], m);
      }
      largest[u] = pair;
    }
    rows[k / 2] = __vmaxu2(__byte_perm(largest[0], largest[1], 0x5410),
                           __byte_perm(largest[0], largest[1], 0x7632));
  }
  // Each of a block's two lanes makes the scales of four rows.
  halve<4>(rows, 1);
  const uint32_t own = scales_of<T>(rows, upper_row);
  {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, own, 1);
    const uint32_t scales[2] = {(lane & 1) != 0 ? other : own, (lane & 1) != 0 ? own : other};
    uint8_t* to = plan.rowwise.data + (place.row + down * kSide) * plan.rowwise.stride +
                  (place.column + across * kSide) / 2;
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const float factor = shared.inverse[0][scales[k / 4] >> (k % 4 * 8) & 0xffu];
      float p[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[2 * i] = __fmul_rn(low_value<T>(v[k][i]), factor);
        p[2 * i + 1] = __fmul_rn(high_value<T>(v[k][i]), factor);
      }
      uint32_t codes;
      if constexpr (kStochastic) {
        codes =
            encode_8_random(p,
                            static_cast<uint64_t>((place.row + down * kSide + k) * plan.columns +
                                                  place.column + across * kSide),
                            draws_for<kRounding>(plan, 0));
      } else {
        const uint32_t a = select_bytes(v[k][0], v[k][1], 0xfbd9);
        const uint32_t b = select_bytes(v[k][2], v[k][3], 0xfbd9);
        codes = encode_8_fp4(p) | (select_bytes(a, b, 0x5410) & 0x08080808u) |
                (select_bytes(a, b, 0x7632) & 0x80808080u);
      }
      *reinterpret_cast<uint32_t*>(to + k * plan.rowwise.stride) = factor < 0.0f ? 0u : codes;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      shared.scales[0][down * kSide + (lane & 1) * 4 + r][across / 2] =
          static_cast<uint8_t>(own >> (8 * r));
    }
  }
  const auto write_scales = [&](bool turn) {
    const int t = threadIdx.x % kTile;
    const QuantizeOutput& out = turn ? plan.columnwise : plan.rowwise;
    const int64_t line = (turn ? place.column : place.row) + t;
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(out.scale) + line * out.scale_stride +
                              (turn ? place.row : place.column) / 16) =
        *reinterpret_cast<const uint2*>(shared.scales[turn ? 1 : 0][t]);
  };
  if (!columnwise) {
    __syncthreads();
    if (threadIdx.x < kTile) write_scales(false);
    return;
  }
#pragma unroll
  for (int k = 0; k < kSide; ++k) forget_words(v[k]);
  const bool lower = (lane & 16) == 0;
  [[maybe_unused]] uint32_t scales_column[2] = {0, 0};
  if constexpr (!kHadamard) {
    halve<4>(columns, 16);
    const uint32_t mine = scales_of<T>(columns, upper_column);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 16);
    scales_column[0] = lower ? mine : other;
    scales_column[1] = lower ? other : mine;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      shared.scales[1][across * kSide + (lower ? 0 : 4) + r][down / 2] =
          static_cast<uint8_t>(mine >> (8 * r));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float p[2][8];
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      p[0][k] = low_value<T>(v[k][i]);
      p[1][k] = high_value<T>(v[k][i]);
    }
    float factor[2];
    if constexpr (kHadamard) {
      const uint32_t largest[2] = {transform(p[0], lower), transform(p[1], lower)};
      const uint32_t sent = lower ? largest[1] : largest[0];
      const uint32_t block =
          max(lower ? largest[0] : largest[1], __shfl_xor_sync(0xffffffffu, sent, 16));
      const uint32_t code = scale_pair(block, 0u, upper_column) & 0xffu;
      shared.scales[1][across * kSide + 2 * i + (lower ? 0 : 1)][down / 2] =
          static_cast<uint8_t>(code);
      const uint32_t theirs = __shfl_xor_sync(0xffffffffu, code, 16);
      factor[0] = shared.inverse[1][lower ? code : theirs];
      factor[1] = shared.inverse[1][lower ? theirs : code];
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        factor[c] = shared.inverse[1][scales_column[i / 2] >> ((2 * i + c) % 4 * 8) & 0xffu];
      }
    }
    [[maybe_unused]] uint32_t even[2], odd[2];  // rows' signs
    if constexpr (!kStochastic && !kHadamard) {
      const uint32_t a = select_bytes(v[0][i], v[2][i], 0xfbd9);
      const uint32_t b = select_bytes(v[4][i], v[6][i], 0xfbd9);
      const uint32_t c = select_bytes(v[1][i], v[3][i], 0xfbd9);
      const uint32_t d = select_bytes(v[5][i], v[7][i], 0xfbd9);
      even[0] = select_bytes(a, b, 0x5410);
      even[1] = select_bytes(a, b, 0x7632);
      odd[0] = select_bytes(c, d, 0x5410);
      odd[1] = select_bytes(c, d, 0x7632);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = 2 * i + c;
      float q[8];
#pragma unroll
      for (int k = 0; k < kSide; ++k) q[k] = __fmul_rn(p[c][k], factor[c]);
      uint32_t codes;
      if constexpr (kStochastic) {
        codes =
            encode_8_random(q,
                            static_cast<uint64_t>((place.column + across * kSide + j) * plan.rows +
                                                  place.row + down * kSide),
                            draws_for<kRounding>(plan, 1));
      } else if constexpr (kHadamard) {
        codes = encode_8_fp4(q);
#pragma unroll
        for (int k = 0; k < kSide; ++k) {
          codes |= (__float_as_uint(q[k]) >> 31) << (4 * k + 3);
        }
      } else {
        codes = encode_8_fp4(q) | (even[c] & 0x08080808u) | (odd[c] & 0x80808080u);
      }
      const int column = (across * kSide + j) ^ (across >> 3);
      shared.turned[column * 16 + (down ^ (across % 8 * 2))] = factor[c] < 0.0f ? 0u : codes;
    }
  }
  __syncthreads();
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = threadIdx.x / 4 + 64 * i, group = column / kSide, shift = group % 8 * 2;
    uint4 w = reinterpret_cast<const uint4*>(
        shared.turned)[(column ^ (group >> 3)) * 4 + (q ^ (shift >> 2))];
    if ((shift & 2) != 0) w = make_uint4(w.z, w.w, w.x, w.y);
    *reinterpret_cast<uint4*>(plan.columnwise.data +
                              (place.column + column) * plan.columnwise.stride + place.row / 2 +
                              q * 16) = w;
  }
  write_scales(threadIdx.x >= kTile);
}

/// Over a block, held at the largest float; `warps`: of a warp each.
__device__ __forceinline__ void raise_held(uint32_t bits, uint32_t* warps, float* amax) {
  const uint32_t largest = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) all = max(all, warps[w]);
  raise_amax(amax, min(all, kLargestBits));
}

/// Largest magnitudes, without NaN, of the values and of the transformed columns.
template <typename T>
__global__ void __launch_bounds__(kCastThreads, 4)
    hadamard_amax(const __grid_constant__ QuantizePlan plan, const T* x) {
  __shared__ uint32_t warps[2][8];
  const int across = threadIdx.x % 16, down = threadIdx.x / 16;
  const TilePlace place{static_cast<int64_t>(blockIdx.y) * kTile,
                        static_cast<int64_t>(blockIdx.x) * kTile};
  Words v;
  read_words(plan, x, place, across, down, v);
  const bool lower = (threadIdx.x & 16) == 0;
  uint32_t pair = 0, turned = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float p[2][8];
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      pair = max_pair<T>(pair, magnitudes<T>(v[k][i]));
      p[0][k] = low_value<T>(v[k][i]);
      p[1][k] = high_value<T>(v[k][i]);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      // A NaN among them hides the numbers: look again.
      uint32_t largest = transform(p[c], lower);
      if (largest > kInfinityBits) {
        largest = 0;
#pragma unroll
        for (int k = 0; k < kSide; ++k) {
          const uint32_t bits = __float_as_uint(p[c][k]) & kMagnitudeBits;
          if (bits <= kInfinityBits) largest = max(largest, bits);
        }
      }
      turned = max(turned, largest);
    }
  }
  raise_held(wide_bits<T>(max(pair & 0xffffu, pair >> 16)), warps[0], plan.rowwise.amax);
  raise_held(turned, warps[1], plan.columnwise.amax);
}

template <typename T, Rounding kRounding>
auto kernel_of(bool hadamard) {
  return hadamard ? nv_tiles<T, kRounding, true> : nv_tiles<T, kRounding, false>;
}

template <typename T>
void launch(const void* given, const QuantizePlan& plan, Stream stream) {
  const T* x = static_cast<const T*>(given);
  const dim3 grid(static_cast<unsigned>(plan.columns / kTile),
                  static_cast<unsigned>(plan.rows / kTile));
  const bool hadamard = plan.format.hadamard;
  if (plan.find_amax) {
    hadamard_amax<T><<<grid, kCastThreads, 0, stream>>>(plan, x);
    return;
  }
  const auto kernel = !plan.format.stochastic_rounding ? kernel_of<T, Rounding::Nearest>(hadamard)
                      : plan.generator.seed_at == nullptr ? kernel_of<T, Rounding::Seeded>(hadamard)
                                                          : kernel_of<T, Rounding::Drawn>(hadamard);
  kernel<<<grid, kCastThreads, 0, stream>>>(plan, x);
}

}  // namespace

/// False where it serves the plan not.
bool launch_quantize_nv_tiles(const void* x, Type type, const QuantizePlan& plan, Stream stream) {
  const Format& format = plan.format;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (type == Type::Float32 || plan.rowwise.data == nullptr || plan.rows == 0 ||
      plan.columns == 0 || plan.rows % kTile != 0 || plan.columns % kTile != 0 ||
      plan.rows / kTile > 65535 || format.block_2d || format.row_scaled ||
      format.four_over_six != FourOverSix::None || (plan.find_amax && !format.hadamard) ||
      !aligned(x) || !aligned(plan.rowwise.data) || !aligned(plan.columnwise.data)) {
    return false;
  }
  type == Type::BFloat16 ? launch<__nv_bfloat16>(x, plan, stream) : launch<__half>(x, plan, stream);
  return true;
}

}  // namespace ligature::cuda
