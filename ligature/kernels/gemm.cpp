// Checks of sizes; GEMMs are the backend's where it takes the operands, and ATen's otherwise.
#include "ligature/kernels/gemm.h"

#include <ATen/ops/empty.h>

#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

void check_inner(const char* op, const char* what, int64_t wanted, int64_t got) {
  LIGATURE_CHECK(wanted == got, "[", op, "] wanted ", what, " of ", wanted, ", got ", got);
}

/// A tensor without memory stands for one elsewhere: the name is of what would make that one.
const char* name_of(const GemmDesc& desc) {
  const Backend& backend = backend_behind(desc.a);
  const char* own = backend.gemm_name != nullptr ? backend.gemm_name(desc) : nullptr;
  return own != nullptr ? own : "aten";
}

Tensor run(const GemmDesc& desc) {
  const Backend& backend = backend_for(desc.a);
  if (backend.gemm != nullptr) {
    Tensor y = backend.gemm(desc);
    if (y.defined()) return y;
  }
  return aten_backend().gemm(desc);
}

const Tensor kNone;

const char* epilogue_name(const GemmDesc& desc) {
  switch (desc.epilogue) {
    case Epilogue::Activation:
      return is_gated(desc.activation->kind) ? "linear_gated_forward" : "linear_activated_forward";
    case Epilogue::ActivationGrad:
      return is_gated(desc.activation->kind) ? "linear_gated_backward"
                                             : "linear_activated_backward";
    case Epilogue::BiasGrad:
      return "linear_weight_bias_grad";
    case Epilogue::None:
      break;
  }
  return "linear";
}

/// Columns of z for each column of the activation.
int64_t gates(const ActivationSpec& activation) { return is_gated(activation.kind) ? 2 : 1; }

void check(const char* op, const GemmDesc& desc) {
  if (desc.kind == LinearGemm::WeightGrad) {
    LIGATURE_CHECK(desc.a.dim() > 0 && desc.b.dim() > 0 && row_count(desc.a) == row_count(desc.b),
                   "[", op, "] wanted as many rows of dy and x, got shapes ", desc.a.sizes(),
                   " and ", desc.b.sizes());
    return;
  }
  const bool forward = desc.kind == LinearGemm::Forward;
  check_product(op, desc.a, desc.b, forward ? 1 : 0);
  if (forward) {
    const int64_t columns = desc.b.size(0);
    LIGATURE_CHECK(columns % gates(*desc.activation) == 0, "[", op,
                   "] wanted a weight with an even number of rows, got ", columns);
    LIGATURE_CHECK(!desc.bias.defined() || (desc.bias.dim() == 1 && desc.bias.size(0) == columns),
                   "[", op, "] wanted bias of [", columns, "], got ",
                   desc.bias.defined() ? desc.bias.sizes() : at::IntArrayRef());
    return;
  }
  at::DimVector wanted(desc.a.sizes());
  wanted.back() = gates(*desc.activation) * desc.b.size(1);
  LIGATURE_CHECK(desc.z->sizes() == wanted, "[", op, "] wanted z of shape ",
                 at::IntArrayRef(wanted), ", got ", desc.z->sizes());
}

GemmResult without_memory(const GemmDesc& desc) {
  GemmResult out;
  switch (desc.kind) {
    case LinearGemm::Forward:
      out.y = rows_like(desc.a, desc.b.size(0) / gates(*desc.activation));
      if (desc.need_z) out.z = rows_like(desc.a, desc.b.size(0));
      break;
    case LinearGemm::InputGrad:
      out.y = desc.over_z ? *desc.z : rows_like(desc.a, gates(*desc.activation) * desc.b.size(1));
      if (desc.need_activated) out.activated = rows_like(desc.a, desc.b.size(1));
      break;
    case LinearGemm::WeightGrad:
      out.y = at::empty({desc.a.size(-1), desc.b.size(-1)}, desc.a.options());
      out.dbias = at::empty({desc.a.size(-1)}, desc.a.options());
      break;
  }
  return out;
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
  return at::empty(shape, x.options());
}

int64_t row_count(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

bool has_epilogue(Epilogue epilogue, const ActivationSpec* activation, at::ScalarType dtype,
                  at::Device device) {
  const Backend& backend = backend_for(device_behind(device).type(), dtype);
  return backend.has_epilogue != nullptr &&
         backend.has_epilogue(epilogue, activation, dtype, device);
}

bool pays(const GemmDesc& desc) {
  const Backend& backend = backend_behind(desc.a);
  return backend.pays != nullptr && backend.pays(desc);
}

GemmResult gemm_with_epilogue(const GemmDesc& desc) {
  const char* op = epilogue_name(desc);
  KernelScope scope(op, desc.a);
  check(op, desc);
  scope.gemm(desc.a.numel(), desc.kind == LinearGemm::Forward ? desc.b.size(0) : desc.b.size(-1));
  if (desc.a.is_meta()) return without_memory(desc);
  return own_kernel(op, desc.a, &Backend::gemm_with_epilogue)(desc);
}

GemmDesc activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                           const ActivationSpec& activation, bool need_z) {
  GemmDesc desc{LinearGemm::Forward, x, w, bias, kNone};
  desc.epilogue = Epilogue::Activation;
  desc.activation = &activation;
  desc.need_z = need_z;
  return desc;
}

GemmDesc activated_input_grad(const Tensor& dy, const Tensor& w, const Tensor& z,
                              const ActivationSpec& activation, bool need_activated, bool over_z) {
  GemmDesc desc{LinearGemm::InputGrad, dy, w, kNone, kNone};
  desc.epilogue = Epilogue::ActivationGrad;
  desc.activation = &activation;
  desc.z = &z;
  desc.need_activated = need_activated;
  desc.over_z = over_z;
  return desc;
}

GemmDesc weight_and_bias_grad(const Tensor& dy, const Tensor& x) {
  GemmDesc desc{LinearGemm::WeightGrad, dy, x, kNone, kNone};
  desc.epilogue = Epilogue::BiasGrad;
  return desc;
}

Tensor linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& add,
                      double alpha) {
  const GemmDesc desc{LinearGemm::Forward, x, w, bias, add, alpha};
  KernelScope scope("linear_forward", [&] { return name_of(desc); });
  scope.gemm(x.numel(), w.size(0));
  check_inner("linear_forward", "x with a last dimension", w.size(1), x.size(-1));
  return run(desc);
}

void linear_forward_add_(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias,
                         double alpha) {
  const GemmDesc desc{LinearGemm::Forward, x, w, bias, kNone, alpha, &y, true};
  KernelScope scope("linear_forward_add_", [&] { return name_of(desc); });
  scope.gemm(x.numel(), w.size(0));
  check_inner("linear_forward_add_", "x with a last dimension", w.size(1), x.size(-1));
  run(desc);
}

Tensor linear_input_grad(const Tensor& dy, const Tensor& w, const Tensor& add, double alpha) {
  const GemmDesc desc{LinearGemm::InputGrad, dy, w, kNone, add, alpha};
  KernelScope scope("linear_input_grad", [&] { return name_of(desc); });
  scope.gemm(dy.numel(), w.size(1));
  check_inner("linear_input_grad", "dy with a last dimension", w.size(0), dy.size(-1));
  return run(desc);
}

Tensor linear_weight_grad(const Tensor& dy, const Tensor& x, double alpha) {
  const GemmDesc desc{LinearGemm::WeightGrad, dy, x, kNone, kNone, alpha};
  KernelScope scope("linear_weight_grad", [&] { return name_of(desc); });
  scope.gemm(dy.numel(), x.size(-1));
  return run(desc);
}

void linear_weight_grad_into(Tensor& out, const Tensor& dy, const Tensor& x, bool accumulate,
                             double alpha) {
  const GemmDesc desc{LinearGemm::WeightGrad, dy, x, kNone, kNone, alpha, &out, accumulate};
  KernelScope scope("linear_weight_grad_into", [&] { return name_of(desc); });
  scope.gemm(dy.numel(), x.size(-1));
  run(desc);
}

}  // namespace ligature::kernels
