// The activations through ATen: for each kind its value and partial derivatives as tensors.
#include "ligature/backend/aten/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include <utility>

#include "ligature/backend/aten/compute.h"
#include "ligature/check.h"

namespace ligature::aten {
namespace {

using kernels::ActivationKind;
using kernels::is_gated;

// d/da and d/db are left undefined unless asked for; db only exists for gated kinds.
struct Partials {
  Tensor y, da, db;
};

// x sigmoid(k x).
Partials scaled_silu(const Tensor& x, double k, bool derivative) {
  const Tensor s = at::sigmoid(x * k);
  Partials result{x * s, {}, {}};
  if (derivative) result.da = s + k * (result.y * (1 - s));  // k x may be infinite
  return result;
}

struct GELU {
  // Beyond 1000 the derivative is 0 or 1; torch's is no number where x^2 overflows. At infinity it
  // is none, as in torch: x - x says so.
  static Partials of(const Tensor& x, const ActivationSpec&, bool derivative) {
    if (!derivative) return {at::gelu(x, "tanh"), {}, {}};
    const Tensor near = at::clamp(x, -1000.0, 1000.0);
    return {at::gelu(x, "tanh"), at::gelu_backward(at::ones_like(x), near, "tanh") + (x - x), {}};
  }
};

struct QGELU {
  static Partials of(const Tensor& x, const ActivationSpec&, bool derivative) {
    return scaled_silu(x, 1.702, derivative);
  }
};

struct ReLU {
  // Not x > 0: as in torch, the gradient at NaN passes.
  static Partials of(const Tensor& x, const ActivationSpec&, bool derivative) {
    return {at::relu(x), derivative ? 1 - (x <= 0).to(x.scalar_type()) : Tensor(), {}};
  }
};

struct SReLU {
  static Partials of(const Tensor& x, const ActivationSpec&, bool derivative) {
    const Tensor r = at::relu(x);
    return {r * r, derivative ? 2 * r : Tensor(), {}};
  }
};

struct SiLU {
  static Partials of(const Tensor& x, const ActivationSpec&, bool derivative) {
    return scaled_silu(x, 1.0, derivative);
  }
};

struct Sigmoid {
  static Partials of(const Tensor& x, const ActivationSpec&, bool derivative) {
    const Tensor s = at::sigmoid(x);
    return {s, derivative ? s * (1 - s) : Tensor(), {}};
  }
};

/// act(a) * b.
template <class Gate>
struct Gated {
  static Partials of(const Tensor& a, const Tensor& b, const ActivationSpec& spec,
                     bool derivative) {
    const Partials gate = Gate::of(a, spec, derivative);
    return {gate.y * b, derivative ? gate.da * b : Tensor(), gate.y};
  }
};

struct ClampedSwiGLU {
  static Partials of(const Tensor& a, const Tensor& b, const ActivationSpec& spec,
                     bool derivative) {
    const Partials gate = scaled_silu(at::clamp_max(a, spec.limit), spec.alpha, derivative);
    const Tensor linear = at::clamp(b, -spec.limit, spec.limit) + spec.glu_linear_offset;
    Partials result{gate.y * linear, {}, {}};
    if (derivative) {
      result.da = at::where(a > spec.limit, 0.0, gate.da * linear);
      result.db = at::where(b.abs() <= spec.limit, gate.y, 0.0);
    }
    return result;
  }
};

struct SiTUGLU {
  static Partials of(const Tensor& a, const Tensor& b, const ActivationSpec& spec,
                     bool derivative) {
    const Tensor ta = at::tanh(a / spec.beta1);
    const Tensor tb = at::tanh(b / spec.beta2);
    const Tensor s = at::sigmoid(a);
    const Tensor gate = spec.beta1 * ta * s;
    const Tensor linear = spec.beta2 * tb;
    Partials result{gate * linear, {}, {}};
    if (derivative) {
      result.da = ((1 - ta * ta) * s + gate * (1 - s)) * linear;
      result.db = gate * (1 - tb * tb);
    }
    return result;
  }
};

// x as [rows, blocks, 2, block] for gated kinds, [rows, 1, features] else; results drop the 2.
Tensor as_blocks(const Tensor& x, const ActivationSpec& spec) {
  const int64_t features = x.size(-1);
  const int64_t rows = features > 0 ? x.numel() / features : 0;
  if (!is_gated(spec.kind)) return x.view({rows, 1, features});
  const int64_t block = spec.glu_interleave_size > 0 ? spec.glu_interleave_size : features / 2;
  return x.view({rows, block > 0 ? features / (2 * block) : 1, 2, block});
}

Partials evaluate(const Tensor& x, const ActivationSpec& spec, bool derivative) {
  const Tensor blocks = as_blocks(to_compute(x, x), spec);
  const auto a = [&] { return blocks.select(2, 0); };
  const auto b = [&] { return blocks.select(2, 1); };
  switch (spec.kind) {
#define LIGATURE_PLAIN(Name, ...) \
  case ActivationKind::Name:      \
    return Name::of(blocks, spec, derivative);
#define LIGATURE_GATED(Name, Options, Gate) \
  case ActivationKind::Name:                \
    return Gated<Gate>::of(a(), b(), spec, derivative);
#define LIGATURE_OWN(Name, ...) \
  case ActivationKind::Name:    \
    return Name::of(a(), b(), spec, derivative);
    LIGATURE_ACTIVATIONS(LIGATURE_PLAIN, LIGATURE_GATED, LIGATURE_OWN)
#undef LIGATURE_PLAIN
#undef LIGATURE_GATED
#undef LIGATURE_OWN
  }
  LIGATURE_CHECK(false, "[activation] wanted a known kind, got ", static_cast<int>(spec.kind));
}

Tensor row_factors(const Tensor& scales, const Tensor& x) {
  return to_compute(scales, x).view({-1, 1, 1});
}

}  // namespace

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  Tensor y = evaluate(x, spec, false).y;
  if (scales.defined()) y = y * row_factors(scales, x);
  at::DimVector shape(x.sizes());
  if (is_gated(spec.kind)) shape.back() /= 2;
  return y.to(x.scalar_type()).reshape(shape);
}

Tensor activation_forward_(Tensor& x, const ActivationSpec& spec) {
  x.copy_(aten::activation_forward(x, spec, {}));
  return x;
}

ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x) {
  const Partials p = evaluate(x, spec, true);
  const Tensor dy_blocks = to_compute(dy, x).view(p.y.sizes());
  const Tensor g = scales.defined() ? dy_blocks * row_factors(scales, x) : dy_blocks;
  Tensor dx = is_gated(spec.kind) ? at::stack({g * p.da, g * p.db}, 2) : g * p.da;
  ActivationBackward result;
  if (need_dscales) {
    result.dscales = (dy_blocks * p.y).sum({1, 2}).to(scales.scalar_type()).view(scales.sizes());
  }
  if (need_dbias) result.dbias = dx.sum({0}).view({-1}).to(x.scalar_type());
  result.dx = dx.to(x.scalar_type()).view(x.sizes());
  if (over_x) result.dx = x.copy_(result.dx);
  return result;
}

ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x) {
  Tensor y = aten::activation_forward(x, spec, {});
  ActivationBackward grads = aten::activation_backward(dy, x, spec, {}, false, need_dbias, over_x);
  if (over_dy && dy.scalar_type() == y.scalar_type()) y = dy.view(y.sizes()).copy_(y);
  return {std::move(y), std::move(grads.dx), std::move(grads.dbias)};
}

}  // namespace ligature::aten
