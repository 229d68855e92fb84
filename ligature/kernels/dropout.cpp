// p = 1 and empty inputs are handled here: torch gives NaN for dropped infinities at p = 1, and a
// mask of the wrong dtype for empty inputs. What no backend serves, as float64, is torch's, and so
// are its masks.
#include "ligature/kernels/dropout.h"

#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

void check_probability(const char* op, double p) {
  LIGATURE_CHECK(p >= 0.0 && p <= 1.0, "[", op, "] wanted p in [0, 1], got ", p);
}

/// The one that has a kernel for it, or for what a tensor without memory stands for; null: torch's.
const Backend* backend_of(const Tensor& x, double p) {
  if (p == 1.0 || x.numel() == 0) return nullptr;
  const Backend& backend = backend_behind(x);
  const bool has = backend.has_dropout != nullptr && backend.has_dropout(x.scalar_type());
  return has ? &backend : nullptr;
}

}  // namespace

DropoutForward dropout_forward(const Tensor& x, double p) {
  const Backend* backend = backend_of(x, p);
  KernelScope scope("dropout_forward", backend != nullptr ? backend->name : "aten");
  check_probability("dropout_forward", p);
  if (p == 1.0 || x.numel() == 0) {
    return {at::zeros_like(x), at::zeros_like(x, x.options().dtype(at::kBool))};
  }
  if (x.is_meta()) {
    if (backend == nullptr) scope.stands_for("aten::native_dropout");
    return backend_for(x).dropout_forward(x, p);
  }
  if (backend != nullptr) return backend->dropout_forward(x, p);
  auto [y, mask] = at::native_dropout(x, p, true);
  return {std::move(y), std::move(mask)};
}

Tensor dropout_backward(const Tensor& dy, const Tensor& mask, double p) {
  const Backend* backend = backend_of(dy, p);
  KernelScope scope("dropout_backward", backend != nullptr ? backend->name : "aten");
  check_probability("dropout_backward", p);
  if (p == 1.0) return at::zeros_like(dy);
  if (dy.is_meta()) {
    if (backend == nullptr) scope.stands_for("aten::native_dropout_backward");
    return backend_for(dy).dropout_backward(dy, mask, p);
  }
  if (backend != nullptr) return backend->dropout_backward(dy, mask, p);
  return at::native_dropout_backward(dy, mask, 1.0 / (1.0 - p));
}

}  // namespace ligature::kernels
