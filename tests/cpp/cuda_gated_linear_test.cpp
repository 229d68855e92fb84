// Products with a gated activation beside them. Operands whose sums are exact give the bits of the
// product and the activation one after the other; others are compared with float64. Sizes take
// every form of the kernels, whole tiles and parts of them.
#include <cmath>
#include <limits>
#include <utility>

#include "cuda_gemm_support.h"
#include "cuda_test_support.h"
#include "ligature/backend/aten/activation.h"
#include "ligature/kernels/gemm.h"
#include "ligature/kernels/log.h"

namespace kernels = ligature::kernels;
namespace aten = ligature::aten;
namespace cuda = ligature::cuda;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

const ActivationSpec kSwiGLU{ActivationKind::SwiGLU}, kGEGLU{ActivationKind::GEGLU};

/// Small integers times 2^-shift: sums of their products are exact in float32 in every order.
Tensor exact(at::IntArrayRef shape, int shift = 0) {
  return (at::randint(-2, 3, shape, at::TensorOptions(at::kFloat).device(kGpu)) *
          std::ldexp(1.0, -shift))
      .to(at::kBFloat16);
}

Tensor random(at::IntArrayRef shape, double scale = 1.0) {
  return (at::randn(shape, at::TensorOptions(at::kFloat).device(kGpu)) * scale).to(at::kBFloat16);
}

/// A result's memory may hold anything before.
void spoil_free_memory(int64_t elements) {
  at::full({elements}, std::numeric_limits<double>::quiet_NaN(),
           at::TensorOptions(at::kBFloat16).device(kGpu));
}

struct Sizes {
  int64_t rows, units, k;
  std::string where(const ActivationSpec& spec) const {
    return describe(kernels::activation_name(spec.kind), kGpu, at::kBFloat16, {rows, units, k});
  }
};

const int64_t kRows[] = {1, 127, 128, 129, 300, 4096 + 17};
/// units, k: forward alone, in pairs; backward in pairs, skewed, in pairs with a long k.
const std::pair<int64_t, int64_t> kColumns[] = {{128, 64}, {640, 192}, {256, 2048}};
const std::pair<int64_t, int64_t> kBackwardColumns[] = {
    {256, 64}, {768, 320}, {512, 1024}, {256, 2048}, {256, 3072}};

template <typename Columns, typename F>
void for_each_size(const Columns& columns, const F& f) {
  for (const auto& [units, k] : columns) {
    for (const int64_t rows : kRows) {
      torch::manual_seed(11);
      for (const ActivationSpec& spec : {kSwiGLU, kGEGLU}) f(Sizes{rows, units, k}, spec);
    }
  }
}

class CudaGatedLinear : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    const auto options = at::TensorOptions(at::kBFloat16).device(kGpu);
    if (!cuda::takes_gated_linear(at::empty({128, 64}, options), at::empty({256, 64}, options),
                                  kSwiGLU, false)) {
      GTEST_SKIP() << "no kernels for this GPU, or a build for another one";
    }
    torch::manual_seed(1);
  }
};

TEST_F(CudaGatedLinear, ForwardHasTheBitsOfTwoKernels) {
  for_each_size(kColumns, [](const Sizes& s, const ActivationSpec& spec) {
    const Tensor x = exact({s.rows, s.k}), w = exact({2 * s.units, s.k}, 5);
    const Tensor z = kernels::linear_forward(x, w);
    spoil_free_memory(s.rows * 2 * s.units);
    const auto got = gated_forward(x, w, spec);
    expect_same_bits(got.z, z, s.where(spec) + " z");
    expect_same_bits(got.a, kernels::activation_forward(z, spec), s.where(spec) + " a");
  });
}

TEST_F(CudaGatedLinear, ForwardIsCloseToFloat64) {
  for_each_size(kColumns, [](const Sizes& s, const ActivationSpec& spec) {
    const double scale = 1.0 / std::sqrt(static_cast<double>(s.k));
    const Tensor x = random({s.rows, s.k}), w = random({2 * s.units, s.k}, scale);
    const auto got = gated_forward(x, w, spec);
    const Tensor z = x.to(at::kDouble).mm(w.to(at::kDouble).t());
    expect_close(got.z, z, at::kBFloat16, s.where(spec) + " z");
    expect_same_bits(got.a, kernels::activation_forward(got.z, spec), s.where(spec) + " a");
  });
}

TEST_F(CudaGatedLinear, BackwardHasTheBitsOfTwoKernels) {
  for_each_size(kBackwardColumns, [](const Sizes& s, const ActivationSpec& spec) {
    const Tensor dy = exact({s.rows, s.k}), w = exact({s.k, s.units}, 5);
    const Tensor z = random({s.rows, 2 * s.units}), z_before = z.clone();
    const Tensor da = kernels::linear_input_grad(dy, w);
    const Tensor dz = kernels::activation_backward(da, z, spec).dx;
    const Tensor a = kernels::activation_forward(z, spec);
    for (const bool need_a : {false, true}) {
      const std::string where = s.where(spec) + (need_a ? " with a" : "");
      spoil_free_memory(s.rows * 2 * s.units);
      const auto got = gated_backward(dy, w, z, spec, need_a, false);
      expect_same_bits(got.dz, dz, where + " dz");
      expect_same_bits(got.a, need_a ? a : Tensor(), where + " a");
      expect_same_bits(z, z_before, where + " z");

      const Tensor taken = z.clone();
      const auto over = gated_backward(dy, w, taken, spec, need_a, true);
      EXPECT_EQ(over.dz.const_data_ptr(), taken.const_data_ptr()) << where;
      expect_same_bits(over.dz, dz, where + " dz over z");
      expect_same_bits(over.a, need_a ? a : Tensor(), where + " a, dz over z");
    }
  });
}

TEST_F(CudaGatedLinear, BackwardIsCloseToFloat64) {
  for_each_size(kBackwardColumns, [](const Sizes& s, const ActivationSpec& spec) {
    const double scale = 1.0 / std::sqrt(static_cast<double>(s.k));
    const Tensor dy = random({s.rows, s.k}), w = random({s.k, s.units}, scale);
    const Tensor z = random({s.rows, 2 * s.units});
    const auto got = gated_backward(dy, w, z, spec, false, false);
    const Tensor da = dy.to(at::kDouble).mm(w.to(at::kDouble));
    const Tensor dz = aten::activation_backward(da, z.to(at::kDouble), spec, {}, false, false).dx;
    expect_close(got.dz, dz, at::kBFloat16, s.where(spec) + " dz");
  });
}

TEST_F(CudaGatedLinear, KeepsTheDimensionsInFront) {
  const Tensor x = exact({3, 5, 64}), w = exact({256, 64}, 2);
  const auto forward = gated_forward(x, w, kSwiGLU);
  expect_same_bits(forward.z, kernels::linear_forward(x, w), "z");
  expect_same_bits(forward.a, kernels::activation_forward(forward.z, kSwiGLU), "a");
  const Tensor w2 = exact({64, 256}, 2), z = random({3, 5, 512});
  const auto backward = gated_backward(x, w2, z, kSwiGLU, true, false);
  const Tensor da = kernels::linear_input_grad(x, w2);
  expect_same_bits(backward.dz, kernels::activation_backward(da, z, kSwiGLU).dx, "dz");
  expect_same_bits(backward.a, kernels::activation_forward(z, kSwiGLU), "a");
  const Tensor row = exact({64});
  expect_same_bits(gated_forward(row, w, kSwiGLU).z, kernels::linear_forward(row, w), "one row");
}

TEST_F(CudaGatedLinear, ReadsZWhereverItLies) {
  const Tensor dy = exact({200, 64}), w = exact({64, 256}, 2), z = random({200, 512});
  const Tensor dz = gated_backward(dy, w, z, kSwiGLU, false, false).dz;
  const Tensor turned = z.t().contiguous().t();
  for (const bool over_z : {false, true}) {
    for (const Tensor& other : {unaligned(z), turned}) {
      const Tensor before = other.clone();
      expect_same_bits(gated_backward(dy, w, other, kSwiGLU, false, over_z).dz, dz, "dz");
      expect_same_bits(other, before, "z");
    }
  }
}

TEST_F(CudaGatedLinear, NaNAndInfinityStayInTheirRow) {
  Tensor x = exact({130, 64});
  const Tensor w = exact({256, 64}, 2);
  const auto wanted = gated_forward(x, w, kSwiGLU);
  x[129][3] = std::numeric_limits<double>::quiet_NaN();
  x[7][0] = std::numeric_limits<double>::infinity();
  const auto got = gated_forward(x, w, kSwiGLU);
  EXPECT_TRUE(got.z[129].isnan().all().item<bool>());
  EXPECT_TRUE(got.a[129].isnan().all().item<bool>());
  EXPECT_FALSE(got.z[7].isfinite().any().item<bool>());
  expect_same_bits(got.z.narrow(0, 8, 121), wanted.z.narrow(0, 8, 121), "other rows");
}

TEST_F(CudaGatedLinear, MoreThanTwoToThe31Elements) {
  const LargeMemory alone;
  const int64_t rows = 70000, units = 16384, k = 64, few = 200;
  const Tensor x = exact({rows, k}), w = exact({2 * units, k}, 2);
  const Tensor last = x.narrow(0, rows - few, few).contiguous();
  auto forward = gated_forward(x, w, kSwiGLU);
  const auto wanted = gated_forward(last, w, kSwiGLU);
  expect_same_bits(forward.z.narrow(0, rows - few, few), wanted.z, "z");
  expect_same_bits(forward.a.narrow(0, rows - few, few), wanted.a, "a");
  forward.a.reset();
  const Tensor w2 = exact({k, units}, 2);
  const auto backward = gated_backward(x, w2, forward.z, kSwiGLU, true, true);
  const auto few_wanted = gated_backward(last, w2, wanted.z, kSwiGLU, true, false);
  expect_same_bits(backward.dz.narrow(0, rows - few, few), few_wanted.dz, "dz");
  expect_same_bits(backward.a.narrow(0, rows - few, few), few_wanted.a, "a of backward");
}

TEST_F(CudaGatedLinear, TakesWhatItsKernelsRead) {
  const auto takes = [](const Tensor& x, const Tensor& w, const ActivationSpec& spec = kSwiGLU,
                        bool backward = false) {
    return cuda::takes_gated_linear(x, w, spec, backward);
  };
  const Tensor x = random({100, 128}), w = random({256, 128});
  EXPECT_TRUE(takes(x, w));
  EXPECT_TRUE(takes(x, w, kGEGLU));
  EXPECT_TRUE(takes(x, random({128, 256}), kSwiGLU, true));
  EXPECT_FALSE(takes(x, w, {ActivationKind::ReGLU}));
  EXPECT_FALSE(takes(x, w, {.kind = ActivationKind::SwiGLU, .glu_interleave_size = 32}));
  EXPECT_FALSE(takes(unaligned(x), w)) << "not at 16 bytes";
  EXPECT_FALSE(takes(x, unaligned(w))) << "not at 16 bytes";
  EXPECT_FALSE(takes(random({128, 100}).t(), w)) << "columns";
  EXPECT_FALSE(takes(x, random({128, 256}).t())) << "w turned";
  EXPECT_FALSE(takes(x.to(at::kHalf), w.to(at::kHalf)));
  EXPECT_FALSE(takes(x, w.to(at::kFloat)));
  EXPECT_FALSE(takes(x.narrow(0, 0, 0), w)) << "no rows";
  EXPECT_FALSE(takes(x, random({384, 128}))) << "192 gates";
  EXPECT_FALSE(takes(x, random({128, 384}), kSwiGLU, true)) << "384 gates backward";
  EXPECT_FALSE(takes(random({100, 96}), random({256, 96}))) << "k 96";
  EXPECT_FALSE(takes(x.cpu(), w.cpu()));
  EXPECT_THROW(gated_forward(unaligned(x), w, kSwiGLU), c10::Error);
}

TEST_F(CudaGatedLinear, RunsWhereItPays) {
  const auto runs = [](int64_t rows, int64_t k, int64_t units, bool backward) {
    const auto options = at::TensorOptions(at::kBFloat16).device(kGpu);
    const Tensor w = backward ? at::empty({k, units}, options) : at::empty({2 * units, k}, options);
    return gated_pays(at::empty({rows, k}, options), w, kSwiGLU, backward);
  };
  for (const bool backward : {false, true}) {
    EXPECT_TRUE(runs(16384, 4096, 14336, backward));
    EXPECT_FALSE(runs(1, 4096, 14336, backward));
    EXPECT_FALSE(runs(256, 256, 512, backward));
  }
  EXPECT_FALSE(runs(2048, 1024, 2816, true));
}

TEST_F(CudaGatedLinear, NotesItself) {
  kernels::KernelLog log(at::kCUDA);
  gated_forward(random({8, 64}), random({256, 64}), kSwiGLU);
  bool noted = false;
  for (const auto& call : log.take()) {
    noted = noted || (call.name == "linear_gated_forward" && call.backend == "cuda");
  }
  EXPECT_TRUE(noted);
}

TEST(GatedLinear, RefusesOtherTensorsAndSizes) {
  const auto bfloat16 = at::TensorOptions(at::kBFloat16);
  const Tensor x = at::empty({8, 64}, bfloat16), w = at::empty({256, 64}, bfloat16);
  for (const bool backward : {false, true}) {
    EXPECT_FALSE(gated_pays(x, w, kSwiGLU, backward));
    EXPECT_FALSE(gated_pays(x.to(at::kMeta), w.to(at::kMeta), kSwiGLU, backward));
  }
  EXPECT_THROW(gated_forward(x, w, kSwiGLU), c10::Error);
  EXPECT_THROW(gated_forward(x, w.narrow(1, 0, 32), kSwiGLU), c10::ValueError);
  EXPECT_THROW(gated_forward(x, w, {ActivationKind::GELU}), c10::ValueError);
  EXPECT_THROW(gated_backward(x, w.t(), x, kSwiGLU, false, false), c10::ValueError);
}

}  // namespace
