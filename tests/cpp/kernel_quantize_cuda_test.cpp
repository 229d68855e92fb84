// Low precision on a GPU: the bits of the CPU, and kernels that quantize their own result against
// the two kernels after each other.
#include <torch/torch.h>

#include "ligature/config.h"
#include "ligature/kernels/norm.h"
#include "quantize_test_support.h"

using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

class QuantizeCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "there is no CUDA device";
    if (!ligature::config().cuda.built) GTEST_SKIP() << "built without the CUDA backend";
  }
};

Tensor on_gpu(const Tensor& t) { return t.defined() ? t.to(at::kCUDA) : t; }

QuantizeArgs on_gpu(QuantizeArgs args) {
  args.scale = on_gpu(args.scale);
  args.amax = on_gpu(args.amax);
  return args;
}

bool same_bits(const Tensor& got, const Tensor& wanted) {
  if (got.defined() != wanted.defined()) return false;
  if (!got.defined()) return true;
  const Tensor a = got.cpu(), b = wanted.cpu();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return !a.is_floating_point() ? a.equal(b)
                                : bits(to_vector<float>(a.to(at::kFloat).contiguous())) ==
                                      bits(to_vector<float>(b.to(at::kFloat).contiguous()));
}

bool same_bits(const QuantizedMatrix& got, const QuantizedMatrix& wanted) {
  return same_bits(got.data, wanted.data) && same_bits(got.scale, wanted.scale) &&
         same_bits(got.amax, wanted.amax);
}

void expect_same(const QuantizedPair& got, const QuantizedPair& wanted, const std::string& where) {
  EXPECT_TRUE(same_bits(got.rowwise, wanted.rowwise)) << where << " rows";
  EXPECT_TRUE(same_bits(got.columnwise, wanted.columnwise)) << where << " columns";
}

TEST_F(QuantizeCudaTest, BitsOfTheCpu) {
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 1}, {3, 7}, {130, 257}, {256, 384}, {0, 32}};
  for (const Format& format : all_formats()) {
    for (const auto& shape : shapes) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        torch::manual_seed(3);
        Tensor x = at::randn(shape, at::kFloat) * at::exp(at::randn({1, shape[1]}) * 3);
        if (x.numel() > 1000) {
          x[0][0] = NAN;
          x[1][200] = -INFINITY;
          x[2][3] = -NAN;
        }
        x = x.to(dtype);
        const QuantizeArgs args = args_of(format), gpu_args = on_gpu(args_of(format));
        const std::string where = describe(format) + " " + c10::toString(dtype);
        const QuantizedPair wanted = kernels::quantize(x, args);
        const QuantizedPair got = kernels::quantize(on_gpu(x), gpu_args);
        expect_same(got, wanted, where);
        EXPECT_TRUE(same_bits(gpu_args.amax, args.amax)) << where;
        for (const bool operand : {false, true}) {
          const auto decode = [&](const QuantizedMatrix& q) {
            return operand ? kernels::expand(q, format, shape[1], at::kBFloat16)
                           : kernels::dequantize(q, format, shape[1], at::kFloat);
          };
          EXPECT_TRUE(same_bits(decode(got.rowwise), decode(wanted.rowwise))) << where << operand;
        }
      }
    }
  }
}

std::vector<Format> fused_formats() {
  return {{.scaling = Scaling::Delayed}, {.scaling = Scaling::Current, .element = Element::E5M2},
          {.scaling = Scaling::Block},   {.scaling = Scaling::Block, .block_2d = true},
          {.scaling = Scaling::MX},      {.scaling = Scaling::NV, .element = Element::E2M1}};
}

void for_each_case(const std::function<void(const std::vector<int64_t>&, at::ScalarType,
                                            const Format&, bool, bool, const std::string&)>& f) {
  for (const Format& format : fused_formats()) {
    for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
      for (const int64_t columns : {int64_t{264}, int64_t{512}, int64_t{6}}) {
        const std::string where = describe(format) + " " + c10::toString(dtype);
        f({2, 150, columns}, dtype, format, true, true, where);
        f({130, columns}, dtype, format, true, false, where);
        f({130, columns}, dtype, format, false, true, where);
      }
    }
  }
}

Tensor random_on_gpu(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, at::TensorOptions(dtype).device(at::kCUDA));
}

TEST_F(QuantizeCudaTest, Norms) {
  for_each_case([](const std::vector<int64_t>& shape, at::ScalarType dtype, const Format& format,
                   bool rowwise, bool columnwise, const std::string& where) {
    const Tensor x = random_on_gpu(shape, dtype), w = random_on_gpu({shape.back()}, at::kFloat),
                 b = random_on_gpu({shape.back()}, dtype);
    for (const bool layer : {true, false}) {
      const QuantizeArgs args = on_gpu(args_of(format, rowwise, columnwise));
      const QuantizeArgs again = on_gpu(args_of(format, rowwise, columnwise));
      const auto got = layer
                           ? kernels::layer_norm_forward_quantize(x, w, b, 1e-5, true, dtype, args)
                           : kernels::rms_norm_forward_quantize(x, w, 1e-5, false, dtype, args);
      const auto wanted = layer ? kernels::layer_norm_forward(x, w, b, 1e-5, true, dtype)
                                : kernels::rms_norm_forward(x, w, 1e-5, false, dtype);
      expect_same(got.y, kernels::quantize(wanted.y, again), where + (layer ? " layer" : " rms"));
      EXPECT_TRUE(same_bits(args.amax, again.amax)) << where;
      EXPECT_TRUE(same_bits(got.mean, wanted.mean) && same_bits(got.rstd, wanted.rstd)) << where;
    }
  });
}

// Sums are added in another order than by the plain kernel, so they are close and not equal.
void expect_close(const Tensor& got, const Tensor& wanted, const std::string& where) {
  ASSERT_EQ(got.defined(), wanted.defined()) << where;
  if (!got.defined()) return;
  ASSERT_EQ(got.scalar_type(), wanted.scalar_type()) << where;
  const double tolerance = got.scalar_type() == at::kFloat ? 1e-4 : 2e-2;
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), wanted.to(at::kDouble), tolerance, tolerance))
      << where;
}

TEST_F(QuantizeCudaTest, Activations) {
  for_each_case([](const std::vector<int64_t>& shape, at::ScalarType dtype, const Format& format,
                   bool rowwise, bool columnwise, const std::string& where) {
    for (const auto kind : {ActivationKind::SwiGLU, ActivationKind::GELU}) {
      for (const bool scaled : {false, true}) {
        const ActivationSpec spec{kind};
        const Tensor x = random_on_gpu(shape, dtype);
        const Tensor scales =
            scaled ? random_on_gpu(x.sizes().slice(0, x.dim() - 1), at::kFloat) : Tensor();
        const auto make = [&] { return on_gpu(args_of(format, rowwise, columnwise)); };
        const QuantizeArgs args = make(), again = make(), dx_args = make(), dx_again = make();
        const Tensor y = kernels::activation_forward(x, spec, scales);
        expect_same(kernels::activation_forward_quantize(x, spec, scales, args),
                    kernels::quantize(y, again), where + " y");
        EXPECT_TRUE(same_bits(args.amax, again.amax)) << where;
        const Tensor dy = random_on_gpu(y.sizes(), dtype);
        const auto got =
            kernels::activation_backward_quantize(dy, x, spec, scales, scaled, true, dx_args);
        const auto wanted = kernels::activation_backward(dy, x, spec, scales, scaled, true);
        expect_same(got.dx, kernels::quantize(wanted.dx, dx_again), where + " dx");
        EXPECT_TRUE(same_bits(dx_args.amax, dx_again.amax)) << where;
        expect_close(got.dbias, wanted.dbias, where + " dbias");
        expect_close(got.dscales, wanted.dscales, where + " dscales");
      }
    }
  });
}

TEST_F(QuantizeCudaTest, EveryActivation) {
  const Format format{.scaling = Scaling::Block};
  for (const ActivationKind kind : kernels::kActivationKinds) {
    const ActivationSpec spec{kind};
    const std::string where = kernels::activation_name(spec.kind);
    const Tensor x = random_on_gpu({150, 512}, at::kBFloat16);
    const QuantizeArgs args = on_gpu(args_of(format));
    const Tensor y = kernels::activation_forward(x, spec);
    expect_same(kernels::activation_forward_quantize(x, spec, {}, args), kernels::quantize(y, args),
                where + " y");
    const Tensor dy = random_on_gpu(y.sizes(), at::kBFloat16);
    const auto got = kernels::activation_backward_quantize(dy, x, spec, {}, false, true, args);
    const auto wanted = kernels::activation_backward(dy, x, spec, {}, false, true);
    expect_same(got.dx, kernels::quantize(wanted.dx, args), where + " dx");
    expect_close(got.dbias, wanted.dbias, where + " dbias");
  }
}

TEST_F(QuantizeCudaTest, SharedLargestValue) {
  const Tensor x = at::randn({64, 64});
  for (const Format& format : {Format{.scaling = Scaling::Current},
                               Format{.scaling = Scaling::NV, .element = Element::E2M1}}) {
    QuantizeArgs args = args_of(format);
    args.reduce_amax = [](Tensor& amax) { amax.fill_(10.0f); };
    expect_same(kernels::quantize(on_gpu(x), on_gpu(args)), kernels::quantize(x, args),
                describe(format));
  }
}

}  // namespace
