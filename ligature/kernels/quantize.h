// Casts to and from the low-precision formats; docs/low_precision.md defines their bits. What a
// kernel gives for one orientation of a matrix [rows, columns]:
//
//   data    uint8 [rows, columns]; for FP4 two values per byte, the even one in the low half,
//           [rows, ceil(columns / 2)]
//   scale   the factors by which data is multiplied to get values back:
//           per tensor  float [1]
//           Block       float [rows, ceil(columns / 128)], or [ceil(rows / 128), ...] with block_2d
//           MX          uint8 (E8M0) [rows, ceil(columns / 32)], or [ceil(rows / 32), ...]
//           NV          uint8 (E4M3) [rows, ceil(columns / 16)], or [ceil(rows / 16), ...]
//           On a GPU those of 1x128 blocks lie column after column, as its products read them.
//   amax    NV only: float [1] (or [rows] with row_scaled), of what was quantized; the factor above
//           the blocks is amax / (6 * 448), or amax / (6 * 256) with four_over_six,
//           unless scales_to_448
//
// A column-wise result is the same of the transposed matrix. With `hadamard` its columns (the
// matrix's rows) are filled up with zeros to a multiple of 16, since a transformed zero is none.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "ligature/format/format.h"
#include "ligature/kernels/activation.h"

namespace ligature::kernels {

using at::Tensor;

struct QuantizedMatrix {
  Tensor data;
  Tensor scale;
  Tensor amax;

  bool defined() const { return data.defined(); }
};

struct QuantizedPair {
  QuantizedMatrix rowwise;
  QuantizedMatrix columnwise;
};

struct QuantizeArgs {
  Format format;
  bool rowwise = true;
  bool columnwise = false;
  Tensor scale;  ///< Delayed: float [1], the factor that values are multiplied by
  Tensor amax;   ///< Delayed: float [1], raised to the largest magnitude seen; may be undefined
  /// Delayed, above 0: instead of by `scale`, values are multiplied so that the amax of the finite
  /// ones becomes this; by 1 where it is 0.
  float fit_to = 0;
  /// Current and NV: called with the float tensor of amax before it is used, to share it with other
  /// processes; may be empty.
  std::function<void(Tensor&)> reduce_amax;
  uint64_t seed = 0;  ///< of stochastic rounding
  uint64_t offset = 0;
};

/// `x`: at least one dimension, float32, bfloat16 or float16, contiguous.
QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args);

/// Only what Calibration needs: raises `amax` [1] to the largest magnitude of x.
void update_amax(const Tensor& x, Tensor& amax);
/// The same for FP8 data with one scale: to the amax of what it stands for, without NaN.
void update_amax(const QuantizedMatrix& q, const Format& format, int64_t columns, Tensor& amax);

/// The matrix's values again, [rows, columns], rounded to `dtype` once. `columns`: of the matrix,
/// since FP4 data cannot tell. A Hadamard transform is not undone here.
Tensor dequantize(const QuantizedMatrix& q, const Format& format, int64_t columns,
                  at::ScalarType dtype);

/// Of a tensor of these sizes, from row-wise data where there is some; undoes a Hadamard transform.
Tensor dequantize(const QuantizedPair& parts, const Format& format, at::IntArrayRef sizes,
                  at::ScalarType dtype);

/// The operand of a matrix product: the elements times their block's factor, without any float
/// factor (per tensor, float Block scales that are no powers of two, the one above NV's blocks).
/// Exact in bfloat16.
Tensor expand(const QuantizedMatrix& q, const Format& format, int64_t columns,
              at::ScalarType dtype);

/// Row-wise data from column-wise data or the other way round, where format.orientations_agree().
QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns);

/// x in groups of 16 along its last dimension times the signed Hadamard matrix / 4 (its own
/// inverse up to the signs: `inverse` undoes it). The last group is filled up with zeros.
Tensor hadamard(const Tensor& x, bool inverse = false);

// A kernel and the cast of its result in one: the same bits as the two after each other, without
// the result in high precision. `out_dtype` is what it would have been rounded to.

struct NormQuantized {
  QuantizedPair y;
  Tensor mean;  // undefined for RMSNorm
  Tensor rstd;
};

NormQuantized layer_norm_forward_quantize(const Tensor& x, const Tensor& w, const Tensor& b,
                                          double eps, bool zero_centered_gamma,
                                          at::ScalarType out_dtype, const QuantizeArgs& args);

NormQuantized rms_norm_forward_quantize(const Tensor& x, const Tensor& w, double eps,
                                        bool zero_centered_gamma, at::ScalarType out_dtype,
                                        const QuantizeArgs& args);

QuantizedPair activation_forward_quantize(const Tensor& x, const ActivationSpec& spec,
                                          const Tensor& scales, const QuantizeArgs& args);

struct ActivationBackwardQuantized {
  QuantizedPair dx;
  Tensor dscales;
  Tensor dbias;
};

ActivationBackwardQuantized activation_backward_quantize(const Tensor& dy, const Tensor& x,
                                                         const ActivationSpec& spec,
                                                         const Tensor& scales, bool need_dscales,
                                                         bool need_dbias, const QuantizeArgs& args);

}  // namespace ligature::kernels
