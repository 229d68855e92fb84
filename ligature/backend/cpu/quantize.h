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
/// !needs_amax_first(args).
QuantizedPair quantize(RowSource& source, const QuantizeArgs& args);
/// Is the largest value of the whole tensor wanted before anything can be written?
inline bool needs_amax_first(const QuantizeArgs& args) {
  return args.format.scaling == Scaling::Current || args.format.scaling == Scaling::NV ||
         args.fit_to > 0;
}

void update_amax(const Tensor& x, Tensor& amax);
void update_amax(const QuantizedMatrix& q, const Format& format, Tensor& amax);
/// Into `out`, [rows, columns] of any dtype.
void dequantize(const Tensor& out, const QuantizedMatrix& q, const Format& format);
void expand(const Tensor& out, const QuantizedMatrix& q, const Format& format);
QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns);
Tensor hadamard(const Tensor& x, bool inverse);

}  // namespace ligature::cpu
