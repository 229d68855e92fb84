// Every activation against its formula in float64, differentiated by autograd, on every backend.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/backend/aten/activation.h"
#include "ligature/backend/cpu/activation.h"
#include "ligature/kernels/bias.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
namespace aten = ligature::aten;
using at::Tensor;
using kernels::ActivationBackward;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

Tensor tanh_gelu(const Tensor& x) {
  return 0.5 * x * (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

Tensor gate(const ActivationSpec& spec, const Tensor& a) {
  switch (spec.kind) {
    case ActivationKind::GELU:
    case ActivationKind::GEGLU:
      return tanh_gelu(a);
    case ActivationKind::QGELU:
    case ActivationKind::QGEGLU:
      return a * at::sigmoid(1.702 * a);
    case ActivationKind::ReLU:
    case ActivationKind::ReGLU:
      return at::relu(a);
    case ActivationKind::SReLU:
    case ActivationKind::SReGLU:
      return at::relu(a).square();
    case ActivationKind::SiLU:
    case ActivationKind::SwiGLU:
      return a * at::sigmoid(a);
    case ActivationKind::GLU:
      return at::sigmoid(a);
    case ActivationKind::ClampedSwiGLU: {
      const Tensor c = at::clamp_max(a, spec.limit);
      return c * at::sigmoid(spec.alpha * c);
    }
    case ActivationKind::SiTUGLU:
      return spec.beta1 * at::tanh(a / spec.beta1) * at::sigmoid(a);
  }
  throw std::logic_error("kind");
}

Tensor linear_units(const ActivationSpec& spec, const Tensor& b) {
  if (spec.kind == ActivationKind::ClampedSwiGLU) {
    return at::clamp(b, -spec.limit, spec.limit) + spec.glu_linear_offset;
  }
  if (spec.kind == ActivationKind::SiTUGLU) return spec.beta2 * at::tanh(b / spec.beta2);
  return b;
}

// Column by column: which input column holds the gate (or linear unit) of result j.
std::vector<int64_t> columns(int64_t features, int64_t interleave, bool linear) {
  const int64_t n = features / 2, block = interleave > 0 ? interleave : n;
  std::vector<int64_t> result;
  for (int64_t j = 0; j < n; ++j) {
    result.push_back(j / block * 2 * block + j % block + (linear ? block : 0));
  }
  return result;
}

Tensor formula(const ActivationSpec& spec, const Tensor& x) {
  if (!kernels::is_gated(spec.kind)) return gate(spec, x);
  const auto a = columns(x.size(-1), spec.glu_interleave_size, false);
  const auto b = columns(x.size(-1), spec.glu_interleave_size, true);
  return gate(spec, x.index_select(-1, at::tensor(a))) *
         linear_units(spec, x.index_select(-1, at::tensor(b)));
}

struct Backend {
  const char* name;
  decltype(&kernels::activation_forward) forward;
  decltype(&kernels::activation_backward) backward_to;
  decltype(&kernels::activation_recompute) recompute;

  ActivationBackward backward(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                              const Tensor& scales, bool need_dscales, bool need_dbias) const {
    return backward_to(dy, x, spec, scales, need_dscales, need_dbias, false);
  }
};

const Backend kBoth[] = {
    {"dispatched", kernels::activation_forward, kernels::activation_backward,
     kernels::activation_recompute},
    {"aten", aten::activation_forward, aten::activation_backward, aten::activation_recompute}};

std::vector<int64_t> without_last(at::IntArrayRef shape) {
  return {shape.begin(), shape.end() - 1};
}

/// Into memory that is given, and together with the forward's output: the same bits.
void check_memory(const Backend& k, const ActivationSpec& spec, const Tensor& dy, const Tensor& x,
                  const Tensor& y, const ActivationBackward& g, const Tensor& scales,
                  const std::string& where) {
  const Tensor over_x = x.clone();
  const ActivationBackward over =
      k.backward_to(dy, over_x, spec, scales, g.dscales.defined(), true, true);
  EXPECT_EQ(over.dx.data_ptr(), over_x.data_ptr()) << where;
  expect_same_bits(over.dx, g.dx, where + " dx over x");
  expect_same_bits(over.dbias, g.dbias, where + " dbias over x");
  if (g.dscales.defined()) expect_same_bits(over.dscales, g.dscales, where + " dscales over x");
  if (scales.defined()) return;
  for (const bool dbias : {false, true}) {
    for (const int which : {0, 1, 2, 3}) {
      const bool to_dy = which & 1, to_x = which & 2;
      const Tensor given_dy = dy.clone(), given_x = x.clone();
      const auto both = k.recompute(given_dy, given_x, spec, dbias, to_dy, to_x);
      const std::string how = where + (to_dy ? ", y over dy" : "") + (to_x ? ", dx over x" : "");
      expect_same_bits(both.y, y, how + ": y again");
      expect_same_bits(both.dx, g.dx, how + ": dx");
      EXPECT_EQ(both.dbias.defined(), dbias) << how;
      if (dbias) expect_same_bits(both.dbias, g.dbias, how + ": dbias");
      if (x.numel() == 0) continue;
      EXPECT_EQ(both.y.data_ptr() == given_dy.data_ptr(), to_dy) << how;
      EXPECT_EQ(both.dx.data_ptr() == given_x.data_ptr(), to_x) << how;
      if (!to_dy) expect_same_bits(given_dy, dy, how + ": dy is left alone");
      if (!to_x) expect_same_bits(given_x, x, how + ": x is left alone");
    }
  }
}

void check(const Backend& k, const ActivationSpec& spec, at::Device device, at::ScalarType dtype,
           at::IntArrayRef shape, bool scaled) {
  const Tensor x = random_tensor(shape, dtype, device, 2.0);
  const std::string where =
      describe(std::string(k.name) + " " + kernels::activation_name(spec.kind) + " interleave " +
                   std::to_string(spec.glu_interleave_size) + (scaled ? " scaled" : ""),
               device, dtype, shape);
  const Tensor scales = scaled ? random_tensor(without_last(shape), at::kFloat, device) : Tensor();

  const Tensor leaf = reference_leaf(x);
  Tensor expected = formula(spec, leaf);
  Tensor scales_leaf;
  if (scaled) {
    scales_leaf = reference_leaf(scales);
    expected = expected * scales_leaf.unsqueeze(-1);
  }
  const Tensor y = k.forward(x, spec, scales);
  expect_close(y, expected, dtype, where + " y");

  const Tensor dy = random_tensor(expected.sizes(), dtype, device);
  expected.backward(reference(dy));
  const ActivationBackward g = k.backward(dy, x, spec, scales, scaled, true);
  expect_close(g.dx, leaf.grad(), dtype, where + " dx");
  const Tensor dbias = leaf.grad().reshape({-1, shape.back()}).sum(0);
  expect_close(g.dbias, dbias, dtype, where + " dbias",
               tolerance_of_sum(dtype, x.numel() / shape.back()));
  if (scaled) {
    expect_close(g.dscales, scales_leaf.grad(), at::kFloat, where + " dscales",
                 tolerance_of_sum(at::kFloat, shape.back()));
  } else {
    EXPECT_FALSE(g.dscales.defined()) << where;
  }
  const ActivationBackward plain = k.backward(dy, x, spec, scales, false, false);
  expect_same_bits(plain.dx, g.dx, where + " dx alone");
  EXPECT_FALSE(plain.dbias.defined() || plain.dscales.defined()) << where;
  check_memory(k, spec, dy, x, y, g, scales, where);
}

TEST(ActivationTest, EveryKindForwardAndBackward) {
  for (const Backend& k : kBoth) {
    for_each_device_and_dtype([&](at::Device device, at::ScalarType dtype) {
      for (const ActivationKind kind : kernels::kActivationKinds) {
        for (const auto& shape : test_shapes(46)) {
          check(k, {.kind = kind}, device, dtype, shape, false);
          check(k, {.kind = kind}, device, dtype, shape, true);
        }
        check(k, {.kind = kind}, device, dtype, {3, 2200}, true);
      }
    });
  }
}

TEST(ActivationTest, Interleaved) {
  const std::vector<std::vector<int64_t>> shapes{{1, 192}, {0, 192}, {2, 5, 192}};
  for (const Backend& k : kBoth) {
    for_each_device_and_dtype([&](at::Device device, at::ScalarType dtype) {
      for (const ActivationKind kind :
           {ActivationKind::SwiGLU, ActivationKind::ClampedSwiGLU, ActivationKind::SiTUGLU}) {
        for (const int64_t n : {1, 4, 32}) {
          for (const auto& shape : shapes) {
            check(k, {.kind = kind, .glu_interleave_size = n}, device, dtype, shape, n == 4);
          }
        }
        // Short blocks, of which a piece holds several, and long ones.
        for (const int64_t n : {1, 3, 16, 600}) {
          check(k, {.kind = kind, .glu_interleave_size = n}, device, dtype, {3, 2400}, true);
        }
      }
    });
  }
}

TEST(ActivationTest, Options) {
  for (const Backend& k : kBoth) {
    for_each_device_and_dtype([&](at::Device device, at::ScalarType dtype) {
      const ActivationSpec clamped{.kind = ActivationKind::ClampedSwiGLU,
                                   .limit = 1.5,
                                   .alpha = 0.7,
                                   .glu_linear_offset = -2};
      check(k, clamped, device, dtype, {9, 34}, true);
      const ActivationSpec situ{.kind = ActivationKind::SiTUGLU, .beta1 = 1.5, .beta2 = 0.5};
      check(k, situ, device, dtype, {9, 34}, true);
    });
  }
}

TEST(ActivationTest, InPlace) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const ActivationKind kind : kernels::kActivationKinds) {
      Tensor x = random_tensor({5, 700}, dtype, device);
      if (kernels::is_gated(kind)) {
        EXPECT_THROW(kernels::activation_forward_(x, {.kind = kind}), c10::Error);
        continue;
      }
      const Tensor expected = kernels::activation_forward(x, {.kind = kind});
      const void* memory = x.data_ptr();
      const Tensor y = kernels::activation_forward_(x, {.kind = kind});
      expect_same_bits(y, expected, kernels::activation_name(kind));
      EXPECT_EQ(y.data_ptr(), memory);
      EXPECT_EQ(x.data_ptr(), memory);
    }
  });
}

TEST(ActivationTest, BordersAndExtremes) {
  const double limit = 7.0;
  for (const Backend& k : kBoth) {
    for (const at::Device device : test_devices()) {
      const Tensor zero = at::zeros({1, 1}, device), one = at::ones({1, 1}, device);
      EXPECT_EQ(
          k.backward(one, zero, {.kind = ActivationKind::ReLU}, {}, false, false).dx.item<float>(),
          0.0f);
      const Tensor far = at::tensor({-200.0f, -90.0f, 90.0f, 200.0f}).unsqueeze(0).to(device);
      for (const ActivationKind kind :
           {ActivationKind::GELU, ActivationKind::QGELU, ActivationKind::SiLU}) {
        const Tensor ends = at::tensor({0.0, 0.0, 90.0, 200.0}, at::kDouble).unsqueeze(0);
        expect_close(k.forward(far, {.kind = kind}, {}), ends, at::kFloat, "far y");
        const Tensor slopes = at::tensor({0.0, 0.0, 1.0, 1.0}, at::kDouble).unsqueeze(0);
        const auto g = k.backward(at::ones_like(far), far, {.kind = kind}, {}, false, false);
        expect_close(g.dx, slopes, at::kFloat, "far dx");
      }
      // At the limit itself the gradient passes, beyond it is zero, as for torch's clamp.
      const Tensor x = at::tensor({limit, limit + 1, 1.0, 1.0, 1.0, 1.0,  //
                                   1.0, 1.0, limit, -limit, limit + 1, -limit - 1},
                                  at::kDouble)
                           .unsqueeze(0);
      const ActivationSpec spec{.kind = ActivationKind::ClampedSwiGLU};
      const Tensor leaf = reference_leaf(x);
      formula(spec, leaf).sum().backward();
      const auto g = k.backward(at::ones({1, 6}, at::kDouble).to(device), x.to(device), spec, {},
                                false, false);
      expect_close(g.dx, leaf.grad(), at::kDouble, "clamp border");
      EXPECT_EQ(g.dx[0][1].item<double>(), 0.0);
      EXPECT_EQ(g.dx[0][10].item<double>(), 0.0);
      EXPECT_NE(g.dx[0][8].item<double>(), 0.0);
    }
  }
}

TEST(ActivationTest, NaNStaysNaN) {
  for (const at::Device device : test_devices()) {
    for (const ActivationKind kind : kernels::kActivationKinds) {
      const Tensor x = at::full({1, 64}, NAN, device);
      const Tensor y = kernels::activation_forward(x, {.kind = kind});
      EXPECT_TRUE(y.isnan().all().item<bool>()) << kernels::activation_name(kind);
    }
  }
}

TEST(ActivationTest, BiasGradientIsThatOfTheInputGradient) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    const Tensor x = random_tensor({50, 40}, dtype, device);
    const Tensor dy = random_tensor({50, 40}, dtype, device);
    const auto g =
        kernels::activation_backward(dy, x, {.kind = ActivationKind::GELU}, {}, false, true);
    expect_close(g.dbias, kernels::bias_backward(g.dx, 40), dtype, "dbias",
                 tolerance_of_sum(dtype, 50 * 16));
  });
}

TEST(ActivationTest, ScalesKeepTheirDtype) {
  for (const Backend& k : kBoth) {
    for_each_device_and_dtype([&](at::Device device, at::ScalarType dtype) {
      const Tensor x = random_tensor({6, 20}, at::kBFloat16, device);
      const Tensor scales = random_tensor({6}, dtype, device);
      const Tensor dy = random_tensor({6, 10}, at::kBFloat16, device);
      const ActivationSpec spec{.kind = ActivationKind::SwiGLU};
      EXPECT_EQ(k.forward(x, spec, scales).scalar_type(), at::kBFloat16);
      const auto g = k.backward(dy, x, spec, scales, true, false);
      const Tensor expected = (formula(spec, reference(x)) * reference(dy)).sum(-1);
      expect_close(g.dscales, expected, dtype, "dscales", {1e-2, 1e-2});
    });
  }
}

TEST(ActivationTest, DoesNotDependOnThreads) {
  const Tensor x = random_tensor({333, 402}, at::kFloat);
  const Tensor dy = random_tensor({333, 201}, at::kFloat);
  const Tensor scales = random_tensor({333}, at::kFloat);
  const ActivationSpec spec{.kind = ActivationKind::SwiGLU};
  const Tensor y = kernels::activation_forward(x, spec, scales);
  const auto g = kernels::activation_backward(dy, x, spec, scales, true, true);
  for (const int threads : {1, 2, 5}) {
    const WithThreads with(threads);
    const std::string where = std::to_string(threads) + " threads";
    expect_same_bits(kernels::activation_forward(x, spec, scales), y, where);
    const auto again = kernels::activation_backward(dy, x, spec, scales, true, true);
    expect_same_bits(again.dx, g.dx, where);
    expect_same_bits(again.dscales, g.dscales, where);
    expect_same_bits(again.dbias, g.dbias, where);
  }
}

TEST(ActivationTest, BadArgumentsNameWantedAndGot) {
  const auto message = [](const auto& f) -> std::string {
    try {
      f();
    } catch (const c10::Error& e) {
      return e.what();
    }
    return "no error";
  };
  const std::string odd =
      message([] { kernels::activation_forward(at::ones({2, 5}), {.kind = ActivationKind::GLU}); });
  EXPECT_NE(odd.find("[GLU] wanted a last dimension divisible by 2, got 5"), std::string::npos)
      << odd;
  const std::string scales = message([] {
    kernels::activation_forward(at::ones({2, 4}), {.kind = ActivationKind::SReLU}, at::ones({3}));
  });
  EXPECT_NE(scales.find("[SReLU] wanted scales of shape [2], got [3]"), std::string::npos)
      << scales;
}

TEST(ActivationTest, RecomputesFromAGradientOfAnotherDtype) {
  for (const Backend& k : kBoth) {
    for (const at::Device device : test_devices()) {
      const ActivationSpec spec{.kind = ActivationKind::SwiGLU};
      const Tensor x = random_tensor({5, 64}, at::kBFloat16, device);
      const Tensor dy = random_tensor({5, 32}, at::kFloat, device);
      const Tensor y = k.forward(x, spec, {});
      const auto g = k.backward(dy, x, spec, {}, false, true);
      const auto both = k.recompute(dy.clone(), x, spec, true, true, false);
      expect_same_bits(both.y, y, "y");
      expect_same_bits(both.dx, g.dx, "dx");
      expect_same_bits(both.dbias, g.dbias, "dbias");
    }
  }
}

TEST(ActivationTest, WrongSizeOfTheGradientIsRefused) {
  const Tensor x = at::ones({2, 4});
  for (const ActivationKind kind : {ActivationKind::GELU, ActivationKind::SwiGLU}) {
    EXPECT_THROW(kernels::activation_backward(at::ones({1, 3}), x, ActivationSpec{kind}),
                 c10::ValueError)
        << static_cast<int>(kind);
    EXPECT_THROW(kernels::activation_recompute(at::ones({1, 3}), x, ActivationSpec{kind}),
                 c10::ValueError)
        << static_cast<int>(kind);
  }
}

}  // namespace
