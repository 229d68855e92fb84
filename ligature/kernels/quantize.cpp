// Checks of formats and sizes, and the calls of the backend. Low precision has no ATen backend: a
// tensor of a device without one is refused.
#include "ligature/kernels/quantize.h"

#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"
#include "ligature/kernels/norm.h"
#include "ligature/kernels/quantized_shapes.h"
#include "ligature/kernels/stored.h"

namespace ligature::kernels {
namespace {

void check_tensor(const char* op, const char* name, const Tensor& x) {
  const auto called = [&] { return "[" + std::string(op) + "] " + name; };
  if (!is_readable(x)) refuse_unreadable(x, called);
  if (!x.is_meta()) check_no_fake_mode(called);
  const Backend* own = own_backend(x.device().type());
  LIGATURE_CHECK(own != nullptr && own->quantize != nullptr, "[", op,
                 "] low precision runs on the CPU and on CUDA, got a tensor on ", x.device(), ": ",
                 why_no_backend(x.device().type()));
}

void check_values(const char* op, const Tensor& x) {
  check_tensor(op, "input", x);
  LIGATURE_CHECK(x.dim() > 0, "[", op, "] wanted a tensor with at least one dimension, got none");
  const auto dtype = x.scalar_type();
  LIGATURE_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble,
      "[", op, "] wanted a float, double, bfloat16 or half tensor, got ", dtype);
  LIGATURE_CHECK(x.is_contiguous(), "[", op, "] wanted a contiguous tensor, got shape ", x.sizes(),
                 " with strides ", x.strides());
}

void check_one_float(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  check_tensor(op, name, t);
  LIGATURE_CHECK(t.scalar_type() == at::kFloat && t.numel() == 1, "[", op, "] ", name,
                 " must be one float, got ", t.scalar_type(), " of shape ", t.sizes());
  LIGATURE_CHECK(x.is_meta() || t.device() == x.device(), "[", op, "] ", name, " must be on ",
                 x.device(), ", got ", t.device());
}

void check_format(const char* op, const Format& format) {
  const std::string why = format.why_not();
  LIGATURE_CHECK(why.empty(), "[", op, "] ", why);
}

void check_args(const char* op, const QuantizeArgs& args, const Tensor& x) {
  check_format(op, args.format);
  LIGATURE_CHECK(args.rowwise || args.columnwise, "[", op,
                 "] wanted row-wise or column-wise data, got neither");
  LIGATURE_CHECK(args.fit_to == 0 || (args.format.scaling == Scaling::Delayed && args.fit_to > 0 &&
                                      args.fit_to <= max_value(args.format.element)),
                 "[", op, "] fit_to must be up to ", max_value(args.format.element),
                 " and of delayed scaling, got ", args.fit_to, " for ", args.format.name());
  if (args.format.scaling != Scaling::Delayed || x.is_meta() || args.fit_to > 0) return;
  LIGATURE_CHECK(args.scale.defined(), "[", op, "] wanted a scale, got none");
  check_one_float(op, "scale", args.scale, x);
  if (args.amax.defined()) check_one_float(op, "amax", args.amax, x);
}

int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

void check_matrix(const char* op, const QuantizedMatrix& q, const Format& format, int64_t columns) {
  check_format(op, format);
  LIGATURE_CHECK(q.defined() && q.scale.defined(), "[", op, "] wanted data and scale, got none");
  check_tensor(op, "data", q.data);
  check_tensor(op, "scale", q.scale);
  if (q.amax.defined()) check_tensor(op, "amax", q.amax);
  LIGATURE_CHECK_TYPE(q.data.scalar_type() == at::kByte && q.data.dim() == 2, "[", op,
                      "] data must be a matrix of bytes, got ", q.data.scalar_type(), " of shape ",
                      q.data.sizes());
  const int64_t rows = q.data.size(0), block = format.block_size();
  const int64_t bytes = format.element == Element::E2M1 ? blocks_of(columns, 2) : columns;
  LIGATURE_CHECK(columns >= 0 && q.data.size(1) == bytes, "[", op, "] data must have ", bytes,
                 " bytes in a row of ", columns, " values, got ", q.data.size(1));
  LIGATURE_CHECK(q.data.is_contiguous(), "[", op, "] data must be contiguous, got strides ",
                 q.data.strides());
  LIGATURE_CHECK(q.scale.device() == q.data.device(), "[", op, "] scale must be on ",
                 q.data.device(), ", got ", q.scale.device());
  const bool floats = format.per_tensor() || format.scaling == Scaling::Block;
  LIGATURE_CHECK_TYPE(q.scale.scalar_type() == (floats ? at::kFloat : at::kByte), "[", op,
                      "] scale must be ", floats ? "float" : "uint8", ", got ",
                      q.scale.scalar_type());
  if (format.per_tensor()) {
    LIGATURE_CHECK(q.scale.numel() == 1, "[", op, "] scale must have one element, got shape ",
                   q.scale.sizes());
    return;
  }
  const int64_t wanted[] = {blocks_of(rows, format.block_2d ? block : 1),
                            blocks_of(columns, block)};
  LIGATURE_CHECK(q.scale.sizes() == at::IntArrayRef(wanted), "[", op, "] scale must have shape ",
                 at::IntArrayRef(wanted), ", got ", q.scale.sizes());
  if (format.scaling != Scaling::NV) return;
  LIGATURE_CHECK(q.amax.defined() && q.amax.scalar_type() == at::kFloat && q.amax.is_contiguous() &&
                     q.amax.device() == q.data.device() &&
                     q.amax.numel() == (format.row_scaled ? rows : 1),
                 "[", op, "] amax must be ", format.row_scaled ? "a float per row" : "one float",
                 ", got ", q.amax.defined() ? "another" : "none");
}

/// The backend of low precision: it takes every dtype, double too.
const Backend& casts_of(const Tensor& x) { return *own_backend(x.device().type()); }

Tensor decoded(const char* op, const QuantizedMatrix& q, int64_t columns, at::ScalarType dtype,
               bool operand) {
  LIGATURE_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 ||
                          (!operand && (dtype == at::kHalf || dtype == at::kDouble)),
                      "[", op, "] dtype must be ",
                      operand ? "float or bfloat16" : "float, double, bfloat16 or half", ", got ",
                      dtype);
  return shapes::decoded(q, columns, dtype);
}

}  // namespace

QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args) {
  const KernelScope scope("quantize");
  check_values("quantize", x);
  check_args("quantize", args, x);
  return casts_of(x).quantize(x, args);
}

void update_amax(const Tensor& x, Tensor& amax) {
  const KernelScope scope("update_amax");
  check_tensor("update_amax", "input", x);
  check_one_float("update_amax", "amax", amax, x);
  LIGATURE_CHECK(x.is_contiguous(), "[update_amax] wanted a contiguous tensor, got strides ",
                 x.strides());
  casts_of(x).update_amax(x, amax);
}

void update_amax(const QuantizedMatrix& q, const Format& format, int64_t columns, Tensor& amax) {
  const KernelScope scope("update_amax");
  check_matrix("update_amax", q, format, columns);
  LIGATURE_CHECK(format.per_tensor(), "[update_amax] wanted a format with one scale, got ",
                 format.name());
  check_one_float("update_amax", "amax", amax, q.data);
  casts_of(q.data).update_quantized_amax(q, format, amax);
}

Tensor dequantize(const QuantizedMatrix& q, const Format& format, int64_t columns,
                  at::ScalarType dtype) {
  const KernelScope scope("dequantize");
  check_matrix("dequantize", q, format, columns);
  Tensor out = decoded("dequantize", q, columns, dtype, false);
  casts_of(out).dequantize(out, q, format);
  return out;
}

Tensor dequantize(const QuantizedPair& parts, const Format& format, at::IntArrayRef sizes,
                  at::ScalarType dtype) {
  const int64_t columns = sizes.back();
  const int64_t rows = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  if (parts.rowwise.defined()) return dequantize(parts.rowwise, format, columns, dtype).view(sizes);
  LIGATURE_CHECK_STATE(parts.columnwise.defined(), "a quantized tensor of shape ", sizes,
                       " has no data to dequantize");
  if (!format.hadamard) {
    return dequantize(parts.columnwise, format, rows, dtype).t().contiguous().view(sizes);
  }
  const int64_t filled = (rows + 15) / 16 * 16;
  const Tensor transformed = dequantize(parts.columnwise, format, filled, at::kFloat);
  return hadamard(transformed, /*inverse=*/true)
      .narrow(1, 0, rows)
      .t()
      .to(dtype)
      .contiguous()
      .view(sizes);
}

Tensor expand(const QuantizedMatrix& q, const Format& format, int64_t columns,
              at::ScalarType dtype) {
  const KernelScope scope("expand");
  check_matrix("expand", q, format, columns);
  Tensor out = decoded("expand", q, columns, dtype, true);
  casts_of(out).expand(out, q, format);
  return out;
}

QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns) {
  const KernelScope scope("transpose");
  check_matrix("transpose", q, format, columns);
  LIGATURE_CHECK(format.orientations_agree(), "[transpose] wanted a format whose orientations are ",
                 "each other's transpose, got ", format.name());
  return casts_of(q.data).transpose(q, format, columns);
}

Tensor hadamard(const Tensor& x, bool inverse) {
  const KernelScope scope("hadamard");
  check_values("hadamard", x);
  return casts_of(x).hadamard(x, inverse);
}

NormQuantized layer_norm_forward_quantize(const Tensor& x, const Tensor& w, const Tensor& b,
                                          double eps, bool zero_centered_gamma,
                                          at::ScalarType out_dtype, const QuantizeArgs& args) {
  const char* op = "layer_norm_forward_quantize";
  const KernelScope scope(op);
  check_tensor(op, "input", x);
  check_norm(op, x, w);
  check_args(op, args, x);
  if (const auto fused = casts_of(x).layer_norm_forward_quantize) {
    auto made = fused(x, w, b, eps, zero_centered_gamma, out_dtype, args);
    if (made) return std::move(*made);
  }
  const NormForward f = layer_norm_forward(x, w, b, eps, zero_centered_gamma, out_dtype);
  return {quantize(f.y, args), f.mean, f.rstd};
}

NormQuantized rms_norm_forward_quantize(const Tensor& x, const Tensor& w, double eps,
                                        bool zero_centered_gamma, at::ScalarType out_dtype,
                                        const QuantizeArgs& args) {
  const char* op = "rms_norm_forward_quantize";
  const KernelScope scope(op);
  check_tensor(op, "input", x);
  check_norm(op, x, w);
  check_args(op, args, x);
  if (const auto fused = casts_of(x).rms_norm_forward_quantize) {
    auto made = fused(x, w, eps, zero_centered_gamma, out_dtype, args);
    if (made) return std::move(*made);
  }
  const NormForward f = rms_norm_forward(x, w, eps, zero_centered_gamma, out_dtype);
  return {quantize(f.y, args), {}, f.rstd};
}

QuantizedPair activation_forward_quantize(const Tensor& x, const ActivationSpec& spec,
                                          const Tensor& scales, const QuantizeArgs& args) {
  const char* op = "activation_forward_quantize";
  const KernelScope scope(op);
  check_tensor(op, "input", x);
  check_activation(x, spec, scales);
  check_args(op, args, x);
  if (const auto fused = casts_of(x).activation_forward_quantize) {
    auto made = fused(x, spec, scales, args);
    if (made) return std::move(*made);
  }
  return quantize(activation_forward(x, spec, scales), args);
}

ActivationBackwardQuantized activation_backward_quantize(const Tensor& dy, const Tensor& x,
                                                         const ActivationSpec& spec,
                                                         const Tensor& scales, bool need_dscales,
                                                         bool need_dbias,
                                                         const QuantizeArgs& args) {
  const char* op = "activation_backward_quantize";
  const KernelScope scope(op);
  check_tensor(op, "input", x);
  check_activation_gradient(dy, x, spec, scales, need_dscales);
  check_args(op, args, x);
  if (const auto fused = casts_of(x).activation_backward_quantize) {
    auto made = fused(dy, x, spec, scales, need_dscales, need_dbias, args);
    if (made) return std::move(*made);
  }
  const auto g = activation_backward(dy, x, spec, scales, need_dscales, need_dbias);
  return {quantize(g.dx, args), g.dscales, g.dbias};
}

}  // namespace ligature::kernels
