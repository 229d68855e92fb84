// A bias through ATen.
#include "ligature/backend/aten/bias.h"

#include <ATen/ops/add.h>
#include <ATen/ops/sum.h>

#include "ligature/backend/aten/compute.h"

namespace ligature::aten {

Tensor bias_forward(const Tensor& x, const Tensor& b) { return at::add(x, b).to(x.scalar_type()); }

Tensor bias_backward(const Tensor& dy, int64_t features) {
  const int64_t rows = features > 0 ? dy.numel() / features : 0;
  return at::sum(dy.view({rows, features}), {0}, false, compute_dtype(dy.scalar_type()))
      .to(dy.scalar_type());
}

}  // namespace ligature::aten
