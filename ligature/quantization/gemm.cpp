#include "ligature/quantization/gemm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ligature/kernels/gemm.h"
#include "ligature/kernels/log.h"
#include "ligature/ops/prepare.h"

namespace ligature {
namespace {

/// A matrix [rows, k] of a product over k, and the factors that are not in it.
struct Operand {
  Tensor matrix;
  double factor = 1.0;
  Tensor row_factors;    // float [rows]
  Tensor block_factors;  // float [rows, blocks along k]
};

Tensor as_matrix(const Tensor& t) { return t.dim() == 2 ? t : t.reshape({-1, t.size(-1)}); }

// What is above the blocks of NVFP4.
Tensor upper_factor(const Tensor& amax, const Format& format) {
  const double divisor = format.four_over_six == FourOverSix::None ? 6.0 * 448.0 : 6.0 * 256.0;
  return at::clamp_min(amax.div(divisor), std::numeric_limits<float>::min());
}

Operand expand(const kernels::QuantizedMatrix& q, const Format& format, int64_t rows,
               int64_t columns, at::ScalarType dtype) {
  Operand out;
  out.matrix = kernels::expand(q, format, columns, dtype);
  if (q.data.is_meta()) return out;
  if (format.per_tensor()) {
    out.factor = q.scale.item<float>();
  } else if (format.scaling == Scaling::NV) {
    const Tensor upper = upper_factor(q.amax, format);
    if (format.row_scaled) {
      out.row_factors = upper;
    } else {
      out.factor = upper.item<float>();
    }
  } else if (format.scaling == Scaling::Block && !format.power_of_2_scales) {
    out.block_factors = q.scale;
    if (format.block_2d) {
      out.block_factors = q.scale.repeat_interleave(128, 0).narrow(0, 0, rows);
    }
  }
  return out;
}

/// `along_rows`: the product runs over the matrix's rows (all dimensions but the last), so the
/// operand is its transpose.
Operand operand(const Value& v, bool along_rows, bool hadamard, at::ScalarType dtype) {
  if (!v.is_quantized()) {
    const Tensor plain = as_matrix(prepare(v, dtype));
    return {along_rows ? plain.t() : plain, 1.0, {}, {}};
  }
  const QuantizedTensor& q = *v.quantized();
  const Format& format = q.format_tag();
  const auto& wanted = along_rows ? q.columnwise() : q.rowwise();
  const auto& other = along_rows ? q.rowwise() : q.columnwise();
  const int64_t rows = along_rows ? q.columns() : q.rows();
  int64_t columns = along_rows ? q.rows() : q.columns();
  if (wanted.defined() && (!along_rows || format.hadamard == hadamard)) {
    if (along_rows && hadamard) columns = (columns + 15) / 16 * 16;
    return expand(wanted, format, rows, columns, dtype);
  }
  if (other.defined() && format.orientations_agree()) {
    Operand out = expand(other, format, columns, rows, dtype);
    out.matrix = out.matrix.t();
    if (out.block_factors.defined()) {
      out.block_factors = other.scale.t().repeat_interleave(128, 0).narrow(0, 0, rows);
    }
    return out;
  }
  const Tensor plain = as_matrix(q.dequantize(dtype));
  return {along_rows ? plain.t() : plain, 1.0, {}, {}};
}

bool has_hadamard(const Value& v) {
  return v.is_quantized() && v.quantized()->format_tag().hadamard &&
         v.quantized()->columnwise().defined();
}

at::ScalarType operand_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
}

bool is_plain(const Operand& a) { return !a.row_factors.defined() && !a.block_factors.defined(); }

/// a b^T in float32 with every factor applied.
Tensor full_product(const Operand& a, const Operand& b) {
  const Tensor x = a.matrix.to(at::kFloat);
  const Tensor w = b.matrix.to(at::kFloat);
  const auto with_factors = [](Tensor y, const Operand& rows, const Operand& columns) {
    if (rows.row_factors.defined()) y.mul_(rows.row_factors.unsqueeze(1));
    if (columns.row_factors.defined()) y.mul_(columns.row_factors.unsqueeze(0));
    const double factor = rows.factor * columns.factor;
    return factor == 1.0 ? y : y.mul_(factor);
  };
  if (!a.block_factors.defined() && !b.block_factors.defined()) {
    return with_factors(at::mm(x, w.t()), a, b);
  }
  Tensor y = at::zeros({x.size(0), w.size(0)}, x.options());
  for (int64_t k = 0; k < x.size(1); k += 128) {
    const int64_t size = std::min<int64_t>(128, x.size(1) - k);
    Tensor part = at::mm(x.narrow(1, k, size), w.narrow(1, k, size).t());
    if (a.block_factors.defined()) part.mul_(a.block_factors.narrow(1, k / 128, 1));
    if (b.block_factors.defined()) part.mul_(b.block_factors.narrow(1, k / 128, 1).t());
    y.add_(part);
  }
  return with_factors(y, a, b);
}

Tensor product(const Operand& a, const Operand& b, const ProductArgs& args) {
  const Tensor add = args.add.defined() ? as_matrix(args.add) : Tensor();
  if (is_plain(a) && is_plain(b)) {
    const at::ScalarType dtype = a.matrix.scalar_type();
    const auto same = [&](const Tensor& t) { return t.defined() ? cast(t, dtype) : t; };
    return cast(kernels::linear_forward(a.matrix, b.matrix, same(args.bias), same(add),
                                        args.alpha * a.factor * b.factor),
                args.dtype);
  }
  Tensor y = full_product(a, b);
  if (args.alpha != 1.0) y.mul_(args.alpha);
  if (args.bias.defined()) y.add_(args.bias);
  if (add.defined()) y.add_(add);
  return cast(y, args.dtype);
}

Tensor as_rows_of(const Tensor& y, at::IntArrayRef sizes) {
  if (sizes.size() == 2) return y;
  at::DimVector shape(sizes);
  shape.back() = y.size(-1);
  return y.view(shape);
}

}  // namespace

Tensor quantized_linear_forward(const Value& x, const Value& w, const ProductArgs& args) {
  const kernels::KernelScope scope("linear_forward", "emulated");
  const at::ScalarType dtype = operand_dtype(args.dtype);
  return as_rows_of(product(operand(x, false, false, dtype), operand(w, false, false, dtype), args),
                    x.sizes());
}

Tensor quantized_linear_input_grad(const Value& dy, const Value& w, const ProductArgs& args) {
  const kernels::KernelScope scope("linear_input_grad", "emulated");
  const at::ScalarType dtype = operand_dtype(args.dtype);
  return as_rows_of(product(operand(dy, false, false, dtype), operand(w, true, false, dtype), args),
                    dy.sizes());
}

Tensor quantized_linear_weight_grad(const Value& dy, const Value& x, const ProductArgs& args) {
  const kernels::KernelScope scope("linear_weight_grad", "emulated");
  const at::ScalarType dtype = operand_dtype(args.dtype);
  const bool hadamard = has_hadamard(dy) && has_hadamard(x);
  return product(operand(dy, true, hadamard, dtype), operand(x, true, hadamard, dtype), args);
}

void quantized_linear_weight_grad_into(Tensor& out, const Value& dy, const Value& x,
                                       bool accumulate, const ProductArgs& args) {
  const kernels::KernelScope scope("linear_weight_grad_into", "emulated");
  const at::ScalarType dtype = operand_dtype(args.dtype);
  const bool hadamard = has_hadamard(dy) && has_hadamard(x);
  const Operand a = operand(dy, true, hadamard, dtype);
  const Operand b = operand(x, true, hadamard, dtype);
  if (is_plain(a) && is_plain(b)) {
    kernels::linear_weight_grad_into(out, a.matrix.t(), b.matrix.t(), accumulate,
                                     args.alpha * a.factor * b.factor);
    return;
  }
  ProductArgs wide = args;
  wide.dtype = at::kFloat;
  const Tensor dw = product(a, b, wide);
  accumulate ? out.add_(dw) : out.copy_(dw);
}

}  // namespace ligature
