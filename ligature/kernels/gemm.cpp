// Matrix products are cuBLASLt's on CUDA, our own on a CPU where those are faster, and ATen's on
// every other device and in float64. Host time matters here: a training step of a small model makes
// these calls thousands of times, so each path is the fewest dispatches that do it.
#include "ligature/kernels/gemm.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/product.h"
#include "ligature/backend/cuda/gemm.h"
#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

int64_t row_count(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

Tensor as_matrix(const Tensor& t) { return t.dim() == 2 ? t : t.view({row_count(t), t.size(-1)}); }

Tensor as_rows_of(const Tensor& y, const Tensor& x) {
  if (x.dim() == 2) return y;
  at::DimVector shape(x.sizes());
  shape.back() = y.size(-1);
  return y.view(shape);
}

void check_inner(const char* op, const char* what, int64_t wanted, int64_t got) {
  LIGATURE_CHECK(wanted == got, "[", op, "] wanted ", what, " of ", wanted, ", got ", got);
}

// ATen writes a bias into every row of the result before it multiplies; oneDNN adds it in passing,
// to the same bits. Undefined where this does not run.
using PointwiseLinear = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                               c10::string_view, c10::List<std::optional<at::Scalar>>,
                               std::optional<c10::string_view>);

std::optional<c10::TypedOperatorHandle<PointwiseLinear>> find_pointwise_linear() {
#if defined(__x86_64__) && defined(__GNUC__)
  const bool runs = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
  if (!runs || !at::globalContext().hasMKLDNN()) return std::nullopt;
  const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (found) return found->typed<PointwiseLinear>();
#endif
  return std::nullopt;
}

Tensor linear_with_bias(const Tensor& x, const Tensor& w, const Tensor& bias) {
  const auto fits = [&](const Tensor& t) {
    return t.is_cpu() && t.scalar_type() == at::kBFloat16 && t.is_contiguous() && !t.is_neg() &&
           t.numel() > 0;
  };
  if (!fits(x) || !fits(w) || !fits(bias) || bias.dim() != 1 || bias.size(0) != w.size(0) ||
      !at::globalContext().userEnabledMkldnn()) {
    return {};
  }
  static const auto linear = find_pointwise_linear();
  if (!linear) return {};
  const at::AutoDispatchBelowAutograd below;
  return linear->call(x, w, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// alpha * a b + add for matrices a, b and an `add` that may be absent, a vector or a matrix.
Tensor product(const Tensor& a, const Tensor& b, const Tensor& add, double alpha) {
  if (add.defined()) return at::addmm(add, a, b, 1, alpha);
  if (alpha == 1.0) return at::mm(a, b);
  Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  at::addmm_out(y, y, a, b, 0, alpha);
  return y;
}

// cuBLASLt takes what has the operands' dtype and just the result's shape; ATen broadcasts the
// rest, or says what is wrong with it.
bool is_vector(const Tensor& t, const Tensor& like, int64_t n) {
  return !t.defined() || (t.dim() == 1 && t.size(0) == n && t.scalar_type() == like.scalar_type() &&
                          t.device() == like.device() && !t.is_neg());
}

bool is_matrix(const Tensor& t, const Tensor& like, int64_t rows, int64_t columns) {
  return !t.defined() ||
         (t.dim() > 0 && t.size(-1) == columns && t.numel() == rows * columns &&
          t.scalar_type() == like.scalar_type() && t.device() == like.device() && !t.is_neg());
}

/// A product and who makes it. A tensor without memory stands for one elsewhere: the name is of
/// what would make that one.
class Maker {
 public:
  template <typename MakeProduct>
  Maker(const Tensor& x, bool on_cuda, const MakeProduct& make_product) : on_cuda_(on_cuda) {
    const bool without_memory = x.is_meta();
    if (!x.is_cpu() && !without_memory) return;
    if (without_memory && device_behind(x) != at::kCPU) {
      named_cuda_ = device_behind(x) == at::kCUDA && cuda::has_gemm(x.scalar_type());
      return;
    }
    product_ = make_product();
    named_cpu_ = cpu::runs_multiply(product_);
    on_cpu_ = named_cpu_ && !without_memory && cpu::has_memory(product_);
  }

  /// With a result that is there already.
  void set_result(const Tensor& out) {
    if (!named_cpu_) return;
    result_ = cpu::Matrix::of_result(out);
    named_cpu_ = cpu::runs_multiply(product_, result_);
    on_cpu_ = on_cpu_ && named_cpu_;
  }

  bool on_cpu() const { return on_cpu_; }
  const char* name() const {
    return on_cuda_ || named_cuda_ ? "cublaslt" : named_cpu_ ? "cpu" : "aten";
  }

  void multiply() const { cpu::multiply(product_, result_); }
  Tensor multiply(Tensor out) const {
    cpu::multiply(product_, cpu::Matrix::of_result(out));
    return out;
  }

 private:
  cpu::Product product_;
  cpu::Matrix result_;
  bool on_cuda_ = false, on_cpu_ = false;
  bool named_cuda_ = false, named_cpu_ = false;
};

Tensor empty_like(const Tensor& x, at::IntArrayRef shape) {
  if (x.is_cpu()) return cpu::new_tensor(shape, x.scalar_type());
  return at::empty(shape, x.options());
}

/// dy^T x, added to `out` if it is to be.
cpu::Product weight_product(const Tensor& dy, const Tensor& x, bool accumulate, const Tensor& out,
                            double alpha) {
  using cpu::Matrix;
  return {Matrix(dy).turned(), Matrix(x).turned(), {}, accumulate ? Matrix(out) : Matrix(), alpha};
}

}  // namespace

void check_product(const char* op, const Tensor& x, const Tensor& w, int64_t inner) {
  LIGATURE_CHECK(w.dim() == 2, "[", op, "] wanted w with 2 dimensions, got ", w.dim());
  LIGATURE_CHECK(x.dim() > 0, "[", op, "] wanted an input with at least one dimension, got none");
  LIGATURE_CHECK(x.size(-1) == w.size(inner), "[", op,
                 "] wanted an input with a last dimension of ", w.size(inner), ", got ",
                 x.size(-1));
}

Tensor rows_like(const Tensor& x, int64_t columns) {
  at::DimVector shape(x.sizes());
  shape.back() = columns;
  return empty_like(x, shape);
}

Tensor linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& add,
                      double alpha) {
  const bool on_cuda = cuda::runs_gemm(x, w) && is_vector(bias, x, w.size(0)) &&
                       is_matrix(add, x, row_count(x), w.size(0));
  const Maker maker(x, on_cuda, [&] {
    using cpu::Matrix;
    return cpu::Product{Matrix(x), Matrix(w), Matrix(bias), Matrix(add), alpha};
  });
  KernelScope scope("linear_forward", maker.name());
  scope.gemm(x.numel(), w.size(0));
  check_inner("linear_forward", "x with a last dimension", w.size(1), x.size(-1));
  if (on_cuda) return cuda::linear_forward(x, w, bias, add, alpha);
  if (maker.on_cpu()) return maker.multiply(rows_like(x, w.size(0)));
  if (bias.defined() && add.defined()) {
    Tensor y = at::add(add, bias);
    linear_forward_add_(y, x, w, {}, alpha);
    return y;
  }
  if (bias.defined() && alpha == 1.0) {
    const Tensor y = linear_with_bias(as_matrix(x), w, bias);
    if (y.defined()) return as_rows_of(y, x);
  }
  const Tensor addend = add.defined() ? as_matrix(add) : bias;
  return as_rows_of(product(as_matrix(x), w.t(), addend, alpha), x);
}

void linear_forward_add_(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias,
                         double alpha) {
  const bool on_cuda = cuda::runs_gemm(x, w) && is_vector(bias, x, w.size(0)) &&
                       is_matrix(y, x, row_count(x), w.size(0));
  Maker maker(x, on_cuda, [&] {
    using cpu::Matrix;
    return cpu::Product{Matrix(x), Matrix(w), Matrix(bias), Matrix(y), alpha};
  });
  maker.set_result(y);
  KernelScope scope("linear_forward_add_", maker.name());
  scope.gemm(x.numel(), w.size(0));
  check_inner("linear_forward_add_", "x with a last dimension", w.size(1), x.size(-1));
  if (on_cuda) return cuda::linear_forward_add_(y, x, w, bias, alpha);
  if (maker.on_cpu()) return maker.multiply();
  if (bias.defined()) y.add_(bias);
  as_matrix(y).addmm_(as_matrix(x), w.t(), 1, alpha);
}

Tensor linear_input_grad(const Tensor& dy, const Tensor& w, const Tensor& add, double alpha) {
  const bool on_cuda = cuda::runs_gemm(dy, w) && is_matrix(add, dy, row_count(dy), w.size(1));
  const Maker maker(dy, on_cuda, [&] {
    using cpu::Matrix;
    return cpu::Product{Matrix(dy), Matrix(w).turned(), {}, Matrix(add), alpha};
  });
  KernelScope scope("linear_input_grad", maker.name());
  scope.gemm(dy.numel(), w.size(1));
  check_inner("linear_input_grad", "dy with a last dimension", w.size(0), dy.size(-1));
  if (on_cuda) return cuda::linear_input_grad(dy, w, add, alpha);
  if (maker.on_cpu()) return maker.multiply(rows_like(dy, w.size(1)));
  const Tensor addend = add.defined() ? as_matrix(add) : add;
  return as_rows_of(product(as_matrix(dy), w, addend, alpha), dy);
}

Tensor linear_weight_grad(const Tensor& dy, const Tensor& x, double alpha) {
  const bool on_cuda = cuda::runs_gemm(dy, x) && row_count(dy) == row_count(x);
  const Maker maker(dy, on_cuda, [&] { return weight_product(dy, x, false, {}, alpha); });
  KernelScope scope("linear_weight_grad", maker.name());
  scope.gemm(dy.numel(), x.size(-1));
  if (on_cuda) return cuda::linear_weight_grad(dy, x, alpha);
  if (maker.on_cpu()) return maker.multiply(empty_like(dy, {dy.size(-1), x.size(-1)}));
  return product(as_matrix(dy).t(), as_matrix(x), {}, alpha);
}

void linear_weight_grad_into(Tensor& out, const Tensor& dy, const Tensor& x, bool accumulate,
                             double alpha) {
  const bool on_cuda = cuda::runs_gemm(dy, x) && row_count(dy) == row_count(x) &&
                       cuda::runs_gemm(out, out) && out.device() == dy.device() && out.dim() == 2 &&
                       out.size(0) == dy.size(-1) && out.size(1) == x.size(-1);
  Maker maker(dy, on_cuda, [&] { return weight_product(dy, x, accumulate, out, alpha); });
  maker.set_result(out);
  KernelScope scope("linear_weight_grad_into", maker.name());
  scope.gemm(dy.numel(), x.size(-1));
  if (on_cuda) return cuda::linear_weight_grad_into(out, dy, x, accumulate, alpha);
  if (maker.on_cpu()) return maker.multiply();
  Tensor dyt = as_matrix(dy).t();
  Tensor x2 = as_matrix(x);
  const double beta = accumulate ? 1.0 : 0.0;
  if (out.scalar_type() != dyt.scalar_type()) {
    if (out.is_cuda()) {
      at::addmm_out(out, out, dyt, x2, out.scalar_type(), beta, alpha);
      return;
    }
    dyt = dyt.to(out.scalar_type());
    x2 = x2.to(out.scalar_type());
  }
  at::addmm_out(out, out, dyt, x2, beta, alpha);
}

}  // namespace ligature::kernels
