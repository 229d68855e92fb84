// Activations where float overflows on the way: against the formula in float64, which does not.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernel_test_support.h"
#include "ligature/backend/aten/activation.h"
#include "ligature/kernels/activation.h"
#include "ligature/kernels/bias_activation.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Both signs of every value that the dtype holds, infinity among them.
Tensor extremes(at::ScalarType dtype, bool infinite) {
  std::vector<double> values = {0,    1,    20,   40,   80,   87,   88,   88.3, 88.5,
                                89,   95,   104,  110,  1000, 6e4,  1e15, 1e18, 1e19,
                                2e19, 1e20, 1e30, 1e36, 1e37, 1e38, 2e38, 3e38, 3.3e38};
  if (dtype == at::kDouble) {
    for (const double v : {1e100, 1e150, 1e154, 1e160, 1e300, 1.6e308}) values.push_back(v);
  }
  std::vector<double> both;
  const double largest = dtype == at::kHalf ? 65504 : kInf;
  for (const double v : values) {
    if (v <= largest) both.insert(both.end(), {v, -v});
  }
  if (infinite) both.insert(both.end(), {kInf, -kInf});
  both.push_back(std::nan(""));
  return at::tensor(both, at::kDouble).to(dtype);
}

struct Expected {
  double y, dy;
};

/// act(a) and act'(a) of a gate, without an overflow on the way. At infinity as torch has it.
Expected gate(const ActivationSpec& spec, double a) {
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  const auto silu = [&](double x, double k) -> Expected {
    const double s = sigmoid(k * x);
    return {x * s, s + k * (x * s * (1 - s))};
  };
  switch (spec.kind) {
    case ActivationKind::GELU:
    case ActivationKind::GEGLU: {
      const double held = std::isnan(a) ? a : std::clamp(a, -1e3, 1e3);
      const double c = std::sqrt(2 / M_PI);
      const double t = std::tanh(c * (held + 0.044715 * held * held * held));
      return {0.5 * a * (1 + t),
              0.5 * (1 + t) + 0.5 * a * (1 - t * t) * c * (1 + 3 * 0.044715 * held * held)};
    }
    case ActivationKind::QGELU:
    case ActivationKind::QGEGLU:
      return silu(a, 1.702);
    case ActivationKind::SiLU:
    case ActivationKind::SwiGLU:
      return silu(a, 1);
    case ActivationKind::ReLU:
    case ActivationKind::ReGLU:
      return {a <= 0 ? 0 : a, a <= 0 ? 0.0 : 1.0};
    case ActivationKind::SReLU:
    case ActivationKind::SReGLU:
      return {a <= 0 ? 0 : a * a, a <= 0 ? 0 : 2 * a};
    case ActivationKind::GLU: {
      const double s = sigmoid(a);
      return {s, s * (1 - s)};
    }
    case ActivationKind::ClampedSwiGLU: {
      const Expected held = silu(a > spec.limit ? spec.limit : a, spec.alpha);
      return {held.y, a > spec.limit ? 0 : held.dy};
    }
    case ActivationKind::SiTUGLU: {
      const double t = std::tanh(a / spec.beta1), s = sigmoid(a);
      return {spec.beta1 * t * s, (1 - t * t) * s + spec.beta1 * t * s * (1 - s)};
    }
  }
  throw std::logic_error("kind");
}

/// The linear unit's value and derivative.
Expected unit(const ActivationSpec& spec, double b) {
  if (spec.kind == ActivationKind::ClampedSwiGLU) {
    return {std::clamp(b, -spec.limit, spec.limit) + spec.glu_linear_offset, 1};
  }
  if (spec.kind != ActivationKind::SiTUGLU) return {b, 1};
  const double t = std::tanh(b / spec.beta2);
  return {spec.beta2 * t, 1 - t * t};
}

template <class F>
Tensor mapped(const Tensor& values, const F& f) {
  Tensor out = values.to(at::kCPU, at::kDouble).clone();
  for (int64_t i = 0; i < out.numel(); ++i)
    out.data_ptr<double>()[i] = f(out.data_ptr<double>()[i]);
  return out;
}

/// Rounded to the dtype once, as a result is; what is too large for it becomes infinite.
void expect_rounded(const Tensor& actual, const Tensor& expected, const std::string& where) {
  const auto dtype = actual.scalar_type();
  // 1e-35: what the smallest exponentials lose. 1 - sigmoid and 1 - tanh^2 are as exact as numbers
  // near 1.
  const bool is_difference =
      where.find(" GLU ") != std::string::npos || where.find("SiTUGLU") != std::string::npos;
  const double near_one = dtype == at::kDouble ? 1e-14 : 1e-6;
  Tolerance allowed{tolerance(dtype).rtol, dtype == at::kHalf ? 1e-6
                                           : is_difference    ? near_one
                                                              : 1e-35};
  if (dtype == at::kFloat) allowed.rtol = 1e-5;
  expect_close(actual.cpu(), expected.to(dtype).to(at::kDouble), dtype, where, allowed);
}

constexpr double kLinear =
    2;  // b of every gate, not below 1: what overflows on the way is too large in the end
constexpr double kScale = 2;

struct Kernels {
  const char* name;
  decltype(&kernels::activation_forward) forward;
  decltype(&kernels::activation_backward) backward;
  decltype(&kernels::activation_recompute) recompute;
};
const Kernels kBoth[] = {
    {"dispatched", kernels::activation_forward, kernels::activation_backward,
     kernels::activation_recompute},
    {"aten", ligature::aten::activation_forward, ligature::aten::activation_backward,
     ligature::aten::activation_recompute}};

void check(const Kernels& k, const ActivationSpec& spec, const Tensor& a, bool scaled) {
  const bool gated = kernels::is_gated(spec.kind);
  const std::string where = std::string(k.name) + " " + kernels::activation_name(spec.kind) + " " +
                            c10::toString(a.scalar_type()) + " " + a.device().str() +
                            (scaled ? " scaled" : "");
  const Tensor gates = a.view({1, -1});
  const Tensor x = gated ? at::cat({gates, at::full_like(gates, kLinear)}, 1) : gates;
  const Tensor scales = scaled ? at::full({1}, kScale, x.options()) : Tensor();
  const double factor = scaled ? kScale : 1;
  const Expected b = gated ? unit(spec, kLinear) : Expected{1, 0};

  const Tensor y = mapped(gates, [&](double v) { return gate(spec, v).y * b.y * factor; });
  const Tensor da = mapped(gates, [&](double v) { return gate(spec, v).dy * b.y * factor; });
  const Tensor db = mapped(gates, [&](double v) { return gate(spec, v).y * b.dy * factor; });
  const Tensor dx = gated ? at::cat({da, db}, 1) : da;

  expect_rounded(k.forward(x, spec, scales), y, where + " y");
  const Tensor dy = at::ones_like(gates);
  const auto grads = k.backward(dy, x, spec, scales, false, true, false);
  expect_rounded(grads.dx, dx, where + " dx");
  expect_rounded(grads.dbias.view({1, -1}), dx, where + " dbias");
  if (scaled) return;
  const auto both = k.recompute(dy.clone(), x.clone(), spec, false, false, false);
  expect_rounded(both.y, y, where + " recomputed y");
  expect_rounded(both.dx, dx, where + " dx beside y");
  if (k.forward != kernels::activation_forward) return;
  const Tensor zeros = at::zeros({x.size(1)}, x.options());
  expect_rounded(kernels::bias_activation_forward(x, zeros, spec, false).y, y,
                 where + " behind a bias");
}

TEST(KernelActivationExtremes, AreAsInFloat64) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    const Tensor a = extremes(dtype, false).to(device);
    for (const Kernels& k : kBoth) {
      for (const auto kind : kernels::kActivationKinds) {
        check(k, {kind}, a, false);
        if (kernels::is_gated(kind)) check(k, {kind}, a, true);
      }
      check(k, {ActivationKind::SReLU}, a, true);
    }
  });
}

// Infinity times zero is no number, in torch's functions too.
TEST(KernelActivationExtremes, AreAsInTorchAtInfinity) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    const Tensor a = extremes(dtype, true).to(device);
    for (const Kernels& k : kBoth) {
      for (const auto kind : kernels::kActivationKinds) check(k, {kind}, a, false);
    }
  });
}

TEST(KernelActivationExtremes, LongRowsTakeTheSameFormulas) {
  for (const at::Device device : test_devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const Tensor a = extremes(dtype, false).repeat(100).to(device);
      for (const auto kind : kernels::kActivationKinds) check(kBoth[0], {kind}, a, false);
    }
  }
}

}  // namespace
