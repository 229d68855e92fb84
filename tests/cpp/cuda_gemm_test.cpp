// Products through cuBLASLt against float64: dtypes, odd sizes, strides, what is added, and FP8
// operands. Where there is no CUDA device or no CUDA backend, there is nothing to test.
#include <gtest/gtest.h>

#include <functional>

#include "kernel_test_support.h"
#include "ligature/backend/cuda/gemm.h"
#include "ligature/backend/cuda/runs.h"
#include "ligature/kernels/gemm.h"
#include "ligature/kernels/log.h"
#include "ligature/kernels/quantized_gemm.h"
#include "ligature/recipes/recipe.h"
#include "ligature/value.h"
#include "tolerance.h"

namespace ligature {
namespace {

using kernels::Accumulation;
using kernels::ProductArgs;

// Of values, and what makes one.
Tensor quantized_linear_forward(const Value& x, const Value& w, const ProductArgs& args) {
  return kernels::quantized_linear_forward(x, w, args);
}
Tensor quantized_linear_input_grad(const Value& dy, const Value& w, const ProductArgs& args) {
  return kernels::quantized_linear_input_grad(dy, w, args);
}
Tensor quantized_linear_weight_grad(const Value& dy, const Value& x, const ProductArgs& args) {
  return kernels::quantized_linear_weight_grad(dy, x, args);
}
void quantized_linear_weight_grad_into(Tensor& out, const Value& dy, const Value& x,
                                       bool accumulate, const ProductArgs& args) {
  kernels::quantized_linear_weight_grad_into(out, dy, x, accumulate, args);
}

const at::Device kDevice(at::kCUDA, 0);
const at::ScalarType kDtypes[] = {at::kFloat, at::kHalf, at::kBFloat16};

struct Sizes {
  int64_t t, k, n;
};
const Sizes kSizes[] = {{1, 1, 1}, {7, 33, 19}, {64, 128, 256}, {130, 72, 8}, {257, 1000, 40}};

class CudaGemm : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available() || !cuda::computes_in(at::kFloat)) {
      GTEST_SKIP() << "no CUDA device, or a build without CUDA";
    }
    torch::manual_seed(1);
  }
};

Tensor random(at::IntArrayRef shape, at::ScalarType dtype) {
  return random_tensor(shape, dtype, kDevice, 0.5);
}

void expect_near(const Tensor& actual, const Tensor& expected, at::ScalarType dtype, int64_t k,
                 const std::string& where) {
  expect_close(actual, expected, dtype, where, tolerance_of_sum(dtype, k));
}

void for_each(const std::function<void(at::ScalarType, const Sizes&, const std::string&)>& f) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const Sizes& s : kSizes) f(dtype, s, describe("cuda", kDevice, dtype, {s.t, s.k, s.n}));
  }
}

TEST_F(CudaGemm, ForwardOverWhatIsAdded) {
  for_each([](at::ScalarType dtype, const Sizes& s, const std::string& where) {
    const Tensor x = random({s.t, s.k}, dtype), w = random({s.n, s.k}, dtype);
    const Tensor bias = random({s.n}, dtype), add = random({s.t, s.n}, dtype);
    for (const double alpha : {1.0, -0.5}) {
      const Tensor xw = alpha * reference(x).mm(reference(w).t());
      for (const bool with_bias : {false, true}) {
        for (const bool with_add : {false, true}) {
          Tensor expected = xw;
          if (with_bias) expected = expected + reference(bias);
          if (with_add) expected = expected + reference(add);
          const Tensor b = with_bias ? bias : Tensor(), a = with_add ? add : Tensor();
          expect_near(kernels::linear_forward(x, w, b, a, alpha), expected, dtype, s.k, where);
        }
      }
      Tensor y = add.clone();
      kernels::linear_forward_add_(y, x, w, bias, alpha);
      expect_near(y, xw + reference(bias) + reference(add), dtype, s.k, where + " in place");
    }
  });
}

TEST_F(CudaGemm, Gradients) {
  for_each([](at::ScalarType dtype, const Sizes& s, const std::string& where) {
    const Tensor x = random({s.t, s.k}, dtype), w = random({s.n, s.k}, dtype);
    const Tensor dy = random({s.t, s.n}, dtype), add = random({s.t, s.k}, dtype);
    const Tensor dx = reference(dy).mm(reference(w));
    const Tensor dw = reference(dy).t().mm(reference(x));
    expect_near(kernels::linear_input_grad(dy, w), dx, dtype, s.n, where);
    expect_near(kernels::linear_input_grad(dy, w, add, 2.0), 2 * dx + reference(add), dtype, s.n,
                where + " add");
    expect_near(kernels::linear_weight_grad(dy, x), dw, dtype, s.t, where);
    for (const at::ScalarType out_dtype : {dtype, at::kFloat}) {
      Tensor out = random({s.n, s.k}, out_dtype);
      const Tensor before = reference(out);
      kernels::linear_weight_grad_into(out, dy, x, true, 0.5);
      expect_near(out, before + 0.5 * dw, out_dtype, s.t, where + " accumulate");
      kernels::linear_weight_grad_into(out, dy, x, false, 1.0);
      expect_near(out, dw, out_dtype, s.t, where + " overwrite");
    }
  });
}

TEST_F(CudaGemm, StridesAndDimensions) {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor wide = random({6, 5, 80}, dtype), w = random({24, 40}, dtype);
    const Tensor w_turned = random({40, 24}, dtype).t();
    const std::vector<std::pair<const char*, Tensor>> inputs = {
        {"contiguous", random({6, 5, 40}, dtype)},
        {"a part of each row", wide.narrow(2, 3, 40)},
        {"every second value", wide.slice(2, 0, 80, 2)},
        {"other order", random({5, 6, 40}, dtype).transpose(0, 1)},
        {"columns", random({40, 30}, dtype).t()},
        {"one row", random({40}, dtype)},
        {"the same row", random({1, 40}, dtype).expand({30, 40})},
        {"not at 16 bytes", random({30 * 40 + 1}, dtype).narrow(0, 1, 30 * 40).view({30, 40})},
    };
    for (const auto& [what, x] : inputs) {
      for (const Tensor& weight : {w, w_turned}) {
        const Tensor y = reference(x).matmul(reference(weight).t());
        expect_near(kernels::linear_forward(x, weight), y, dtype, 40, what);
        const Tensor dy = at::randn(y.sizes(), at::TensorOptions(kDevice)).to(dtype);
        expect_near(kernels::linear_weight_grad(dy, x),
                    reference(dy).reshape({-1, 24}).t().mm(reference(x).reshape({-1, 40})), dtype,
                    30, what);
        expect_near(kernels::linear_input_grad(dy, weight), reference(dy).matmul(reference(weight)),
                    dtype, 24, what);
      }
    }
    Tensor out = random({40, 24}, dtype).t();
    const Tensor before = reference(out), x = inputs[0].second, dy = random({6, 5, 24}, dtype);
    kernels::linear_weight_grad_into(out, dy, x, true);
    const Tensor dw = reference(dy).reshape({-1, 24}).t().mm(reference(x).reshape({-1, 40}));
    expect_near(out.contiguous(), before + dw, dtype, 30, "a transposed result");
  }
}

TEST_F(CudaGemm, NothingToMultiply) {
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor bias = random({4}, dtype), add = random({3, 4}, dtype);
    const Tensor x = random({3, 0}, dtype), w = random({4, 0}, dtype);
    EXPECT_TRUE(at::equal(kernels::linear_forward(x, w), at::zeros_like(add)));
    EXPECT_TRUE(at::equal(kernels::linear_forward(x, w, bias, add), add + bias));
    const Tensor none = random({0, 5}, dtype), dy = random({0, 4}, dtype);
    EXPECT_EQ(kernels::linear_forward(none, random({4, 5}, dtype)).sizes(),
              at::IntArrayRef({0, 4}));
    Tensor out = random({4, 5}, at::kFloat);
    const Tensor before = out.clone();
    kernels::linear_weight_grad_into(out, dy, none, true);
    EXPECT_TRUE(at::equal(out, before));
    kernels::linear_weight_grad_into(out, dy, none, false);
    EXPECT_TRUE(at::equal(out, at::zeros_like(out)));
  }
}

struct NamedRecipe {
  const char* name;
  RecipePtr recipe;
};

std::vector<NamedRecipe> recipes() {
  Float8BlockScalingOptions floats;
  floats.use_f32_scales = true;
  return {{"delayed", std::make_shared<DelayedScaling>()},
          {"current", std::make_shared<Float8CurrentScaling>()},
          {"block", std::make_shared<Float8BlockScaling>()},
          {"block f32", std::make_shared<Float8BlockScaling>(floats)},
          {"mxfp8", std::make_shared<MXFP8BlockScaling>()},
          {"nvfp4", std::make_shared<NVFP4BlockScaling>(NVFP4BlockScalingOptions{true, true})}};
}

struct Quantized {
  QuantizedPtr x, w, dy;

  Quantized(const Recipe& recipe, const Sizes& s, at::ScalarType dtype) {
    const auto make = [&](const char* role, at::IntArrayRef shape) {
      return recipe.make_quantizer({"linear", role, ""}, kDevice)
          ->quantize(random(shape, dtype), {true, true});
    };
    x = make("input", {s.t, s.k});
    w = make("weight", {s.n, s.k});
    dy = make("grad_output", {s.t, s.n});
  }
};

Tensor wide(const QuantizedPtr& q, bool columnwise) {
  return reference(q->only(!columnwise, columnwise)->dequantize(at::kFloat));
}

// Tensor cores sum FP8 products up with fewer bits than float32 has, before they are moved there.
void expect_near_fp8(const Tensor& actual, const Tensor& expected, at::ScalarType dtype, int64_t k,
                     const std::string& where) {
  Tolerance allowed = tolerance_of_sum(dtype == at::kBFloat16 ? dtype : at::kHalf, k);
  if (dtype != at::kBFloat16) allowed = {2 * allowed.rtol, 2 * allowed.atol};
  expect_close(actual, expected, dtype, where, allowed);
}

TEST_F(CudaGemm, ProductsOfQuantizedOperands) {
  const Sizes sizes[] = {
      {64, 128, 256}, {160, 400, 272}, {13, 144, 48}, {256, 1024, 512}, {7, 33, 19}};
  for (const auto& [name, recipe] : recipes()) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const Sizes& s : sizes) {
        const Quantized q(*recipe, s, dtype);
        const std::string where = describe(name, kDevice, dtype, {s.t, s.k, s.n});
        ProductArgs args;
        args.dtype = dtype;
        args.accumulation = Accumulation::Split;
        const Tensor y = wide(q.x, false).mm(wide(q.w, false).t());
        expect_near_fp8(quantized_linear_forward(q.x, q.w, args), y, dtype, s.k, where + " y");
        const Tensor dx = wide(q.dy, false).mm(wide(q.w, true));
        expect_near_fp8(quantized_linear_input_grad(q.dy, q.w, args), dx, dtype, s.n,
                        where + " dx");
        const Tensor dw = wide(q.dy, true).t().mm(wide(q.x, true));
        expect_near_fp8(quantized_linear_weight_grad(q.dy, q.x, args), dw, dtype, s.t,
                        where + " dw");
        Tensor out = random({s.n, s.k}, at::kFloat);
        const Tensor before = reference(out);
        quantized_linear_weight_grad_into(out, q.dy, q.x, true, args);
        expect_near_fp8(out, before + dw, at::kFloat, s.t, where + " into");
        args.bias = random({s.n}, dtype);
        args.add = random({s.t, s.n}, dtype);
        args.alpha = -0.5;
        expect_near_fp8(quantized_linear_forward(q.x, q.w, args),
                        -0.5 * y + reference(args.bias) + reference(args.add), dtype, s.k,
                        where + " bias add alpha");
      }
    }
  }
}

// Sums in FP8's own accumulators keep about 14 bits.
TEST_F(CudaGemm, FastAccumulation) {
  const Float8CurrentScaling recipe;
  const Quantized q(recipe, {64, 512, 256}, at::kBFloat16);
  ProductArgs args;
  args.dtype = at::kBFloat16;
  args.accumulation = Accumulation::Fast;
  const Tensor y = wide(q.x, false).mm(wide(q.w, false).t());
  expect_close(quantized_linear_forward(q.x, q.w, args), y, at::kBFloat16, "fast", {3e-2, 1e-1});
}

TEST_F(CudaGemm, OneOrientationStandsInForTheOther) {
  const Float8CurrentScaling recipe;
  const Quantized q(recipe, {64, 128, 256}, at::kBFloat16);
  ProductArgs args;
  args.dtype = at::kBFloat16;
  const Tensor both = quantized_linear_input_grad(q.dy, q.w, args);
  expect_same_bits(quantized_linear_input_grad(q.dy, q.w->only(true, false), args), both, "dx");
}

std::string backend_of(const std::function<void()>& product) {
  kernels::KernelLog log(at::kCUDA);
  product();
  const auto calls = log.take();
  EXPECT_EQ(calls.size(), 1U);
  return calls.empty() ? "none" : calls[0].backend;
}

TEST_F(CudaGemm, BackendsAreNamed) {
  const Tensor x = random({16, 32}, at::kBFloat16), w = random({32, 32}, at::kBFloat16);
  EXPECT_EQ(backend_of([&] { kernels::linear_forward(x, w); }), "cublaslt");
  const Tensor xd = x.to(at::kDouble), wd = w.to(at::kDouble);
  EXPECT_EQ(backend_of([&] { kernels::linear_forward(xd, wd); }), "aten");
  const Format fp8{.scaling = Scaling::Current};
  const bool native = cuda::has_products_of(fp8, kDevice);
  ProductArgs args;
  args.dtype = at::kBFloat16;
  const Quantized fits(Float8CurrentScaling(), {64, 128, 256}, at::kBFloat16);
  EXPECT_EQ(backend_of([&] { quantized_linear_forward(fits.x, fits.w, args); }),
            native ? "cublaslt, fast accumulation" : "emulated");
  args.accumulation = Accumulation::Split;
  EXPECT_EQ(backend_of([&] { quantized_linear_forward(fits.x, fits.w, args); }),
            native ? "cublaslt" : "emulated");
  const Quantized odd(Float8CurrentScaling(), {64, 128, 19}, at::kBFloat16);
  EXPECT_EQ(backend_of([&] { quantized_linear_forward(odd.x, odd.w, args); }), "emulated");
  const Float8CurrentScaling e5m2({Fp8Format::E5M2, false, 0});
  const Quantized wide_range(e5m2, {64, 128, 256}, at::kBFloat16);
  EXPECT_EQ(backend_of([&] { quantized_linear_forward(wide_range.x, wide_range.w, args); }),
            "emulated");
}

}  // namespace
}  // namespace ligature
