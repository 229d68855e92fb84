// From tensors to cuBLASLt's descriptions. Transposes and leading dimensions are flags and numbers;
// a tensor is copied only where its strides are no matrix's. Host time matters: no views are made.
#include "ligature/backend/cuda/gemm.h"

#include <ATen/Context.h>

#include <algorithm>

#include "ligature/backend/cuda/gemm_launch.h"
#include "ligature/backend/cuda/gemm_tensor.h"
#include "ligature/backend/cuda/launch.h"

namespace ligature::cuda {

std::optional<Matrix> matrix_in_place(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  Matrix out;
  out.data = t.const_data_ptr();
  out.columns = sizes.back();
  if (t.numel() == 0) {
    out.rows = c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
    out.ld = std::max<int64_t>(1, out.columns);
    return out;
  }
  int64_t step = out.columns;  // between two rows
  out.rows = 1;
  for (int64_t d = t.dim() - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (out.rows == 1) {
      step = strides[d];
    } else if (strides[d] != step * out.rows) {
      return std::nullopt;
    }
    out.rows *= sizes[d];
  }
  const int64_t inner = out.columns == 1 ? 1 : strides.back();
  if (inner == 1 && step >= out.columns) {
    out.ld = step;
  } else if ((step == 1 || out.rows == 1) && inner >= out.rows) {
    out.ld = inner;
    out.transposed = true;
  } else {
    return std::nullopt;
  }
  return out;
}

std::optional<Matrix> rows_in_place(const Tensor& t) {
  const auto matrix = matrix_in_place(t);
  return matrix && !matrix->transposed ? matrix : std::nullopt;
}

GemmType gemm_type(at::ScalarType dtype) {
  switch (type_of(dtype)) {
    case Type::Float16:
      return GemmType::Float16;
    case Type::BFloat16:
      return GemmType::BFloat16;
    default:
      return GemmType::Float32;
  }
}

Tensor set_coefficients(Gemm& gemm, const ProductTerms& terms, float beta, Stream stream) {
  gemm.alpha = static_cast<float>(terms.alpha);
  gemm.beta = beta;
  const Tensor& known = terms.a_factor.defined() ? terms.a_factor : terms.b_factor;
  if (!known.defined()) return {};
  Tensor held = small_on({2}, at::kFloat, known.device());
  launch<&launch_coefficients>("gemm coefficients", stream, held.mutable_data_ptr<float>(),
                               terms.alpha, beta,
                               static_cast<const float*>(data_of(terms.a_factor)),
                               static_cast<const float*>(data_of(terms.b_factor)));
  gemm.coefficients = held.const_data_ptr<float>();
  return held;
}

namespace {

/// An operand, or its transpose.
struct Side {
  const Tensor& tensor;
  bool turned = false;
};

Matrix matrix_of(const Tensor& t, Tensor& keep) {
  if (const auto matrix = matrix_in_place(t)) return *matrix;
  keep = t.contiguous();
  return *matrix_in_place(keep);
}

bool has_product(at::ScalarType operands, at::ScalarType result) {
  return operands == result || result == at::kFloat;
}

/// d = factors * a b + bias + c. `c`: undefined, another tensor of d's shape, or d itself. d is
/// row-major; a product of a's and b's dtype with such a result exists.
void multiply(const Tensor& d, const Side& a, const Side& b, const Tensor& c,
              const ProductTerms& terms) {
  if (d.numel() == 0) return;
  Tensor keep_a, keep_b, keep_c, keep_bias;
  const Matrix am = matrix_of(a.tensor, keep_a), bm = matrix_of(b.tensor, keep_b);
  Gemm gemm;
  gemm.m = a.turned ? am.columns : am.rows;
  gemm.k = a.turned ? am.rows : am.columns;
  gemm.n = b.turned ? bm.rows : bm.columns;
  const bool in_place = c.is_same(d);
  if (gemm.k == 0) {
    if (!in_place) c.defined() ? d.copy_(c) : d.zero_();
    if (terms.bias.defined()) d.add_(terms.bias);
    return;
  }
  const Stream stream = stream_of(d);
  const GemmType operands = gemm_type(a.tensor.scalar_type());
  gemm.a = {am.data, am.ld, am.transposed != a.turned, operands, ScaleMode::None, nullptr};
  gemm.b = {bm.data, bm.ld, bm.transposed != b.turned, operands, ScaleMode::None, nullptr};
  gemm.type = gemm_type(d.scalar_type());
  gemm.d = d.mutable_data_ptr();
  gemm.ldd = rows_in_place(d)->ld;
  if (in_place) {
    gemm.c = gemm.d;
    gemm.ldc = gemm.ldd;
  } else if (c.defined()) {
    auto cm = rows_in_place(c);
    if (!cm) {
      keep_c = c.contiguous();
      cm = rows_in_place(keep_c);
    }
    gemm.c = cm->data;
    gemm.ldc = cm->ld;
  }
  if (terms.bias.defined()) {
    keep_bias = terms.bias.contiguous();
    gemm.bias = const_cast<void*>(keep_bias.const_data_ptr());
    gemm.bias_type = gemm_type(keep_bias.scalar_type());
  }
  gemm.tf32 = operands == GemmType::Float32 && at::globalContext().allowTF32CuBLAS();
  const Tensor held = set_coefficients(gemm, terms, c.defined() ? 1.0F : 0.0F, stream);
  launch<&run_gemm>("gemm", stream, gemm, static_cast<int>(d.get_device()));
}

// cuBLASLt takes what has the operands' dtype and just the result's shape; ATen broadcasts the
// rest, or says what is wrong with it.
bool is_vector(const Tensor& t, const Tensor& like, int64_t n) {
  return !t.defined() || (t.dim() == 1 && t.size(0) == n && t.scalar_type() == like.scalar_type() &&
                          t.device() == like.device() && !t.is_neg());
}

bool is_rows(const Tensor& t, const Tensor& like, int64_t rows, int64_t columns) {
  return !t.defined() ||
         (t.dim() > 0 && t.size(-1) == columns && t.numel() == rows * columns &&
          t.scalar_type() == like.scalar_type() && t.device() == like.device() && !t.is_neg());
}

bool takes(const kernels::GemmDesc& d) {
  if (!runs_gemm(d.a, d.b)) return false;
  const int64_t rows = kernels::row_count(d.a);
  if (d.kind != kernels::LinearGemm::WeightGrad) {
    const int64_t columns = d.b.size(d.kind == kernels::LinearGemm::Forward ? 0 : 1);
    return is_vector(d.bias, d.a, columns) &&
           is_rows(d.out != nullptr ? *d.out : d.add, d.a, rows, columns);
  }
  if (rows != kernels::row_count(d.b)) return false;
  if (d.out == nullptr) return true;
  const Tensor& out = *d.out;
  return runs_gemm(out, out) && out.device() == d.a.device() && out.dim() == 2 &&
         out.size(0) == d.a.size(-1) && out.size(1) == d.b.size(-1);
}

ProductTerms alpha_only(double alpha) {
  ProductTerms terms;
  terms.alpha = alpha;
  return terms;
}

void multiply_into(Tensor& out, const Side& a, const Side& b, bool accumulate,
                   const ProductTerms& terms) {
  const at::ScalarType operands = a.tensor.scalar_type();
  if (has_product(operands, out.scalar_type()) && rows_in_place(out)) {
    multiply(out, a, b, accumulate ? out : Tensor(), terms);
    return;
  }
  Tensor wide = empty_on(out.sizes(), at::kFloat, out.device());
  multiply(wide, a, b, {}, terms);
  accumulate ? out.add_(wide) : out.copy_(wide);
}

}  // namespace

bool runs_gemm(const Tensor& a, const Tensor& b) {
  return runs(a) && b.scalar_type() == a.scalar_type() && b.device() == a.device() && a.dim() > 0 &&
         b.dim() > 0 && !a.is_neg() && !b.is_neg();
}

Tensor linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& add,
                      double alpha) {
  const DeviceGuard guard(x.device());
  Tensor y = empty_rows(x, w.size(0));
  ProductTerms terms = alpha_only(alpha);
  terms.bias = bias;
  multiply(y, {x}, {w, true}, add, terms);
  return y;
}

void linear_forward_add_(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias,
                         double alpha) {
  const DeviceGuard guard(x.device());
  ProductTerms terms = alpha_only(alpha);
  if (rows_in_place(y)) {
    terms.bias = bias;
    multiply(y, {x}, {w, true}, y, terms);
    return;
  }
  y.add_(linear_forward(x, w, bias, {}, alpha));
}

Tensor linear_input_grad(const Tensor& dy, const Tensor& w, const Tensor& add, double alpha) {
  const DeviceGuard guard(dy.device());
  Tensor dx = empty_rows(dy, w.size(1));
  multiply(dx, {dy}, {w}, add, alpha_only(alpha));
  return dx;
}

Tensor linear_weight_grad(const Tensor& dy, const Tensor& x, double alpha) {
  const DeviceGuard guard(dy.device());
  Tensor dw = empty_on({dy.size(-1), x.size(-1)}, dy.scalar_type(), dy.device());
  multiply(dw, {dy, true}, {x}, {}, alpha_only(alpha));
  return dw;
}

void linear_weight_grad_into(Tensor& out, const Tensor& dy, const Tensor& x, bool accumulate,
                             double alpha) {
  const DeviceGuard guard(dy.device());
  multiply_into(out, {dy, true}, {x}, accumulate, alpha_only(alpha));
}

Tensor gemm(const kernels::GemmDesc& d) {
  if (!takes(d)) return {};
  switch (d.kind) {
    case kernels::LinearGemm::Forward:
      if (d.out == nullptr) return linear_forward(d.a, d.b, d.bias, d.add, d.alpha);
      linear_forward_add_(*d.out, d.a, d.b, d.bias, d.alpha);
      return *d.out;
    case kernels::LinearGemm::InputGrad:
      return linear_input_grad(d.a, d.b, d.add, d.alpha);
    case kernels::LinearGemm::WeightGrad:
      break;
  }
  if (d.out == nullptr) return linear_weight_grad(d.a, d.b, d.alpha);
  linear_weight_grad_into(*d.out, d.a, d.b, d.accumulate, d.alpha);
  return *d.out;
}

const char* gemm_name(const kernels::GemmDesc& d) {
  const bool made_here = d.a.is_meta() ? computes_in(d.a.scalar_type()) : takes(d);
  return made_here ? "cublaslt" : nullptr;
}

Tensor scaled_product(const Tensor& a, const Tensor& b, const ProductTerms& terms) {
  const DeviceGuard guard(a.device());
  const bool exists = has_product(a.scalar_type(), terms.dtype);
  Tensor y = empty_on({a.size(0), b.size(0)}, exists ? terms.dtype : at::kFloat, a.device());
  ProductTerms same = terms;
  same.bias = as_dtype(terms.bias, y.scalar_type());
  multiply(y, {a}, {b, true}, as_dtype(terms.add, y.scalar_type()), same);
  return as_dtype(y, terms.dtype);
}

void scaled_product_into(Tensor& out, const Tensor& a, const Tensor& b, bool accumulate,
                         const ProductTerms& terms) {
  const DeviceGuard guard(a.device());
  ProductTerms factors = terms;
  factors.bias = Tensor();
  multiply_into(out, {a}, {b, true}, accumulate, factors);
}

}  // namespace ligature::cuda
