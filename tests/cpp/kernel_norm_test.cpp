// The norms against float64 formulas differentiated by autograd, on every backend.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/backend/aten/norm.h"
#include "ligature/backend/cpu/norm.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
namespace aten = ligature::aten;
using at::Tensor;
using kernels::NormBackward;
using kernels::NormForward;

namespace {

constexpr double kEps = 1e-5;

at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

enum class Norm { Layer, RMS };

// Leaves in float64, and what the formula gives for them.
struct Reference {
  Tensor x, w, b, y, mean, rstd;

  Reference(Norm norm, const Tensor& x_, const Tensor& w_, const Tensor& b_, bool zero_centered)
      : x(reference_leaf(x_)), w(reference_leaf(w_)), b(reference_leaf(b_)) {
    const Tensor rows = x.reshape({x.numel() / w.numel(), w.numel()});
    mean = norm == Norm::Layer ? rows.mean(1) : at::zeros({rows.size(0)}, at::kDouble);
    const Tensor centered = rows - mean.unsqueeze(1);
    rstd = 1 / (centered.square().mean(1) + kEps).sqrt();
    y = centered * rstd.unsqueeze(1) * (w.flatten() + (zero_centered ? 1 : 0));
    if (norm == Norm::Layer) y = y + b.flatten();
    y = y.reshape(x.sizes());
  }
};

// One set of kernels: the dispatching ones, or a backend's own.
struct Kernels {
  const char* name;
  decltype(&kernels::layer_norm_forward) layer_forward;
  decltype(&kernels::rms_norm_forward) rms_forward;
  decltype(&kernels::layer_norm_backward) layer_backward;
  decltype(&kernels::rms_norm_backward) rms_backward;

  NormForward forward(Norm norm, const Tensor& x, const Tensor& w, const Tensor& b,
                      bool zero_centered, at::ScalarType out_dtype) const {
    return norm == Norm::Layer ? layer_forward(x, w, b, kEps, zero_centered, out_dtype)
                               : rms_forward(x, w, kEps, zero_centered, out_dtype);
  }

  NormBackward backward(Norm norm, const Tensor& dy, const Tensor& x, const NormForward& f,
                        const Tensor& w, bool zero_centered, const Tensor& add) const {
    return norm == Norm::Layer
               ? layer_backward(dy, x, f.mean, f.rstd, w, zero_centered, add, true, true, true)
               : rms_backward(dy, x, f.rstd, w, zero_centered, add, true, true);
  }
};

const Kernels kBoth[] = {
    {"dispatched", kernels::layer_norm_forward, kernels::rms_norm_forward,
     kernels::layer_norm_backward, kernels::rms_norm_backward},
    {"aten", aten::layer_norm_forward, aten::rms_norm_forward, aten::layer_norm_backward,
     aten::rms_norm_backward},
};

void check(const Kernels& k, Norm norm, at::Device device, at::ScalarType dtype,
           at::ScalarType w_dtype, at::IntArrayRef shape, at::IntArrayRef normalized,
           bool zero_centered) {
  const Tensor x = random_tensor(shape, dtype, device) + 0.5;
  const Tensor w = random_tensor(normalized, w_dtype, device);
  const Tensor b = random_tensor(normalized, w_dtype, device);
  const Tensor dy = random_tensor(shape, dtype, device);
  const Tensor add = random_tensor(shape, dtype, device);
  const std::string where =
      describe(std::string(k.name) + (norm == Norm::Layer ? " layer" : " rms") +
                   (zero_centered ? " zero-centered w " : " w ") + c10::toString(w_dtype),
               device, dtype, shape);

  const Reference r(norm, x, w, b, zero_centered);
  const NormForward f = k.forward(norm, x, w, b, zero_centered, dtype);
  expect_close(f.y, r.y, dtype, where + " y");
  expect_close(f.rstd, r.rstd, statistics_dtype(dtype), where + " rstd");
  if (norm == Norm::Layer) {
    expect_close(f.mean, r.mean, statistics_dtype(dtype), where + " mean");
  } else {
    EXPECT_FALSE(f.mean.defined()) << where;
  }

  r.y.backward(reference(dy));
  const NormBackward g = k.backward(norm, dy, x, f, w, zero_centered, {});
  const Tolerance summed = tolerance_of_sum(w_dtype, x.numel() / w.numel());
  expect_close(g.dx, r.x.grad(), dtype, where + " dx");
  expect_close(g.dw, r.w.grad(), w_dtype, where + " dw", summed);
  if (norm == Norm::Layer) expect_close(g.db, r.b.grad(), w_dtype, where + " db", summed);
  const NormBackward added = k.backward(norm, dy, x, f, w, zero_centered, add);
  expect_close(added.dx, r.x.grad() + reference(add), dtype, where + " dx + add");
}

TEST(NormTest, ForwardAndBackward) {
  for (const Kernels& k : kBoth) {
    for_each_device_and_dtype([&](at::Device device, at::ScalarType dtype) {
      for (const Norm norm : {Norm::Layer, Norm::RMS}) {
        for (const bool zero_centered : {false, true}) {
          for (const auto& shape : test_shapes(45)) {
            check(k, norm, device, dtype, dtype, shape, {45}, zero_centered);
          }
          check(k, norm, device, dtype, at::kFloat, {5, 130}, {130}, zero_centered);
        }
        check(k, norm, device, dtype, dtype, {3, 4, 6}, {4, 6}, false);
      }
      check(k, Norm::RMS, device, dtype, dtype, {6, 1}, {1}, false);
    });
  }
}

TEST(NormTest, OutputInAnotherDtype) {
  for (const at::Device device : test_devices()) {
    for (const Kernels& k : kBoth) {
      for (const Norm norm : {Norm::Layer, Norm::RMS}) {
        const Tensor x = random_tensor({4, 30}, at::kFloat, device);
        const Tensor w = random_tensor({30}, at::kFloat, device);
        const Reference r(norm, x, w, w, false);
        const NormForward f = k.forward(norm, x, w, w, false, at::kBFloat16);
        expect_close(f.y, r.y, at::kBFloat16, k.name);
      }
    }
  }
}

TEST(NormTest, ApplyGivesTheSameBits) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const auto& shape : test_shapes(77)) {
      const Tensor x = random_tensor(shape, dtype, device, 3.0);
      const Tensor w = random_tensor({77}, at::kFloat, device);
      const Tensor b = random_tensor({77}, at::kFloat, device);
      const std::string where = describe("apply", device, dtype, shape);
      const NormForward l = kernels::layer_norm_forward(x, w, b, kEps, true, dtype);
      expect_same_bits(kernels::layer_norm_apply(x, l.mean, l.rstd, w, b, true, dtype), l.y, where);
      const NormForward s = kernels::rms_norm_forward(x, w, kEps, true, dtype);
      expect_same_bits(kernels::rms_norm_apply(x, s.rstd, w, true, dtype), s.y, where);
      const NormForward a = aten::layer_norm_forward(x, w, b, kEps, true, dtype);
      expect_same_bits(aten::layer_norm_apply(x, a.mean, a.rstd, w, b, true, dtype), a.y, where);
    }
  });
}

TEST(NormTest, OnlyWhatIsNeeded) {
  for (const at::Device device : test_devices()) {
    const Tensor x = random_tensor({6, 20}, at::kFloat, device);
    const Tensor w = random_tensor({20}, at::kFloat, device);
    const NormForward f = kernels::layer_norm_forward(x, w, w, kEps, false, at::kFloat);
    const auto full = kernels::layer_norm_backward(x, x, f.mean, f.rstd, w, false);
    for (int needs = 0; needs < 8; ++needs) {
      const bool dx = needs & 1, dw = needs & 2, db = needs & 4;
      const auto g = kernels::layer_norm_backward(x, x, f.mean, f.rstd, w, false, {}, dx, dw, db);
      expect_same_bits(g.dx, dx ? full.dx : Tensor(), "dx");
      expect_same_bits(g.dw, dw ? full.dw : Tensor(), "dw");
      expect_same_bits(g.db, db ? full.db : Tensor(), "db");
    }
    const auto rms = kernels::rms_norm_backward(x, x, f.rstd, w, false, {}, false, true);
    EXPECT_FALSE(rms.dx.defined());
    EXPECT_TRUE(rms.dw.defined());
    EXPECT_FALSE(rms.db.defined());
  }
}

TEST(NormTest, NoRowsGiveZeroParameterGradients) {
  for (const at::Device device : test_devices()) {
    const Tensor x = at::empty({0, 8}, device);
    const Tensor w = at::ones({8}, device);
    const auto f = kernels::layer_norm_forward(x, w, w, kEps, false, at::kFloat);
    const auto g = kernels::layer_norm_backward(x, x, f.mean, f.rstd, w, false);
    expect_same_bits(g.dw, at::zeros_like(w), "dw");
    expect_same_bits(g.db, at::zeros_like(w), "db");
    EXPECT_EQ(g.dx.sizes(), x.sizes());
  }
}

// With a mean of 1000 and deviations of 1, E[x^2] - E[x]^2 in float would lose four digits of the
// variance; what is left here is the rounding of x - mean.
TEST(NormTest, LargeMean) {
  for (const at::Device device : test_devices()) {
    for (const Kernels& k : kBoth) {
      const Tensor x = random_tensor({16, 4096}, at::kFloat, device) + 1000;
      const Tensor w = at::ones({4096}, device), b = at::zeros({4096}, device);
      const Reference r(Norm::Layer, x, w, b, false);
      const NormForward f = k.forward(Norm::Layer, x, w, b, false, at::kFloat);
      expect_close(f.rstd, r.rstd, at::kFloat, k.name, {1e-6, 0});
      expect_close(f.y, r.y, at::kFloat, k.name, {0, 1e-4});
    }
  }
}

TEST(NormTest, L2Normalization) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const auto& shape : test_shapes(31)) {
      const Tensor x = random_tensor(shape, dtype, device);
      const Tensor dy = random_tensor(shape, dtype, device);
      const Tensor leaf = reference_leaf(x);
      const Tensor y = leaf / (leaf.square().sum(-1, true) + 1e-6).sqrt();
      y.backward(reference(dy));
      const std::string where = describe("l2", device, dtype, shape);
      const auto f = kernels::l2_normalization_forward(x, 1e-6);
      expect_close(f.y, y, dtype, where);
      EXPECT_EQ(f.rstd.scalar_type(), statistics_dtype(dtype)) << where;
      expect_close(kernels::l2_normalization_backward(dy, x, f.rstd), leaf.grad(), dtype, where);
      const auto a = aten::l2_normalization_forward(x, 1e-6);
      expect_close(a.y, y, dtype, where + " aten");
      expect_close(aten::l2_normalization_backward(dy, x, a.rstd), leaf.grad(), dtype,
                   where + " aten");
    }
  });
}

TEST(NormTest, DoesNotDependOnThreads) {
  const Tensor x = random_tensor({333, 256}, at::kFloat);
  const Tensor w = random_tensor({256}, at::kFloat);
  const NormForward f = kernels::layer_norm_forward(x, w, w, kEps, false, at::kFloat);
  const NormBackward g = kernels::layer_norm_backward(x, x, f.mean, f.rstd, w, false);
  for (const int threads : {1, 2, 5}) {
    const WithThreads with(threads);
    const std::string where = std::to_string(threads) + " threads";
    const NormForward f2 = kernels::layer_norm_forward(x, w, w, kEps, false, at::kFloat);
    const NormBackward g2 = kernels::layer_norm_backward(x, x, f.mean, f.rstd, w, false);
    expect_same_bits(f2.y, f.y, where);
    expect_same_bits(f2.rstd, f.rstd, where);
    expect_same_bits(g2.dx, g.dx, where);
    expect_same_bits(g2.dw, g.dw, where);
    expect_same_bits(g2.db, g.db, where);
  }
}

TEST(NormTest, WrongSizeNamesWantedAndGot) {
  try {
    kernels::rms_norm_forward(at::ones({2, 5}), at::ones({4}), kEps, false, at::kFloat);
    FAIL() << "no error";
  } catch (const c10::Error& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find("[rms_norm_forward]"), std::string::npos) << message;
    EXPECT_NE(message.find("rows of 4 elements, got shape [2, 5]"), std::string::npos) << message;
  }
}

TEST(NormTest, WrongSizeOfTheGradientIsRefused) {
  const Tensor x = at::ones({2, 4}), w = at::ones({4}), dy = at::ones({1, 4}), rows = at::ones({2});
  EXPECT_THROW(kernels::layer_norm_backward(dy, x, rows, rows, w, false), c10::ValueError);
  EXPECT_THROW(kernels::rms_norm_backward(dy, x, rows, w, false), c10::ValueError);
  EXPECT_THROW(kernels::l2_normalization_backward(dy, x, rows), c10::ValueError);
}

}  // namespace
