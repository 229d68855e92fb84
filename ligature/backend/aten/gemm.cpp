// Host time matters here: a training step of a small model makes these calls thousands of times, so
// each path is the fewest dispatches that do it.
#include "ligature/backend/aten/gemm.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

namespace ligature::aten {
namespace {

using at::Tensor;
using kernels::GemmDesc;
using kernels::LinearGemm;

Tensor as_matrix(const Tensor& t) {
  return t.dim() == 2 ? t : t.view({kernels::row_count(t), t.size(-1)});
}

Tensor as_rows_of(const Tensor& y, const Tensor& x) {
  if (x.dim() == 2) return y;
  at::DimVector shape(x.sizes());
  shape.back() = y.size(-1);
  return y.view(shape);
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

Tensor forward_add(Tensor y, const Tensor& x, const Tensor& w, double alpha) {
  as_matrix(y).addmm_(as_matrix(x), w.t(), 1, alpha);
  return y;
}

Tensor forward(const GemmDesc& d) {
  if (d.out != nullptr) {
    if (d.bias.defined()) d.out->add_(d.bias);
    return forward_add(*d.out, d.a, d.b, d.alpha);
  }
  if (d.bias.defined() && d.add.defined()) {
    return forward_add(at::add(d.add, d.bias), d.a, d.b, d.alpha);
  }
  if (d.bias.defined() && d.alpha == 1.0) {
    const Tensor y = linear_with_bias(as_matrix(d.a), d.b, d.bias);
    if (y.defined()) return as_rows_of(y, d.a);
  }
  const Tensor addend = d.add.defined() ? as_matrix(d.add) : d.bias;
  return as_rows_of(product(as_matrix(d.a), d.b.t(), addend, d.alpha), d.a);
}

Tensor input_grad(const GemmDesc& d) {
  const Tensor addend = d.add.defined() ? as_matrix(d.add) : d.add;
  return as_rows_of(product(as_matrix(d.a), d.b, addend, d.alpha), d.a);
}

Tensor weight_grad(const GemmDesc& d) {
  Tensor dyt = as_matrix(d.a).t(), x = as_matrix(d.b);
  if (d.out == nullptr) return product(dyt, x, {}, d.alpha);
  Tensor& out = *d.out;
  const double beta = d.accumulate ? 1.0 : 0.0;
  if (out.scalar_type() != dyt.scalar_type()) {
    if (out.is_cuda()) {
      at::addmm_out(out, out, dyt, x, out.scalar_type(), beta, d.alpha);
      return out;
    }
    dyt = dyt.to(out.scalar_type());
    x = x.to(out.scalar_type());
  }
  at::addmm_out(out, out, dyt, x, beta, d.alpha);
  return out;
}

}  // namespace

Tensor gemm(const GemmDesc& d) {
  switch (d.kind) {
    case LinearGemm::Forward:
      return forward(d);
    case LinearGemm::InputGrad:
      return input_grad(d);
    case LinearGemm::WeightGrad:
      break;
  }
  return weight_grad(d);
}

}  // namespace ligature::aten
