// One value of a normalization. The roundings are named, so that every kernel that computes it
// gives the same bits.
#pragma once

namespace ligature::cuda {

struct Statistics {
  float mean;  // 0 unless centered
  float rstd;
};

__device__ __forceinline__ float gamma_of(float w, bool zero_centered) {
  return zero_centered ? __fadd_rn(w, 1.0f) : w;
}

/// (x - mean) * rstd.
__device__ __forceinline__ float standardized(float x, Statistics s) {
  return __fmul_rn(__fsub_rn(x, s.mean), s.rstd);
}

/// The norm's y before it is rounded; `beta` is 0 where there is none.
__device__ __forceinline__ float normalized(float x, Statistics s, float gamma, float beta) {
  return __fmaf_rn(standardized(x, s), gamma, beta);
}

__device__ __forceinline__ float inverse_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }

}  // namespace ligature::cuda
