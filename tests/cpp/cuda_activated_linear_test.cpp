// Products with an activation, its gradient or a bias' gradient in cuBLASLt's epilogue, against
// float64: what forward leaves for backward, and backward with it. Which operands are taken, and
// that others are refused.
#include <limits>

#include "cuda_test_support.h"
#include "ligature/backend/cuda/activated_linear.h"
#include "ligature/kernels/activated_linear.h"

namespace kernels = ligature::kernels;
namespace cuda = ligature::cuda;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

const ActivationSpec kGELU{ActivationKind::GELU}, kReLU{ActivationKind::ReLU};
const ActivationSpec kBoth[] = {kGELU, kReLU};

class CudaActivatedLinear : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    torch::manual_seed(1);
  }
};

Tensor random(at::IntArrayRef shape, double scale = 1.0) {
  return (at::randn(shape, at::TensorOptions(at::kFloat).device(kGpu)) * scale).to(at::kBFloat16);
}

struct Sizes {
  int64_t rows, k, n;
};
const Sizes kSizes[] = {
    {70, 64, 48}, {1, 8, 8}, {256, 512, 1024}, {333, 72, 136}, {1000, 136, 328}};

std::string place(const char* what, const ActivationSpec& spec, const Sizes& s) {
  return describe(std::string(kernels::activation_name(spec.kind)) + " " + what, kGpu,
                  at::kBFloat16, {s.rows, s.k, s.n});
}

Tensor activated(const ActivationSpec& spec, const Tensor& z) {
  return spec.kind == ActivationKind::GELU ? at::gelu(z, "tanh") : at::relu(z);
}

/// The gradient by torch's autograd.
Tensor gradient(const ActivationSpec& spec, const Tensor& z_, const Tensor& da) {
  const Tensor z = z_.detach().clone().requires_grad_();
  const at::AutoGradMode on(true);
  return torch::autograd::grad({activated(spec, z)}, {z}, {da})[0];
}

/// The bits of ReLU's mask.
Tensor bits_of(const Tensor& mask, int64_t columns) {
  const Tensor bytes = mask.cpu().to(at::kInt).unsqueeze(2);
  return at::bitwise_right_shift(bytes, at::arange(8, at::kInt))
      .bitwise_and(1)
      .reshape({mask.size(0), -1})
      .narrow(1, 0, columns)
      .to(at::kBool);
}

TEST_F(CudaActivatedLinear, Forward) {
  for (const ActivationSpec& spec : kBoth) {
    for (const Sizes& s : kSizes) {
      const Tensor x = random({s.rows, s.k}, 0.5), w = random({s.n, s.k}, 0.5);
      const Tensor bias = random({s.n});
      const Tolerance allowed = tolerance_of_sum(at::kBFloat16, s.k);
      for (const Tensor& b : {Tensor(), bias}) {
        Tensor z = reference(x).mm(reference(w).t());
        if (b.defined()) z = z + reference(b);
        const auto alone = kernels::linear_activated_forward(x, w, b, spec, false);
        expect_close(alone.y, activated(spec, z), at::kBFloat16, place("y", spec, s), allowed);
        EXPECT_FALSE(alone.aux.defined());
        const auto both = kernels::linear_activated_forward(x, w, b, spec, true);
        expect_close(both.y, activated(spec, z), at::kBFloat16, place("y, aux", spec, s), allowed);
        if (spec.kind == ActivationKind::GELU) {
          expect_close(both.aux, z, at::kBFloat16, place("aux", spec, s), allowed);
        } else {
          EXPECT_TRUE(at::equal(bits_of(both.aux, s.n), both.y.cpu() > 0)) << place("", spec, s);
        }
      }
    }
  }
}

TEST_F(CudaActivatedLinear, BackwardWithWhatForwardLeft) {
  for (const ActivationSpec& spec : kBoth) {
    for (const Sizes& s : kSizes) {
      const Tensor x = random({s.rows, s.k}, 0.5), w1 = random({s.n, s.k}, 0.5);
      const auto forward = kernels::linear_activated_forward(x, w1, random({s.n}), spec, true);
      // ReLU's derivative depends on the sign alone.
      const Tensor z =
          spec.kind == ActivationKind::GELU ? reference(forward.aux) : reference(forward.y);
      const Tensor dy = random({s.rows, s.k}), w2 = random({s.k, s.n}, 0.5);
      const Tensor dz = gradient(spec, z, reference(dy).mm(reference(w2)));
      const Tolerance allowed = tolerance_of_sum(at::kBFloat16, s.k);
      const auto alone = kernels::linear_activated_backward(dy, w2, forward.aux, spec, false);
      expect_close(alone.dz, dz, at::kBFloat16, place("dz", spec, s), allowed);
      EXPECT_FALSE(alone.dbias.defined());
      const auto both = kernels::linear_activated_backward(dy, w2, forward.aux, spec, true);
      expect_close(both.dz, dz, at::kBFloat16, place("dz, dbias", spec, s), allowed);
      expect_close(both.dbias, dz.sum(0), at::kBFloat16, place("dbias", spec, s),
                   tolerance_of_sum(at::kBFloat16, s.k * s.rows));
      for (int i = 0; i < 3; ++i) {
        const auto again = kernels::linear_activated_backward(dy, w2, forward.aux, spec, true);
        expect_same_bits(again.dz, both.dz, place("dz again", spec, s));
        expect_same_bits(again.dbias, both.dbias, place("dbias again", spec, s));
      }
    }
  }
}

TEST_F(CudaActivatedLinear, WeightAndBiasGradient) {
  for (const Sizes& s : kSizes) {
    const Tensor dy = random({s.rows, s.n}), x = random({s.rows, s.k});
    const std::string where = describe("weight and bias", kGpu, at::kBFloat16, {s.rows, s.k, s.n});
    const Tolerance allowed = tolerance_of_sum(at::kBFloat16, s.rows);
    const auto got = kernels::linear_weight_bias_grad(dy, x);
    expect_close(got.dw, reference(dy).t().mm(reference(x)), at::kBFloat16, where, allowed);
    expect_close(got.dbias, reference(dy).sum(0), at::kBFloat16, where + " dbias", allowed);
    expect_same_bits(kernels::linear_weight_bias_grad(dy, x).dbias, got.dbias, where + " again");
  }
}

TEST_F(CudaActivatedLinear, DimensionsBeforeTheLast) {
  const Tensor x = random({3, 5, 64}), w = random({48, 64}, 0.2), bias = random({48});
  for (const ActivationSpec& spec : kBoth) {
    const auto flat = kernels::linear_activated_forward(x.view({15, 64}), w, bias, spec, true);
    const auto deep = kernels::linear_activated_forward(x, w, bias, spec, true);
    expect_same_bits(deep.y.view({15, 48}), flat.y, "y");
    const auto dz = kernels::linear_activated_backward(x, random({64, 48}), deep.aux, spec, true);
    EXPECT_EQ(dz.dz.sizes(), at::IntArrayRef({3, 5, 48}));
  }
}

TEST_F(CudaActivatedLinear, NaNPassesThrough) {
  Tensor x = random({40, 64});
  const Tensor w = random({48, 64});
  x[7][3] = std::numeric_limits<double>::quiet_NaN();
  for (const ActivationSpec& spec : kBoth) {
    for (const bool aux : {false, true}) {
      const Tensor y = kernels::linear_activated_forward(x, w, {}, spec, aux).y;
      EXPECT_TRUE(y[7].isnan().all().item<bool>()) << kernels::activation_name(spec.kind) << aux;
      EXPECT_FALSE(y[8].isnan().any().item<bool>());
    }
  }
}

TEST_F(CudaActivatedLinear, TakesWhatCublasltReads) {
  const Tensor x = random({40, 64}), w = random({48, 64}), bias = random({48});
  const auto takes = [&](const Tensor& a, const Tensor& b, const Tensor& c,
                         const ActivationSpec& spec = kGELU) {
    return cuda::takes_activated_forward(a, b, c, spec, true);
  };
  for (const ActivationSpec& spec : kBoth) {
    EXPECT_TRUE(takes(x, w, bias, spec));
    EXPECT_TRUE(takes(x, w, {}, spec));
  }
  EXPECT_FALSE(takes(x, w, bias, {ActivationKind::SiLU}));
  EXPECT_FALSE(takes(unaligned(x), w, bias)) << "not at 16 bytes";
  EXPECT_FALSE(takes(x, random({44, 64}), {})) << "44 columns";
  EXPECT_FALSE(takes(random({40, 60}), random({48, 60}), {})) << "k 60";
  EXPECT_FALSE(takes(x, random({64, 48}).t(), bias)) << "w turned";
  EXPECT_FALSE(takes(x.to(at::kHalf), w.to(at::kHalf), {})) << "half";
  EXPECT_FALSE(takes(x, w, bias.to(at::kFloat))) << "float bias";
  EXPECT_FALSE(takes(x.narrow(0, 0, 0), w, bias)) << "no rows";
  EXPECT_FALSE(takes(x.cpu(), w.cpu(), bias.cpu()));
  const Tensor dy = random({40, 64}), w2 = random({64, 48});
  const Tensor z = random({40, 48}), mask = at::zeros({40, 16}, z.options().dtype(at::kByte));
  EXPECT_TRUE(cuda::takes_activated_backward(dy, w2, z, kGELU, true));
  EXPECT_TRUE(cuda::takes_activated_backward(dy, w2, mask, kReLU, true));
  EXPECT_FALSE(cuda::takes_activated_backward(dy, w2, mask, kGELU, true));
  EXPECT_FALSE(cuda::takes_activated_backward(dy, w2, z, kReLU, true));
  EXPECT_FALSE(cuda::takes_activated_backward(dy, w2, {}, kGELU, true));
  EXPECT_TRUE(cuda::takes_weight_bias_grad(z, x));
  EXPECT_FALSE(cuda::takes_weight_bias_grad(z, x.narrow(0, 0, 8)));
  EXPECT_THROW(kernels::linear_activated_forward(unaligned(x), w, bias, kGELU, true), c10::Error);
}

TEST_F(CudaActivatedLinear, RunsAsTold) {
  const Tensor x = random({40, 64}), w = random({48, 64}), z = random({40, 48});
  const auto runs = [&] {
    const bool forward = kernels::runs_activated_forward(x, w, {}, kGELU, true);
    const bool backward = kernels::runs_activated_backward(z, w, x, kGELU, false);
    const bool weight = kernels::runs_weight_bias_grad(z, x);
    EXPECT_EQ(forward, backward);
    EXPECT_EQ(forward, weight);
    EXPECT_EQ(forward, kernels::has_activated_linear(kGELU, at::kBFloat16, kGpu, false));
    EXPECT_EQ(forward, kernels::has_weight_bias_grad(at::kBFloat16, kGpu));
    return forward;
  };
  cuda::set_epilogue_use(cuda::EpilogueUse::Always);
  EXPECT_TRUE(runs());
  EXPECT_FALSE(kernels::has_activated_linear(kGELU, at::kFloat, kGpu, false));
  cuda::set_epilogue_use(cuda::EpilogueUse::Never);
  EXPECT_FALSE(runs());
  cuda::set_epilogue_use(cuda::EpilogueUse::WhereTheyPay);
}

TEST(ActivatedLinear, RefusesOtherTensorsAndSizes) {
  const auto bfloat16 = at::TensorOptions(at::kBFloat16);
  const Tensor x = at::empty({8, 64}, bfloat16), w = at::empty({48, 64}, bfloat16);
  EXPECT_FALSE(kernels::runs_activated_forward(x, w, {}, kGELU, true));
  EXPECT_FALSE(kernels::runs_activated_backward(x, w.t(), x, kGELU, true));
  EXPECT_FALSE(kernels::runs_weight_bias_grad(x, x));
  EXPECT_FALSE(kernels::has_activated_linear(kGELU, at::kBFloat16, at::kCPU, true));
  EXPECT_FALSE(kernels::has_weight_bias_grad(at::kBFloat16, at::kCPU));
  EXPECT_THROW(kernels::linear_activated_forward(x, w, {}, kGELU, true), c10::Error);
  EXPECT_THROW(kernels::linear_activated_forward(x, w.narrow(1, 0, 32), {}, kGELU, true),
               c10::ValueError);
  EXPECT_THROW(kernels::linear_activated_forward(x, w, x, kGELU, true), c10::ValueError);
  EXPECT_THROW(kernels::linear_activated_forward(x, w, {}, {ActivationKind::SiLU}, true),
               c10::ValueError);
  EXPECT_THROW(kernels::linear_activated_backward(x, w, x, kGELU, true), c10::ValueError);
}

}  // namespace
