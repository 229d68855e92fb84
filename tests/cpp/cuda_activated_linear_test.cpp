// GEMMs with GELU or a bias' gradient in cuBLASLt's epilogue, against float64. Which operands are
// taken, and that others are refused.
#include <limits>

#include "cuda_gemm_support.h"
#include "cuda_test_support.h"

namespace kernels = ligature::kernels;
namespace cuda = ligature::cuda;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;
using kernels::Epilogue;

namespace {

const ActivationSpec kGELU{ActivationKind::GELU};

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

TEST_F(CudaActivatedLinear, Forward) {
  for (const Sizes& s : kSizes) {
    const Tensor x = random({s.rows, s.k}, 0.5), w = random({s.n, s.k}, 0.5);
    const Tensor bias = random({s.n});
    const Tolerance allowed = tolerance_of_sum(at::kBFloat16, s.k);
    for (const Tensor& b : {Tensor(), bias}) {
      Tensor z = reference(x).mm(reference(w).t());
      if (b.defined()) z = z + reference(b);
      const auto alone = gelu_forward(x, w, b, kGELU, false);
      expect_close(alone.y, at::gelu(z, "tanh"), at::kBFloat16, place("y", kGELU, s), allowed);
      EXPECT_FALSE(alone.z.defined());
      const auto both = gelu_forward(x, w, b, kGELU, true);
      expect_close(both.y, at::gelu(z, "tanh"), at::kBFloat16, place("y, z", kGELU, s), allowed);
      expect_close(both.z, z, at::kBFloat16, place("z", kGELU, s), allowed);
    }
  }
}

TEST_F(CudaActivatedLinear, WeightAndBiasGradient) {
  for (const Sizes& s : kSizes) {
    const Tensor dy = random({s.rows, s.n}), x = random({s.rows, s.k});
    const std::string where = describe("weight and bias", kGpu, at::kBFloat16, {s.rows, s.k, s.n});
    const Tolerance allowed = tolerance_of_sum(at::kBFloat16, s.rows);
    const auto got = weight_bias_grad(dy, x);
    expect_close(got.dw, reference(dy).t().mm(reference(x)), at::kBFloat16, where, allowed);
    expect_close(got.dbias, reference(dy).sum(0), at::kBFloat16, where + " dbias", allowed);
    expect_same_bits(weight_bias_grad(dy, x).dbias, got.dbias, where + " again");
  }
}

TEST_F(CudaActivatedLinear, DimensionsBeforeTheLast) {
  const Tensor x = random({3, 5, 64}), w = random({48, 64}, 0.2), bias = random({48});
  const auto flat = gelu_forward(x.view({15, 64}), w, bias, kGELU, true);
  const auto deep = gelu_forward(x, w, bias, kGELU, true);
  expect_same_bits(deep.y.view({15, 48}), flat.y, "y");
  expect_same_bits(deep.z.view({15, 48}), flat.z, "z");
}

TEST_F(CudaActivatedLinear, NaNPassesThrough) {
  Tensor x = random({40, 64});
  const Tensor w = random({48, 64});
  x[7][3] = std::numeric_limits<double>::quiet_NaN();
  for (const bool need_z : {false, true}) {
    const Tensor y = gelu_forward(x, w, {}, kGELU, need_z).y;
    EXPECT_TRUE(y[7].isnan().all().item<bool>()) << need_z;
    EXPECT_FALSE(y[8].isnan().any().item<bool>());
  }
}

TEST_F(CudaActivatedLinear, TakesWhatCublasltReads) {
  const Tensor x = random({40, 64}), w = random({48, 64}), bias = random({48});
  const auto takes = [&](const Tensor& a, const Tensor& b, const Tensor& c,
                         const ActivationSpec& spec = kGELU) {
    return cuda::takes_activated_forward(a, b, c, spec, true);
  };
  EXPECT_TRUE(takes(x, w, bias));
  EXPECT_TRUE(takes(x, w, {}));
  EXPECT_FALSE(takes(x, w, bias, {ActivationKind::ReLU}));
  EXPECT_FALSE(takes(x, w, bias, {ActivationKind::SiLU}));
  EXPECT_FALSE(takes(unaligned(x), w, bias)) << "not at 16 bytes";
  EXPECT_FALSE(takes(x, random({44, 64}), {})) << "44 columns";
  EXPECT_FALSE(takes(random({40, 60}), random({48, 60}), {})) << "k 60";
  EXPECT_FALSE(takes(x, random({64, 48}).t(), bias)) << "w turned";
  EXPECT_FALSE(takes(x.to(at::kHalf), w.to(at::kHalf), {})) << "half";
  EXPECT_FALSE(takes(x, w, bias.to(at::kFloat))) << "float bias";
  EXPECT_FALSE(takes(x.narrow(0, 0, 0), w, bias)) << "no rows";
  EXPECT_FALSE(takes(x.cpu(), w.cpu(), bias.cpu()));
  const Tensor z = random({40, 48});
  EXPECT_TRUE(cuda::takes_weight_bias_grad(z, x));
  EXPECT_FALSE(cuda::takes_weight_bias_grad(z, x.narrow(0, 0, 8)));
  EXPECT_THROW(gelu_forward(unaligned(x), w, bias, kGELU, true), c10::Error);
}

TEST_F(CudaActivatedLinear, RunsAsTold) {
  const Tensor x = random({40, 64}), w = random({48, 64}), z = random({40, 48});
  const auto runs = [&] {
    const bool forward = kernels::pays(kernels::activated_forward(x, w, {}, kGELU, true));
    EXPECT_EQ(forward, kernels::pays(kernels::weight_and_bias_grad(z, x)));
    EXPECT_EQ(forward, kernels::has_epilogue(Epilogue::Activation, &kGELU, at::kBFloat16, kGpu));
    EXPECT_EQ(forward, kernels::has_epilogue(Epilogue::BiasGrad, nullptr, at::kBFloat16, kGpu));
    return forward;
  };
  cuda::set_epilogue_use(cuda::EpilogueUse::Always);
  EXPECT_TRUE(runs());
  EXPECT_FALSE(kernels::has_epilogue(Epilogue::Activation, &kGELU, at::kFloat, kGpu));
  cuda::set_epilogue_use(cuda::EpilogueUse::Never);
  EXPECT_FALSE(runs());
  cuda::set_epilogue_use(cuda::EpilogueUse::WhereTheyPay);
}

}  // namespace
