// Values from codes: dequantization, and the operand of a matrix product, which leaves some of the
// factors out. A thread decodes 8 values of a few rows each; 8 values lie in one block.
#include "ligature/backend/cuda/device/float4.cuh"
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 8;
constexpr int kLanes = 32;  // across
constexpr int kRows = 4;    // of a thread
constexpr int kRowsApart = kThreads / kLanes;

/// Elements along a block as a power of two; 0 with one factor per tensor.
__device__ __forceinline__ int block_log(const Format& format) {
  switch (format.scaling) {
    case Scaling::Block:
      return 7;
    case Scaling::MX:
      return 5;
    case Scaling::NV:
      return 4;
    default:
      return 0;
  }
}

/// Where the factors of the blocks in a column of the matrix lie.
struct ScalePlace {
  int log, down;  // of the blocks' width and height
  int64_t offset;
  __device__ __forceinline__ ScalePlace(const DecodePlan& plan, int64_t column)
      : log(block_log(plan.format)),
        down(plan.format.block_2d ? log : 0),
        offset((column >> log) * plan.scale_step) {}
  __device__ __forceinline__ int64_t at(const DecodePlan& plan, int64_t row) const {
    return (row >> down) * plan.scale_stride + offset;
  }
};

/// What lies in memory, from which block_factor() makes the first factor.
__device__ __forceinline__ uint32_t read_scale(const DecodePlan& plan, int64_t at) {
  const Format& format = plan.format;
  if (format.scaling == Scaling::MX || format.scaling == Scaling::NV) {
    return static_cast<const uint8_t*>(plan.scale)[at];
  }
  if (plan.operand && !(format.scaling == Scaling::Block && format.power_of_2_scales)) {
    return __float_as_uint(1.0f);
  }
  return static_cast<const uint32_t*>(plan.scale)[format.scaling == Scaling::Block ? at : 0];
}

__device__ __forceinline__ float block_factor(const DecodePlan& plan, uint32_t scale) {
  if (plan.format.scaling == Scaling::NV) return decode_fp8_pair(scale, Element::E4M3).x;
  return plan.format.scaling == Scaling::MX ? decode_e8m0(scale) : __uint_as_float(scale);
}

/// NV: the second factor.
__device__ __forceinline__ float upper_factor(const DecodePlan& plan, int64_t row) {
  if (plan.operand) return 1.0f;
  return nv_upper(plan.amax[plan.format.row_scaled ? row : 0],
                  plan.format.four_over_six != FourOverSix::None && !plan.format.scales_to_448);
}

/// The values of 8 E2M1 codes times both factors. A code's bits are those of a float16, 2^-14 times
/// the value, and the product with an E4M3 number is exact there too.
__device__ __forceinline__ void decode_8_fp4(uint32_t codes, float block, float upper,
                                             float (&values)[kValues]) {
  const __half2 factor = __float2half2_rn(__fmul_rn(block, 64.0f));
  const float rest = __fmul_rn(upper, 256.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t on_top = codes << (12 - 4 * i);  // codes i and i + 4
    const uint32_t word = ((on_top >> 3) & 0x0e000e00u) | (on_top & 0x80008000u);
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    const __half2 product = __hmul2_rn(pair, factor);
    values[i] = __fmul_rn(__low2float(product), rest);
    values[i + 4] = __fmul_rn(__high2float(product), rest);
  }
}

// Rows are whole parts of 8.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    decode_parts(const __grid_constant__ DecodePlan plan, T* out, uint32_t tiles_across) {
  const int64_t column =
      (int64_t{blockIdx.x % tiles_across} * kLanes + threadIdx.x % kLanes) * kValues;
  if (column >= plan.columns) return;
  const int64_t first =
      int64_t{blockIdx.x / tiles_across} * (kRows * kRowsApart) + threadIdx.x / kLanes;
  const int64_t left = plan.rows - first;
  const Element element = plan.format.element;
  const bool fp4 = element == Element::E2M1;
  const int64_t at = first * plan.columns + column;
  const uint8_t* from = plan.data + (at >> (fp4 ? 1 : 0));
  const int64_t step = plan.columns * kRowsApart >> (fp4 ? 1 : 0);
  const ScalePlace place(plan, column);
  uint2 codes[kRows];
  uint32_t scales[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u * kRowsApart >= left) continue;
    if (fp4) {
      codes[u].x = *reinterpret_cast<const uint32_t*>(from + u * step);
    } else {
      codes[u] = *reinterpret_cast<const uint2*>(from + u * step);
    }
    scales[u] = read_scale(plan, place.at(plan, first + u * kRowsApart));
  }
  float upper = 1.0f;
  if (fp4 && left > 0) upper = upper_factor(plan, first);
  T* to = out + at;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u * kRowsApart >= left) return;
    const float block = block_factor(plan, scales[u]);
    float values[kValues];
    if (fp4) {
      if (u > 0 && plan.format.row_scaled) upper = upper_factor(plan, first + u * kRowsApart);
      decode_8_fp4(codes[u].x, block, upper, values);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        const uint32_t word = i < 4 ? codes[u].x : codes[u].y;
        const float2 pair = decode_fp8_pair(word >> (i % 4 * 8) & 0xffffu, element);
        values[i] = __fmul_rn(pair.x, block);
        values[i + 1] = __fmul_rn(pair.y, block);
      }
    }
    store<kValues>(to + u * kRowsApart * plan.columns, values);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    decode_singles(const __grid_constant__ DecodePlan plan, T* out) {
  const int64_t n = plan.rows * plan.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int64_t row = i / plan.columns, column = i - row * plan.columns;
    const float block =
        block_factor(plan, read_scale(plan, ScalePlace(plan, column).at(plan, row)));
    float value;
    if (plan.format.element == Element::E2M1) {
      const uint32_t pair = plan.data[row * ((plan.columns + 1) / 2) + column / 2];
      const uint32_t code = column % 2 == 0 ? pair & 15u : pair >> 4;
      value = __fmul_rn(__fmul_rn(decode_fp4(code), block), upper_factor(plan, row));
    } else {
      value = __fmul_rn(decode_fp8_pair(plan.data[i], plan.format.element).x, block);
    }
    out[i] = from_float<T>(value);
  }
}

}  // namespace

void launch_decode(const DecodePlan& plan, void* out, Type out_type, Stream stream) {
  const int64_t n = plan.rows * plan.columns;
  if (n == 0) return;
  const bool vectors = plan.columns % kValues == 0 &&
                       reinterpret_cast<uintptr_t>(plan.data) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(out) % 16 == 0;
  with_type(out_type, [&](auto zero) {
    using T = decltype(zero);
    T* to = static_cast<T*>(out);
    if (vectors) {
      constexpr int64_t kWide = kLanes * kValues, kHigh = kRows * kRowsApart;
      const int64_t across = (plan.columns + kWide - 1) / kWide;
      const int64_t down = (plan.rows + kHigh - 1) / kHigh;
      decode_parts<T><<<static_cast<unsigned>(across * down), kThreads, 0, stream>>>(
          plan, to, static_cast<uint32_t>(across));
    } else {
      const int64_t blocks = (n + kThreads - 1) / kThreads;
      decode_singles<T>
          <<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), kThreads, 0, stream>>>(plan,
                                                                                            to);
    }
  });
}

}  // namespace ligature::cuda
