// Linear, BasicLinear and Bias against their formulas.
#include <gtest/gtest.h>

#include "ops_test_support.h"

using namespace ligature;

namespace {

BasicLinear basic_linear(int64_t in, int64_t out, at::ScalarType dtype = at::kDouble) {
  BasicLinearOptions options(in, out);
  options.dtype = dtype;
  return BasicLinear(options);
}

Linear linear(int64_t in, int64_t out, bool bias, at::ScalarType dtype = at::kDouble) {
  LinearOptions options(in, out, bias);
  options.dtype = dtype;
  return Linear(options);
}

Tensors linear_formula(const Tensor& x, const Tensors&, const Tensors& params) {
  Tensor y = at::matmul(x, params[0].t());
  if (params.size() > 1) y = y + params[1];
  return {y};
}

TEST(OpsLinear, EqualsItsFormula) {
  for (const bool bias : {false, true}) {
    Linear op = linear(6, 4, bias);
    for (const auto& shape : op_shapes({6})) {
      expect_formula({op.ptr()}, linear_formula, {leaf(shape), {}}, "Linear");
      expect_formula({op.ptr()}, linear_formula, {strided_leaf(shape), {}}, "Linear, strided");
    }
  }
  expect_formula({basic_linear(6, 4).ptr()}, linear_formula, {leaf({3, 6}), {}}, "BasicLinear");
}

TEST(OpsLinear, KeepsLowPrecision) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    expect_formula({linear(16, 8, true, dtype).ptr()}, linear_formula, {leaf({5, 16}, dtype), {}},
                   c10::toString(dtype));
  }
}

TEST(OpsLinear, TakesTheWeightsDtypeOrAutocasts) {
  Linear op = linear(6, 4, true, at::kBFloat16);
  OperationFuser fuser({op.ptr()});
  Tensor x = leaf({3, 6}, at::kFloat).requires_grad_();
  Tensor y = fuser(x)[0];
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(op->weight().grad().scalar_type(), at::kBFloat16);

  Linear wide = linear(6, 4, true, at::kFloat);
  OperationFuser cast({wide.ptr()});
  const Tensor z = [&] {
    WithAutocast autocast;
    return cast(x)[0];
  }();
  EXPECT_EQ(z.scalar_type(), at::kBFloat16);
  x.mutable_grad().reset();
  z.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(wide->weight().grad().scalar_type(), at::kFloat);
  EXPECT_EQ(wide->bias().grad().scalar_type(), at::kFloat);
}

TEST(OpsLinear, Float64IsNotAutocast) {
  OperationFuser fuser({LayerNorm(6).ptr(), linear(6, 4, true, at::kDouble).ptr(), GELU().ptr()});
  const Tensor x = leaf({3, 6}, at::kDouble);
  const Tensor wanted = fuser(x)[0];
  WithAutocast autocast;
  EXPECT_TRUE(at::equal(fuser(x)[0], wanted));
}

TEST(OpsLinear, HasTheParametersOfTorchsLinear) {
  torch::manual_seed(3);
  torch::nn::Linear theirs(64, 32);
  Linear ours(64, 32);
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
  for (const auto& item : ours->named_parameters()) {
    EXPECT_EQ(item.value().sizes(), theirs->named_parameters()[item.key()].sizes());
    EXPECT_TRUE(item.value().requires_grad());
    EXPECT_LE(item.value().abs().max().item<double>(), 1 / 8.0);
    EXPECT_GE(item.value().abs().max().item<double>(), 0.8 / 8.0);
  }
  for (const auto& basic : ours->basic_ops()) {
    EXPECT_TRUE(basic->own_parameters().values()[0].is_meta());
    EXPECT_EQ(basic->label(), "Linear");
  }
}

TEST(OpsLinear, SeesReplacedParameters) {
  Linear op = linear(3, 3, false);
  OperationFuser fuser({op.ptr()});
  const Tensor x = leaf({2, 3});
  {
    torch::NoGradGuard no_grad;
    op->named_parameters()["weight"].copy_(at::eye(3));
  }
  EXPECT_TRUE(at::equal(fuser(x)[0], x));
  op->to(at::kFloat);
  EXPECT_EQ(fuser(x)[0].scalar_type(), at::kFloat);
}

TEST(OpsLinear, ClonesHaveParametersOfTheirOwn) {
  Linear op = linear(3, 4, true);
  op->weight().requires_grad_(false);
  op->eval();
  auto copy = std::dynamic_pointer_cast<LinearImpl>(op->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_FALSE(copy->weight().requires_grad());
  EXPECT_TRUE(copy->bias().requires_grad());
  EXPECT_FALSE(copy->is_training());
  EXPECT_TRUE(at::equal(copy->weight(), op->weight()));
  EXPECT_FALSE(copy->weight().is_alias_of(op->weight()));
  const Tensor x = leaf({2, 3});
  const Tensor before = OperationFuser({copy})(x)[0];
  {
    torch::NoGradGuard no_grad;
    op->weight().zero_();
  }
  EXPECT_TRUE(at::equal(OperationFuser({copy})(x)[0], before));
}

TEST(OpsLinear, ItsBiasCanBeTakenAwayAndGivenBack) {
  Linear op = linear(6, 4, true);
  OperationFuser fuser({op.ptr(), GELU().ptr()});
  const Tensor x = leaf({3, 6}).requires_grad_();
  const Tensor before = fuser(x)[0];
  const Tensor bias = op->bias();
  op->set_bias({});
  EXPECT_FALSE(op->bias().defined());
  EXPECT_EQ(op->named_parameters().keys(), std::vector<std::string>{"weight"});
  const Tensor y = fuser(x)[0];
  expect_close(y, at::gelu(at::matmul(x, op->weight().t()), "tanh"), "without a bias");
  y.sum().backward();
  EXPECT_TRUE(op->weight().grad().defined());
  EXPECT_FALSE(bias.grad().defined());
  const auto copy = std::dynamic_pointer_cast<LinearImpl>(op->clone());
  EXPECT_FALSE(copy->bias().defined());
  EXPECT_TRUE(at::equal(OperationFuser({copy, GELU().ptr()})(x)[0], y));
  EXPECT_MESSAGE(op->set_bias(at::zeros({5})), "[Linear] bias must be [4], got [5]");
  op->set_bias(bias);
  EXPECT_TRUE(at::equal(fuser(x)[0], before));
  EXPECT_MESSAGE(linear(6, 4, false)->set_bias(bias), "cannot be given a bias");
}

TEST(OpsLinear, RefusesParametersOfOtherDtypesAndLayouts) {
  Linear op = linear(6, 4, true, at::kFloat);
  OperationFuser fuser({op.ptr()});
  const Tensor x = leaf({3, 6}, at::kFloat);
  op->set_bias(at::zeros({4}, on_device(at::kLong)));
  EXPECT_MESSAGE(fuser(x), "[Linear] bias's dtype must be float32, bfloat16, float16 or float64");
  op->set_bias({});
  EXPECT_MESSAGE(fuser(x.to_sparse()), "[Linear] input must be a dense tensor, got one with");
  LinearOptions options(6, 4);
  options.accumulate_into_main_grad = true;
  Linear accumulating(options);
  accumulating->basic_linear().set_main_grad(at::zeros({4, 6}, on_device(at::kLong)));
  const Tensor y = OperationFuser({accumulating.ptr()})(x)[0];
  EXPECT_MESSAGE(y.sum().backward(), "[Linear] main_grad must be a dense tensor of float32");
}

TEST(OpsLinear, UserbuffersAreAcceptedWithoutEffect) {
  BasicLinearOptions options(6, 4);
  options.userbuffers_comm_name = "fc1";
  BasicLinear op(options);
  OperationFuser fuser({op.ptr()});
  const Tensor x = leaf({3, 6}, at::kFloat);
  expect_close(fuser(x)[0], at::matmul(x, op->weight().t()), "y");
  EXPECT_NE(fuser.explain().parts[0].note.find("userbuffers_options have no effect"),
            std::string::npos);
  EXPECT_EQ(OperationFuser({linear(6, 4, true).ptr()}).explain(leaf({3, 6})).parts[0].note, "");
}

TEST(OpsLinear, AddsIntoMainGrad) {
  LinearOptions options(3, 4);
  options.dtype = at::kDouble;
  options.accumulate_into_main_grad = true;
  Linear op(options);
  Tensor main_grad = at::ones({4, 3}, on_device(at::kDouble));
  op->basic_linear().set_main_grad(main_grad);
  OperationFuser fuser({op.ptr()});
  const Tensor x = leaf({5, 3});
  const Tensor y = fuser(x)[0];
  y.backward(at::ones_like(y));
  EXPECT_FALSE(op->weight().grad().defined());
  expect_close(main_grad, 1 + at::ones({4, 5}, on_device(at::kDouble)).matmul(x), "main_grad");
}

TEST(OpsLinear, SaysWhatIsWrong) {
  Linear op = linear(4096, 8, true);
  OperationFuser fuser({op.ptr()});
  EXPECT_MESSAGE(fuser(leaf({16, 4095})),
                 "[Linear] input's last dimension must be in_features=4096, got [16, 4095]");
  EXPECT_MESSAGE(fuser(at::zeros({2, 4096}, on_device(at::kLong))),
                 "[Linear] input's dtype must be");
  EXPECT_MESSAGE(linear(0, 4, true), "[Linear] in_features must be positive, got 0");
  EXPECT_MESSAGE(op->fuser_forward({}, Value(), {}), "[Linear] has no forward pass");
  EXPECT_MESSAGE(Bias(-1), "[Bias] size must be positive, got -1");
}

TEST(OpsBias, EqualsItsFormula) {
  BiasOptions options(6);
  options.dtype = at::kDouble;
  Bias op(options);
  const Formula formula = [](const Tensor& x, const Tensors&, const Tensors& params) -> Tensors {
    return {x + params[0]};
  };
  for (const auto& shape : op_shapes({6})) {
    expect_formula({op.ptr()}, formula, {leaf(shape), {}}, "Bias");
    expect_formula({op.ptr()}, formula, {strided_leaf(shape), {}}, "Bias, strided");
  }
}

}  // namespace
