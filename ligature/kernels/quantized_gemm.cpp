#include "ligature/kernels/quantized_gemm.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <optional>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/gemm.h"
#include "ligature/kernels/log.h"
#include "ligature/kernels/quantized_shapes.h"

namespace ligature::kernels {
namespace {

Tensor cast(const Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : at::_to_copy(t, dtype);
}

/// A matrix [rows, k] of a product over k, and the factors that are not in it.
struct Operand {
  Tensor matrix;
  double factor = 1.0;
  Tensor device_factor;  // float [1], instead of `factor`: nobody waits for a device
  Tensor row_factors;    // float [rows]
  Tensor block_factors;  // float [rows, blocks along k]
};

/// One side of a product: `along_rows`: the product runs over the value's rows (all dimensions but
/// the last), so the operand is its transpose.
struct Side {
  const GemmOperand& value;
  bool along_rows = false;
  bool hadamard = false;
};

/// The data that a side is read from.
struct Source {
  const QuantizedMatrix* matrix = nullptr;  // null: from the dequantized values
  bool turned = false;                      // it is the operand's transpose
  int64_t rows = 0, columns = 0;            // of the operand
};

Source source_of(const Side& side) {
  const GemmOperand& q = side.value;
  const Format& format = *q.format;
  const auto& wanted = side.along_rows ? q.parts->columnwise : q.parts->rowwise;
  const auto& other = side.along_rows ? q.parts->rowwise : q.parts->columnwise;
  Source out;
  out.rows = side.along_rows ? q.columns() : q.rows();
  out.columns = side.along_rows ? q.rows() : q.columns();
  if (wanted.defined() && (!side.along_rows || format.hadamard == side.hadamard)) {
    out.matrix = &wanted;
    if (side.along_rows && side.hadamard) out.columns = (out.columns + 15) / 16 * 16;
  } else if (other.defined() && format.orientations_agree()) {
    out.matrix = &other;
    out.turned = true;
  }
  return out;
}

Tensor as_matrix(const Tensor& t) { return t.dim() == 2 ? t : t.reshape({-1, t.size(-1)}); }

bool is_cpu_number(const Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kFloat && t.numel() == 1;
}

// What is above the blocks of NVFP4. One number on the CPU is computed without torch's calls.
Tensor upper_factor(const Tensor& amax, const Format& format) {
  const double divisor = format.nv_range();
  constexpr float least = std::numeric_limits<float>::min();
  if (!is_cpu_number(amax)) return at::clamp_min(amax.div(divisor), least);
  Tensor factor = at::detail::empty_cpu(amax.sizes(), at::kFloat);
  const float whole = *amax.const_data_ptr<float>() / static_cast<float>(divisor);
  *factor.mutable_data_ptr<float>() = whole < least ? least : whole;
  return factor;
}

void set_factor(Operand& out, const Tensor& factor) {
  if (!factor.is_cpu()) {
    out.device_factor = factor;
  } else {
    out.factor = is_cpu_number(factor) ? *factor.const_data_ptr<float>() : factor.item<float>();
  }
}

// Each row of factors for 128 rows of the operand.
Tensor factors_by_row(const Tensor& factors, int64_t rows) {
  return factors.unsqueeze(1)
      .expand({factors.size(0), 128, factors.size(1)})
      .reshape({factors.size(0) * 128, factors.size(1)})
      .narrow(0, 0, rows);
}

Operand expand(const Source& source, const Format& format, at::ScalarType dtype) {
  const QuantizedMatrix& q = *source.matrix;
  Operand out;
  out.matrix = expand(q, format, source.turned ? source.rows : source.columns, dtype);
  if (source.turned) out.matrix = out.matrix.t();
  if (q.data.is_meta()) return out;
  if (format.per_tensor()) {
    set_factor(out, q.scale);
  } else if (format.scaling == Scaling::NV) {
    const Tensor upper = upper_factor(q.amax, format);
    if (format.row_scaled) {
      out.row_factors = upper;
    } else {
      set_factor(out, upper);
    }
  } else if (format.scaling == Scaling::Block && !format.power_of_2_scales) {
    const Tensor factors = source.turned ? q.scale.t() : q.scale;
    out.block_factors = format.block_2d ? factors_by_row(factors, source.rows) : factors;
  }
  return out;
}

Operand operand(const Side& side, at::ScalarType dtype) {
  Tensor plain;
  if (side.value.is_quantized()) {
    const GemmOperand& q = side.value;
    const Source source = source_of(side);
    if (source.matrix != nullptr) return expand(source, *q.format, dtype);
    plain = as_matrix(dequantize(*q.parts, *q.format, q.sizes, dtype));
  } else {
    plain = as_matrix(cast(*side.value.plain, dtype).contiguous());
  }
  Operand out;
  out.matrix = side.along_rows ? plain.t() : plain;
  return out;
}

bool has_hadamard(const GemmOperand& v) {
  return v.is_quantized() && v.format->hadamard && v.parts->columnwise.defined();
}

bool is_exact_in_bfloat16(const Side& side) {
  return side.value.is_quantized() && source_of(side).matrix != nullptr;
}

/// Bfloat16 is no less exact for such operands.
at::ScalarType operand_dtype(at::ScalarType dtype, const Side& a, const Side& b) {
  const Backend* own = own_backend(a.value.device.type());
  const bool fast =
      own != nullptr && own->fast_bfloat16 && is_exact_in_bfloat16(a) && is_exact_in_bfloat16(b);
  return dtype == at::kBFloat16 || fast ? at::kBFloat16 : at::kFloat;
}

bool is_plain(const Operand& a) { return !a.row_factors.defined() && !a.block_factors.defined(); }

/// a b^T in float32 with every factor applied.
Tensor full_product(const Operand& a, const Operand& b) {
  const Tensor x = a.matrix.to(at::kFloat);
  const Tensor w = b.matrix.to(at::kFloat);
  const auto with_factors = [](Tensor y, const Operand& rows, const Operand& columns) {
    if (rows.row_factors.defined()) y.mul_(rows.row_factors.unsqueeze(1));
    if (columns.row_factors.defined()) y.mul_(columns.row_factors.unsqueeze(0));
    if (rows.device_factor.defined()) y.mul_(rows.device_factor);
    if (columns.device_factor.defined()) y.mul_(columns.device_factor);
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

/// The device's GEMMs of plain operands with scales on the device; null where it has none for them.
const QuantizedGemms* gemms_for(const Operand& a, const Operand& b) {
  const auto* gemms = backend_for(a.matrix).quantized_gemms;
  return gemms != nullptr && gemms->supports_plain(a.matrix, b.matrix) ? gemms : nullptr;
}

ProductTerms terms_of(const Operand& a, const Operand& b, const ProductArgs& args,
                      const Tensor& add) {
  ProductTerms terms;
  terms.dtype = args.dtype;
  terms.bias = args.bias;
  terms.add = add;
  terms.alpha = args.alpha * a.factor * b.factor;
  terms.a_factor = a.device_factor;
  terms.b_factor = b.device_factor;
  return terms;
}

Tensor product(const Operand& a, const Operand& b, const ProductArgs& args) {
  const Tensor add = args.add.defined() ? as_matrix(args.add) : Tensor();
  if (is_plain(a) && is_plain(b)) {
    if (const auto* gemms = gemms_for(a, b)) {
      return gemms->run_plain(a.matrix, b.matrix, terms_of(a, b, args, add));
    }
    const at::ScalarType dtype = a.matrix.scalar_type();
    const auto same = [&](const Tensor& t) { return t.defined() ? cast(t, dtype) : t; };
    return cast(linear_forward(a.matrix, b.matrix, same(args.bias), same(add),
                               args.alpha * a.factor * b.factor),
                args.dtype);
  }
  Tensor y = full_product(a, b);
  if (args.alpha != 1.0) y.mul_(args.alpha);
  if (args.bias.defined()) y.add_(args.bias);
  if (add.defined()) y.add_(add);
  return cast(y, args.dtype);
}

void product_into(Tensor& out, const Operand& a, const Operand& b, bool accumulate,
                  const ProductArgs& args) {
  if (is_plain(a) && is_plain(b)) {
    if (const auto* gemms = gemms_for(a, b)) {
      gemms->run_plain_into(out, a.matrix, b.matrix, accumulate, terms_of(a, b, args, {}));
      return;
    }
    linear_weight_grad_into(out, a.matrix.t(), b.matrix.t(), accumulate,
                            args.alpha * a.factor * b.factor);
    return;
  }
  ProductArgs wide = args;
  wide.dtype = at::kFloat;
  const Tensor dw = product(a, b, wide);
  accumulate ? out.add_(dw) : out.copy_(dw);
}

/// A product that the device has for these formats.
struct Native {
  const QuantizedGemms* gemms;
  QuantizedOperand a, b;
  ProductTerms terms;
  bool turn_a = false, turn_b = false;  // only the other orientation is there
  const char* backend = "cublaslt";

  bool without_memory() const { return a.matrix.data.is_meta(); }
};

QuantizedOperand native_operand(const Source& source, const Format& format) {
  return {*source.matrix, format, source.rows, source.columns};
}

std::optional<Native> native_operands(const Side& a, const Side& b) {
  if (!a.value.is_quantized() || !b.value.is_quantized()) return std::nullopt;
  const Source sa = source_of(a), sb = source_of(b);
  if (sa.matrix == nullptr || sb.matrix == nullptr) return std::nullopt;
  const auto* own = own_backend(device_behind(sa.matrix->data));
  if (own == nullptr || own->quantized_gemms == nullptr) return std::nullopt;
  const Format &fa = *a.value.format, &fb = *b.value.format;
  return Native{own->quantized_gemms,
                native_operand(sa, fa),
                native_operand(sb, fb),
                {},
                sa.turned,
                sb.turned};
}

std::optional<Native> native_product(const Side& a, const Side& b, const ProductArgs& args,
                                     at::ScalarType dtype, bool fast) {
  auto operands = native_operands(a, b);
  if (!operands) return std::nullopt;
  Native& out = *operands;
  const auto support = out.gemms->support(out.a, out.b, dtype);
  if (support == QuantizedSupport::No) return std::nullopt;
  if (support == QuantizedSupport::NeverRun) {
    out.backend = "cublaslt, never run on such a device";
  }
  out.terms.dtype = dtype;
  out.terms.bias = args.bias;
  out.terms.add = args.add.defined() ? as_matrix(args.add) : Tensor();
  out.terms.alpha = args.alpha;
  if (args.accumulation != Accumulation::Default) fast = args.accumulation == Accumulation::Fast;
  out.terms.fast_accumulation = fast && out.a.format.per_tensor();
  if (out.terms.fast_accumulation) out.backend = "cublaslt, fast accumulation";
  return operands;
}

/// The operands of a product with a gated activation behind it, if they lie as its kernels read
/// them and nothing else is wanted of it.
std::optional<Native> gated_operands(const Side& a, const Side& b, const ProductArgs& args) {
  if (args.dtype != at::kBFloat16 || args.bias.defined() || args.add.defined() ||
      args.alpha != 1.0 || args.accumulation == Accumulation::Split) {
    return std::nullopt;
  }
  auto operands = native_operands(a, b);
  return operands && !operands->turn_a && !operands->turn_b ? operands : std::nullopt;
}

/// What is still to be computed before it can run.
void make_ready(Native& native) {
  const auto turn = [](QuantizedOperand& q) { q.matrix = transpose(q.matrix, q.format, q.rows); };
  if (native.turn_a) turn(native.a);
  if (native.turn_b) turn(native.b);
  if (native.a.format.scaling != Scaling::NV) return;
  native.terms.a_factor = upper_factor(native.a.matrix.amax, native.a.format);
  native.terms.b_factor = upper_factor(native.b.matrix.amax, native.b.format);
}

void log_gemm(KernelScope& scope, const GemmOperand& a, const Side& b) {
  if (!scope.is_logged()) return;
  const at::IntArrayRef sizes = b.value.sizes;
  scope.gemm(c10::multiply_integers(a.sizes),
             b.along_rows ? sizes.back() : c10::multiply_integers(sizes.begin(), sizes.end() - 1));
}

Tensor run(const char* name, const Side& a, const Side& b, const ProductArgs& args, bool fast) {
  if (auto native = native_product(a, b, args, args.dtype, fast)) {
    KernelScope scope(name, native->backend);
    log_gemm(scope, a.value, b);
    if (native->without_memory()) {
      return at::empty({native->a.rows, native->b.rows},
                       at::TensorOptions(args.dtype).device(at::kMeta));
    }
    make_ready(*native);
    return native->gemms->run(native->a, native->b, native->terms);
  }
  KernelScope scope(name, "emulated");
  log_gemm(scope, a.value, b);
  const at::ScalarType dtype = operand_dtype(args.dtype, a, b);
  return product(operand(a, dtype), operand(b, dtype), args);
}

Tensor as_rows_of(const Tensor& y, at::IntArrayRef sizes) {
  if (sizes.size() == 2) return y;
  at::DimVector shape(sizes);
  shape.back() = y.size(-1);
  return y.view(shape);
}

}  // namespace

Tensor quantized_linear_forward(const GemmOperand& x, const GemmOperand& w,
                                const ProductArgs& args) {
  return as_rows_of(run("linear_forward", {x}, {w}, args, true), x.sizes);
}

bool quantized_gated_pays(const GemmOperand& x, const GemmOperand& w, const ProductArgs& args,
                          const ActivationSpec& spec, const Format& to) {
  if (!to.per_tensor()) return false;
  const auto operands = gated_operands({x}, {w}, args);
  return operands && operands->gemms->gated_pays(operands->a, operands->b, spec, to);
}

GatedForwardQuantized quantized_linear_gated_forward(const GemmOperand& x, const GemmOperand& w,
                                                     const ProductArgs& args,
                                                     const ActivationSpec& spec,
                                                     const QuantizeArgs& to, bool need_z) {
  const char* name = "linear_gated_forward_quantize";
  KernelScope scope(name, "cuda, fast accumulation");
  log_gemm(scope, x, {w});
  const auto operands = gated_operands({x}, {w}, args);
  LIGATURE_CHECK(
      operands && operands->gemms->supports_gated(operands->a, operands->b, spec, to.format), "[",
      name, "] operands must be what its kernels take, got ", x.sizes, " and ", w.sizes, " for ",
      activation_name(spec.kind), " in ", to.format.name());
  GatedForwardQuantized made;
  if (operands->without_memory()) {
    const auto meta = at::TensorOptions(args.dtype).device(at::kMeta);
    const int64_t rows = operands->a.rows, columns = operands->b.rows;
    if (need_z) made.z = at::empty({rows, columns}, meta);
    made.a = shapes::quantize({rows, columns / 2}, to, meta);
  } else {
    made = operands->gemms->run_gated(operands->a, operands->b, spec, to, need_z);
  }
  if (need_z) made.z = as_rows_of(made.z, x.sizes);
  return made;
}

Tensor quantized_linear_input_grad(const GemmOperand& dy, const GemmOperand& w,
                                   const ProductArgs& args) {
  return as_rows_of(run("linear_input_grad", {dy}, {w, true}, args, false), dy.sizes);
}

Tensor quantized_linear_weight_grad(const GemmOperand& dy, const GemmOperand& x,
                                    const ProductArgs& args) {
  const bool hadamard = has_hadamard(dy) && has_hadamard(x);
  return run("linear_weight_grad", {dy, true, hadamard}, {x, true, hadamard}, args, false);
}

void quantized_linear_weight_grad_into(Tensor& out, const GemmOperand& dy, const GemmOperand& x,
                                       bool accumulate, const ProductArgs& args) {
  const char* name = "linear_weight_grad_into";
  const bool hadamard = has_hadamard(dy) && has_hadamard(x);
  const Side a{dy, true, hadamard}, b{x, true, hadamard};
  if (auto native = native_product(a, b, args, out.scalar_type(), false)) {
    KernelScope scope(name, native->backend);
    log_gemm(scope, dy, b);
    if (native->without_memory()) return;
    make_ready(*native);
    native->gemms->run_into(out, native->a, native->b, accumulate, native->terms);
    return;
  }
  KernelScope scope(name, "emulated");
  log_gemm(scope, dy, b);
  const at::ScalarType dtype = operand_dtype(args.dtype, a, b);
  product_into(out, operand(a, dtype), operand(b, dtype), accumulate, args);
}

bool has_quantized_gemm(const Format& format, at::Device device) {
  const Backend* own = own_backend(device.type());
  return own != nullptr && own->quantized_gemms != nullptr &&
         own->quantized_gemms->has(format, device);
}

}  // namespace ligature::kernels
