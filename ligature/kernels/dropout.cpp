// p = 1 and empty inputs are handled here: torch gives NaN for dropped infinities at p = 1, and a
// mask of the wrong dtype for empty inputs. What no backend serves, as float64, is torch's, and so
// are its masks.
#include "ligature/kernels/dropout.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/zeros_like.h>

#include <string_view>
#include <utility>

#include "ligature/backend/cpu/dropout.h"
#include "ligature/backend/cuda/dropout.h"
#include "ligature/backend/cuda/runs.h"
#include "ligature/check.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

void check_probability(const char* op, double p) {
  LIGATURE_CHECK(p >= 0.0 && p <= 1.0, "[", op, "] wanted p in [0, 1], got ", p);
}

/// The backend that has a kernel for it, or for what a tensor without memory stands for.
const char* backend_of(const Tensor& x, double p) {
  if (p == 1.0 || x.numel() == 0) return "aten";
  const at::DeviceType device = device_behind(x);
  if (device == at::kCPU && x.scalar_type() != at::kDouble) return "cpu";
  return device == at::kCUDA && cuda::computes_in(x.scalar_type()) ? "cuda" : "aten";
}

}  // namespace

DropoutForward dropout_forward(const Tensor& x, double p) {
  const std::string_view backend = backend_of(x, p);
  KernelScope scope("dropout_forward", backend.data());
  check_probability("dropout_forward", p);
  if (p == 1.0 || x.numel() == 0) {
    return {at::zeros_like(x), at::zeros_like(x, x.options().dtype(at::kBool))};
  }
  if (x.is_meta()) {
    if (backend == "aten") scope.stands_for("aten::native_dropout");
    return {at::empty_like(x), at::empty_like(x, x.options().dtype(at::kBool))};
  }
  if (backend == "cpu") return cpu::dropout_forward(x, p);
  if (backend == "cuda") return cuda::dropout_forward(x, p);
  auto [y, mask] = at::native_dropout(x, p, true);
  return {std::move(y), std::move(mask)};
}

Tensor dropout_backward(const Tensor& dy, const Tensor& mask, double p) {
  const std::string_view backend = backend_of(dy, p);
  KernelScope scope("dropout_backward", backend.data());
  check_probability("dropout_backward", p);
  if (p == 1.0) return at::zeros_like(dy);
  if (dy.is_meta()) {
    if (backend == "aten") scope.stands_for("aten::native_dropout_backward");
    return at::empty_like(dy);
  }
  if (backend == "cpu") return cpu::dropout_backward(dy, mask, p);
  if (backend == "cuda") return cuda::dropout_backward(dy, mask, p);
  return at::native_dropout_backward(dy, mask, 1.0 / (1.0 - p));
}

}  // namespace ligature::kernels
