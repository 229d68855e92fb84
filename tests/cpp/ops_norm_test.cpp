// LayerNorm, RMSNorm and L2Normalization against their formulas.
#include <gtest/gtest.h>

#include "ops_test_support.h"

using namespace ligature;

namespace {

NormOptions norm_options(std::vector<int64_t> shape, bool zero_centered,
                         at::ScalarType dtype = at::kDouble) {
  NormOptions options(std::move(shape));
  options.zero_centered_gamma = zero_centered;
  options.eps = 1e-3;
  options.dtype = dtype;
  return options;
}

template <class Op>
Op with_random_parameters(Op op) {
  torch::NoGradGuard no_grad;
  for (Tensor& parameter : op->parameters()) parameter.normal_();
  return op;
}

std::vector<int64_t> last_dims(size_t n) {
  std::vector<int64_t> dims;
  for (size_t i = 1; i <= n; ++i) dims.push_back(-static_cast<int64_t>(i));
  return dims;
}

Formula layer_norm_formula(const NormOptions& options) {
  return [=](const Tensor& x, const Tensors&, const Tensors& params) -> Tensors {
    const auto dims = last_dims(options.normalized_shape.size());
    const Tensor centered = x - x.mean(dims, true);
    const Tensor rstd = (centered.square().mean(dims, true) + options.eps).rsqrt();
    const Tensor gamma = options.zero_centered_gamma ? 1 + params[0] : params[0];
    return {centered * rstd * gamma + params[1]};
  };
}

Formula rms_norm_formula(const NormOptions& options) {
  return [=](const Tensor& x, const Tensors&, const Tensors& params) -> Tensors {
    const auto dims = last_dims(options.normalized_shape.size());
    const Tensor rstd = (x.square().mean(dims, true) + options.eps).rsqrt();
    return {x * rstd * (options.zero_centered_gamma ? 1 + params[0] : params[0])};
  };
}

TEST(OpsNorm, EqualTheirFormulas) {
  for (const bool zero_centered : {false, true}) {
    for (const std::vector<int64_t>& tail : std::vector<std::vector<int64_t>>{{6}, {2, 3}}) {
      const NormOptions options = norm_options(tail, zero_centered);
      LayerNorm layer_norm = with_random_parameters(LayerNorm(options));
      RMSNorm rms_norm = with_random_parameters(RMSNorm(options));
      for (const auto& shape : op_shapes(tail)) {
        for (const Tensor& x : {leaf(shape), strided_leaf(shape)}) {
          expect_formula({layer_norm.ptr()}, layer_norm_formula(options), {x, {}}, "LayerNorm");
          expect_formula({rms_norm.ptr()}, rms_norm_formula(options), {x, {}}, "RMSNorm");
        }
      }
    }
  }
}

TEST(OpsNorm, KeepLowPrecision) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const NormOptions options = norm_options({64}, false, dtype);
    LayerNorm layer_norm = with_random_parameters(LayerNorm(options));
    RMSNorm rms_norm = with_random_parameters(RMSNorm(options));
    const Tensor x = leaf({4, 64}, dtype);
    expect_formula({layer_norm.ptr()}, layer_norm_formula(options), {x, {}}, c10::toString(dtype));
    expect_formula({rms_norm.ptr()}, rms_norm_formula(options), {x, {}}, c10::toString(dtype));
  }
}

TEST(OpsNorm, ParametersMayHaveAnotherDtype) {
  LayerNorm op(norm_options({8}, false, at::kFloat));
  op->named_parameters()["bias"].set_data(at::zeros({8}, on_device(at::kDouble)));
  OperationFuser fuser({op.ptr()});
  Tensor x = leaf({3, 8}, at::kBFloat16).requires_grad_();
  const Tensor y = fuser(x)[0];
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(op->named_parameters()["weight"].grad().scalar_type(), at::kFloat);
  EXPECT_EQ(op->named_parameters()["bias"].grad().scalar_type(), at::kDouble);
}

TEST(OpsNorm, WritesTheAutocastDtype) {
  RMSNorm op(norm_options({8}, false, at::kFloat));
  OperationFuser fuser({op.ptr()});
  Tensor x = leaf({3, 8}, at::kFloat).requires_grad_();
  const Tensor y = [&] {
    WithAutocast autocast;
    return fuser(x)[0];
  }();
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
}

TEST(OpsNorm, BeginAsIdentityOfTheNormalized) {
  for (const bool zero_centered : {false, true}) {
    LayerNorm op(norm_options({4}, zero_centered));
    EXPECT_TRUE((op->parameters()[0] == (zero_centered ? 0.0 : 1.0)).all().item<bool>());
    EXPECT_TRUE((op->parameters()[1] == 0.0).all().item<bool>());
    EXPECT_EQ(RMSNorm(norm_options({4}, zero_centered))->parameters().size(), 1U);
  }
}

TEST(OpsNorm, CloneAndOptions) {
  RMSNorm op = with_random_parameters(RMSNorm(norm_options({2, 3}, true)));
  auto copy = std::dynamic_pointer_cast<RMSNormImpl>(op->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(at::equal(copy->parameters()[0], op->parameters()[0]));
  EXPECT_FALSE(copy->parameters()[0].is_alias_of(op->parameters()[0]));
  BasicOpPtr made = make_operation("RMSNorm", op->options_state());
  EXPECT_EQ(std::get<std::vector<int64_t>>(*made->options_state().find("normalized_shape")),
            (std::vector<int64_t>{2, 3}));
  op->set_option("eps", 0.25);
  EXPECT_EQ(op->options.eps, 0.25);
  EXPECT_MESSAGE(op->set_option("eps", -1.0), "eps must be zero or more, got -1");
}

TEST(OpsNorm, SayWhatIsWrong) {
  OperationFuser fuser({LayerNorm(norm_options({256}, false)).ptr()});
  EXPECT_MESSAGE(fuser(leaf({16, 255})),
                 "[LayerNorm] input's trailing dimensions must be normalized_shape=[256], got [16, "
                 "255]");
  OperationFuser wide({RMSNorm(norm_options({2, 3}, false)).ptr()});
  EXPECT_MESSAGE(wide(leaf({3})), "[RMSNorm] input's trailing dimensions must be");
  EXPECT_MESSAGE(LayerNorm(NormOptions(std::vector<int64_t>{})), "normalized_shape must be");
  EXPECT_MESSAGE(LayerNorm(NormOptions({4, 0})), "normalized_shape must be");
}

TEST(OpsL2Normalization, EqualsItsFormula) {
  L2NormalizationOptions options;
  options.eps = 1e-2;
  options.seq_length = 128;
  L2Normalization op(options);
  const Formula formula = [](const Tensor& x, const Tensors&, const Tensors&) -> Tensors {
    return {x * (x.square().sum(-1, true) + 1e-2).rsqrt()};
  };
  for (const auto& shape : op_shapes({6})) {
    expect_formula({op.ptr()}, formula, {leaf(shape), {}}, "L2Normalization");
    expect_formula({op.ptr()}, formula, {strided_leaf(shape), {}}, "L2Normalization, strided");
  }
  OperationFuser fuser({op.ptr()});
  EXPECT_MESSAGE(fuser(leaf({})), "[L2Normalization] input must have at least one dimension");
}

}  // namespace
