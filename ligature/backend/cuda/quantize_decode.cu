// Values from codes: dequantization, and the operand of a matrix product, which leaves some of the
// factors out. A thread decodes 8 values, all of one block.
#include "ligature/backend/cuda/device/float4.cuh"
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 8;

struct Factors {
  float block, upper;
};

/// By what the element at [row, column] is multiplied, one factor after the other.
__device__ __forceinline__ Factors factors_at(const DecodePlan& plan, int64_t row, int64_t column) {
  const Format& format = plan.format;
  const auto at = [&](int size) {
    return (format.block_2d ? row / size : row) * plan.scale_stride +
           column / size * plan.scale_step;
  };
  switch (format.scaling) {
    case Scaling::Delayed:
    case Scaling::Current:
      return {plan.operand ? 1.0f : *static_cast<const float*>(plan.scale), 1.0f};
    case Scaling::Block:
      if (plan.operand && !format.power_of_2_scales) return {1.0f, 1.0f};
      return {static_cast<const float*>(plan.scale)[at(128)], 1.0f};
    case Scaling::MX:
      return {decode_e8m0(static_cast<const uint8_t*>(plan.scale)[at(32)]), 1.0f};
    case Scaling::NV:
      break;
  }
  const float block =
      decode_fp8<Element::E4M3>(static_cast<const uint8_t*>(plan.scale)[at(kNvBlock)]);
  if (plan.operand) return {block, 1.0f};
  return {block, nv_upper(plan.amax[format.row_scaled ? row : 0],
                          format.four_over_six != FourOverSix::None)};
}

// `vectors`: rows are whole parts of 8. Divisions of 32 bits where they suffice, which are much
// faster.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    decode_parts(const __grid_constant__ DecodePlan plan, T* out, int64_t parts) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (part >= parts) return;
  const Element element = plan.format.element;
  uint2 codes;
  if (element == Element::E2M1) {
    codes = make_uint2(reinterpret_cast<const uint32_t*>(plan.data)[part], 0);
  } else {
    codes = reinterpret_cast<const uint2*>(plan.data)[part];
  }
  const int64_t across = plan.columns / kValues;
  int64_t row;
  if (parts <= 0xffffffffll) {
    row = static_cast<uint32_t>(part) / static_cast<uint32_t>(across);
  } else {
    row = part / across;
  }
  const Factors f = factors_at(plan, row, (part - row * across) * kValues);
  float values[kValues];
  if (element == Element::E2M1) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float product = __fmul_rn(decode_fp4(codes.x >> (4 * i) & 15u), f.block);
      values[i] = __fmul_rn(product, f.upper);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const uint32_t word = i < 4 ? codes.x : codes.y;
      const float2 pair = decode_fp8_pair(word >> (i % 4 * 8) & 0xffffu, element);
      values[i] = __fmul_rn(pair.x, f.block);
      values[i + 1] = __fmul_rn(pair.y, f.block);
    }
  }
  if constexpr (sizeof(T) == 4) {
    float4* to = reinterpret_cast<float4*>(out + part * kValues);
    to[0] = make_float4(values[0], values[1], values[2], values[3]);
    to[1] = make_float4(values[4], values[5], values[6], values[7]);
  } else {
    store<kValues>(out + part * kValues, values);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    decode_singles(const __grid_constant__ DecodePlan plan, T* out) {
  const int64_t n = plan.rows * plan.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int64_t row = i / plan.columns, column = i - row * plan.columns;
    const Factors f = factors_at(plan, row, column);
    float value;
    if (plan.format.element == Element::E2M1) {
      const uint32_t pair = plan.data[row * ((plan.columns + 1) / 2) + column / 2];
      const uint32_t code = column % 2 == 0 ? pair & 15u : pair >> 4;
      value = __fmul_rn(__fmul_rn(decode_fp4(code), f.block), f.upper);
    } else {
      value = __fmul_rn(decode_fp8_pair(plan.data[i], plan.format.element).x, f.block);
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
      const int64_t parts = n / kValues;
      decode_parts<T>
          <<<static_cast<unsigned>((parts + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
              plan, to, parts);
    } else {
      const int64_t blocks = (n + kThreads - 1) / kThreads;
      decode_singles<T>
          <<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), kThreads, 0, stream>>>(plan,
                                                                                            to);
    }
  });
}

}  // namespace ligature::cuda
