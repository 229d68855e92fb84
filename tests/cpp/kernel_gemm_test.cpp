// The three products of a linear layer against float64 matmuls.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/kernels/gemm.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;

namespace {

constexpr int64_t kIn = 13, kOut = 9;

struct Case {
  Tensor x, w, bias, add, dy, dx_add;
  std::string where;

  Case(at::Device device, at::ScalarType dtype, std::vector<int64_t> shape)
      : x(random_tensor(shape, dtype, device)),
        w(random_tensor({kOut, kIn}, dtype, device)),
        bias(random_tensor({kOut}, dtype, device)),
        dx_add(random_tensor(shape, dtype, device)),
        where(describe("linear", device, dtype, shape)) {
    shape.back() = kOut;
    add = random_tensor(shape, dtype, device);
    dy = random_tensor(shape, dtype, device);
  }

  int64_t rows() const { return x.numel() / kIn; }
};

template <typename F>
void for_each_case(const F& f) {
  for_each_device_and_dtype([&](at::Device device, at::ScalarType dtype) {
    for (const auto& shape : test_shapes(kIn)) f(Case(device, dtype, shape), dtype);
  });
}

Tensor product(const Tensor& x, const Tensor& w) { return reference(x).matmul(reference(w).t()); }

Tensor weight_grad(const Tensor& dy, const Tensor& x) {
  return reference(dy).reshape({-1, kOut}).t().matmul(reference(x).reshape({-1, kIn}));
}

// Two roundings instead of one where both a bias and a tensor are added.
Tolerance twice(Tolerance t) { return {2 * t.rtol, 2 * t.atol}; }

TEST(GemmTest, ForwardOverBiasAddAndAlpha) {
  for_each_case([](const Case& c, at::ScalarType dtype) {
    for (const double alpha : {1.0, -0.5}) {
      const Tensor xw = alpha * product(c.x, c.w);
      const Tensor b = reference(c.bias), a = reference(c.add);
      using kernels::linear_forward;
      expect_close(linear_forward(c.x, c.w, {}, {}, alpha), xw, dtype, c.where);
      expect_close(linear_forward(c.x, c.w, c.bias, {}, alpha), xw + b, dtype, c.where + " bias");
      expect_close(linear_forward(c.x, c.w, {}, c.add, alpha), xw + a, dtype, c.where + " add");
      expect_close(linear_forward(c.x, c.w, c.bias, c.add, alpha), xw + b + a, dtype,
                   c.where + " bias add", twice(tolerance(dtype)));
    }
  });
}

// Too large for our own products in bfloat16: a bias goes into oneDNN's, to the bits of ATen's way.
TEST(GemmTest, LargeForwardWithBiasInBFloat16) {
  torch::manual_seed(3);
  const Tensor x = random_tensor({3, 103, 512}, at::kBFloat16);
  const Tensor w = random_tensor({301, 512}, at::kBFloat16);
  const Tensor bias = random_tensor({301}, at::kBFloat16, at::kCPU, 20.0);
  const Tensor y = kernels::linear_forward(x, w, bias);
  ASSERT_EQ(y.sizes(), (std::vector<int64_t>{3, 103, 301}));
  const Tensor wanted = reference(x).matmul(reference(w).t()) + reference(bias);
  expect_close(y, wanted, at::kBFloat16, "bias", {1e-2, 1e-1});
  expect_same_bits(y.view({-1, 301}), at::addmm(bias, x.view({-1, 512}), w.t()), "addmm");
  const Tensor strided = random_tensor({512, 301}, at::kBFloat16).t();
  expect_close(kernels::linear_forward(x, strided, bias),
               reference(x).matmul(reference(strided).t()) + reference(bias), at::kBFloat16,
               "strided", {1e-2, 1e-1});
}

TEST(GemmTest, ForwardLeavesItsArgumentsAlone) {
  for_each_case([](const Case& c, at::ScalarType) {
    const Tensor add = c.add.clone(), bias = c.bias.clone();
    kernels::linear_forward(c.x, c.w, c.bias, c.add);
    expect_same_bits(c.add, add, c.where);
    expect_same_bits(c.bias, bias, c.where);
  });
}

TEST(GemmTest, ForwardAddInPlace) {
  for_each_case([](const Case& c, at::ScalarType dtype) {
    for (const double alpha : {1.0, 3.0}) {
      for (const bool with_bias : {false, true}) {
        Tensor y = c.add.clone();
        const void* memory = y.data_ptr();
        kernels::linear_forward_add_(y, c.x, c.w, with_bias ? c.bias : Tensor(), alpha);
        Tensor expected = reference(c.add) + alpha * product(c.x, c.w);
        if (with_bias) expected = expected + reference(c.bias);
        expect_close(y, expected, dtype, c.where, twice(tolerance(dtype)));
        EXPECT_EQ(y.data_ptr(), memory) << c.where;
      }
    }
  });
}

TEST(GemmTest, InputGrad) {
  for_each_case([](const Case& c, at::ScalarType dtype) {
    for (const double alpha : {1.0, 0.25}) {
      const Tensor expected = alpha * reference(c.dy).matmul(reference(c.w));
      expect_close(kernels::linear_input_grad(c.dy, c.w, {}, alpha), expected, dtype, c.where);
      expect_close(kernels::linear_input_grad(c.dy, c.w, c.dx_add, alpha),
                   expected + reference(c.dx_add), dtype, c.where + " add");
    }
  });
}

TEST(GemmTest, WeightGrad) {
  for_each_case([](const Case& c, at::ScalarType dtype) {
    for (const double alpha : {1.0, 0.25}) {
      const Tensor expected = alpha * weight_grad(c.dy, c.x);
      expect_close(kernels::linear_weight_grad(c.dy, c.x, alpha), expected, dtype, c.where,
                   tolerance_of_sum(dtype, c.rows()));
    }
  });
}

TEST(GemmTest, WeightGradInto) {
  for_each_case([](const Case& c, at::ScalarType dtype) {
    const Tensor expected = weight_grad(c.dy, c.x);
    const Tensor before = random_tensor({kOut, kIn}, dtype, c.x.device());
    for (const bool accumulate : {false, true}) {
      Tensor out = accumulate ? before.clone() : at::full_like(before, NAN);
      kernels::linear_weight_grad_into(out, c.dy, c.x, accumulate, 0.5);
      expect_close(out, 0.5 * expected + (accumulate ? reference(before) : at::zeros({1})), dtype,
                   c.where, tolerance_of_sum(dtype, c.rows()));
    }
  });
}

TEST(GemmTest, WeightGradIntoFloatIsNotRounded) {
  for_each_case([](const Case& c, at::ScalarType dtype) {
    if (dtype == at::kDouble) return;
    const Tensor before = random_tensor({kOut, kIn}, at::kFloat, c.x.device());
    for (const bool accumulate : {false, true}) {
      Tensor out = accumulate ? before.clone() : at::full_like(before, NAN);
      kernels::linear_weight_grad_into(out, c.dy, c.x, accumulate);
      const Tensor expected = weight_grad(c.dy, c.x);
      expect_close(out, accumulate ? expected + reference(before) : expected, at::kFloat, c.where,
                   tolerance_of_sum(at::kFloat, c.rows()));
    }
  });
}

TEST(GemmTest, WrongSizeNamesWantedAndGot) {
  try {
    kernels::linear_forward(at::ones({2, 5}), at::ones({3, 4}));
    FAIL() << "no error";
  } catch (const c10::Error& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find("[linear_forward]"), std::string::npos) << message;
    EXPECT_NE(message.find("of 4, got 5"), std::string::npos) << message;
  }
}

}  // namespace
