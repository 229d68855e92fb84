// The CPU backend's kernels of low precision, called by kernels/quantize.cpp.
#pragma once

#include "ligature/backend/cpu/row_source.h"
#include "ligature/kernels/quantize.h"

namespace ligature::cpu {

using at::Tensor;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;
using kernels::QuantizedPair;

QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args);
/// The matrix that `source` gives, in one or two walks over it; in one where
/// !needs_amax_first(args.format).
QuantizedPair quantize(RowSource& source, const QuantizeArgs& args);
/// Is the largest value of the whole tensor wanted before anything can be written?
inline bool needs_amax_first(const Format& format) {
  return format.scaling == Scaling::Current || format.scaling == Scaling::NV;
}

void update_amax(const Tensor& x, Tensor& amax);
/// Into `out`, [rows, columns] of any dtype.
void dequantize(const Tensor& out, const QuantizedMatrix& q, const Format& format);
void expand(const Tensor& out, const QuantizedMatrix& q, const Format& format);
QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns);
Tensor hadamard(const Tensor& x, bool inverse);

}  // namespace ligature::cpu
