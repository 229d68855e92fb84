// The activations, plain, gated and scaled, against their formulas.
#include <gtest/gtest.h>

#include "ops_test_support.h"

using namespace ligature;

namespace {

using Function = std::function<Tensor(const Tensor&)>;

Tensor tanh_gelu(const Tensor& x) {
  return 0.5 * x * (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
Tensor qgelu(const Tensor& x) { return x * at::sigmoid(1.702 * x); }
Tensor ramp(const Tensor& x) { return x.clamp_min(0); }
Tensor srelu(const Tensor& x) { return ramp(x).square(); }
Tensor swish(const Tensor& x) { return x * at::sigmoid(x); }
Tensor logistic(const Tensor& x) { return at::sigmoid(x); }
Tensor same(const Tensor& x) { return x; }

/// The gates, and the linear units, of an input with blocks of `n`; 0: two halves.
Tensor half(const Tensor& x, int64_t which, int64_t n) {
  const int64_t block = n > 0 ? n : x.size(-1) / 2;
  return x.unflatten(-1, {x.size(-1) / std::max<int64_t>(2 * block, 1), 2, block})
      .select(-2, which)
      .flatten(-2);
}

Function gated(Function gate, Function linear_units = same, int64_t n = 0) {
  return [=](const Tensor& x) { return gate(half(x, 0, n)) * linear_units(half(x, 1, n)); };
}

template <class Options>
Options interleaved(int64_t n) {
  Options options;
  options.glu_interleave_size = n;
  return options;
}

Function clamped(double limit, double alpha, double offset, int64_t n = 0) {
  return gated(
      [=](const Tensor& a) {
        const Tensor c = a.clamp_max(limit);
        return c * at::sigmoid(alpha * c);
      },
      [=](const Tensor& b) { return b.clamp(-limit, limit) + offset; }, n);
}

Function situ(double beta1, double beta2, int64_t n = 0) {
  return gated([=](const Tensor& a) { return beta1 * at::tanh(a / beta1) * at::sigmoid(a); },
               [=](const Tensor& b) { return beta2 * at::tanh(b / beta2); }, n);
}

ClampedSwiGLUOptions tight_clamp() {
  ClampedSwiGLUOptions options;
  options.limit = 0.75;
  options.alpha = 1.3;
  options.glu_linear_offset = 0.5;
  return options;
}

SiTUGLUOptions small_betas() {
  SiTUGLUOptions options = interleaved<SiTUGLUOptions>(2);
  options.beta1 = 0.5;
  options.beta2 = 1.5;
  return options;
}

struct Case {
  OpPtr op;
  Function function;
};

std::vector<Case> activations() {
  return {{GELU().ptr(), tanh_gelu},
          {QGELU().ptr(), qgelu},
          {ReLU().ptr(), ramp},
          {SReLU().ptr(), srelu},
          {SiLU().ptr(), swish},
          {GLU().ptr(), gated(logistic)},
          {GEGLU().ptr(), gated(tanh_gelu)},
          {QGEGLU().ptr(), gated(qgelu)},
          {ReGLU().ptr(), gated(ramp)},
          {SReGLU().ptr(), gated(srelu)},
          {SwiGLU().ptr(), gated(swish)},
          {SwiGLU(interleaved<SwiGLUOptions>(2)).ptr(), gated(swish, same, 2)},
          {ClampedSwiGLU().ptr(), clamped(7, 1.702, 1)},
          {ClampedSwiGLU(tight_clamp()).ptr(), clamped(0.75, 1.3, 0.5)},
          {SiTUGLU().ptr(), situ(4, 25)},
          {SiTUGLU(small_betas()).ptr(), situ(0.5, 1.5, 2)}};
}

std::vector<Case> scaled_activations() {
  ScaledClampedQGeGLUOptions clamp;
  clamp.glu_interleave_size = 4;
  return {{ScaledSwiGLU().ptr(), gated(swish)},
          {ScaledSwiGLU(interleaved<ScaledSwiGLUOptions>(2)).ptr(), gated(swish, same, 2)},
          {ScaledSiTUGLU().ptr(), situ(4, 25)},
          {ScaledClampedQGeGLU(clamp).ptr(), clamped(7, 1.702, 1, 4)},
          {ScaledSReLU().ptr(), srelu}};
}

Formula formula_of(const Function& function) {
  return [=](const Tensor& x, const Tensors& extras, const Tensors&) -> Tensors {
    const Tensor y = function(x);
    return {extras.empty() ? y : y * extras[0].unsqueeze(-1)};
  };
}

std::vector<int64_t> without_last(std::vector<int64_t> shape) {
  shape.pop_back();
  return shape;
}

TEST(OpsActivation, EqualTheirFormulas) {
  for (const Case& c : activations()) {
    for (const auto& shape : op_shapes({8})) {
      for (const Tensor& x : {leaf(shape), strided_leaf(shape)}) {
        expect_formula({c.op}, formula_of(c.function), {x, {}}, c.op->name());
      }
    }
  }
}

TEST(OpsActivation, KeepLowPrecision) {
  for (const Case& c : activations()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      expect_formula({c.op}, formula_of(c.function), {leaf({7, 16}, dtype), {}}, c.op->name());
    }
  }
}

TEST(OpsActivation, ComputeInTheAutocastDtype) {
  OperationFuser fuser({GELU().ptr()});
  Tensor x = leaf({3, 8}, at::kFloat).requires_grad_();
  const Tensor y = [&] {
    WithAutocast autocast;
    return fuser(x)[0];
  }();
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
}

TEST(OpsActivation, AreKnownByNameAndByTrait) {
  for (const Case& c : activations()) {
    const auto* trait = dynamic_cast<const ActivationOperation*>(c.op.get());
    ASSERT_NE(trait, nullptr) << c.op->name();
    EXPECT_EQ(trait->is_gated(), c.op->name().find("GLU") != std::string::npos) << c.op->name();
    BasicOpPtr made = make_operation(c.op->name(), c.op->basic_ops()[0]->options_state());
    const Tensor x = leaf({3, 8});
    EXPECT_TRUE(at::equal(OperationFuser({made})(x)[0], OperationFuser({c.op})(x)[0]));
    auto copy = std::dynamic_pointer_cast<FusibleOperation>(c.op->clone());
    ASSERT_NE(copy, nullptr);
    EXPECT_TRUE(at::equal(OperationFuser({copy})(x)[0], OperationFuser({c.op})(x)[0]));
  }
  for (const Case& c : scaled_activations()) {
    EXPECT_EQ(dynamic_cast<const ActivationOperation*>(c.op.get()), nullptr) << c.op->name();
  }
}

TEST(OpsActivation, SayWhatIsWrong) {
  EXPECT_MESSAGE(OperationFuser({SwiGLU().ptr()})(leaf({16, 255})),
                 "[SwiGLU] input's last dimension must be even, got [16, 255]");
  OperationFuser blocks({SwiGLU(interleaved<SwiGLUOptions>(4)).ptr()});
  EXPECT_MESSAGE(blocks(leaf({3, 12})), "divisible by 2*glu_interleave_size=8, got [3, 12]");
  EXPECT_MESSAGE(SwiGLU(interleaved<SwiGLUOptions>(0)),
                 "[SwiGLU] glu_interleave_size must be positive, got 0");
  SiTUGLUOptions betas;
  betas.beta2 = -1;
  EXPECT_MESSAGE(SiTUGLU{betas}, "[SiTUGLU] beta2 must be positive, got -1");
  EXPECT_MESSAGE(OperationFuser({GELU().ptr()})(leaf({})), "at least one dimension");
}

TEST(OpsScaledActivation, EqualTheirFormulas) {
  for (const Case& c : scaled_activations()) {
    for (const auto& shape : op_shapes({8})) {
      expect_formula({c.op}, formula_of(c.function), {leaf(shape), {leaf(without_last(shape))}},
                     c.op->name());
    }
    expect_formula({c.op}, formula_of(c.function),
                   {strided_leaf({3, 5, 8}), {strided_leaf({3, 5})}}, c.op->name() + ", strided");
  }
}

TEST(OpsScaledActivation, ScalesMayHaveAnotherDtype) {
  for (const Case& c : scaled_activations()) {
    expect_formula({c.op}, formula_of(c.function),
                   {leaf({7, 16}, at::kBFloat16), {leaf({7}, at::kFloat)}}, c.op->name());
  }
}

TEST(OpsScaledActivation, SayWhatIsWrong) {
  OperationFuser fuser({ScaledSwiGLU().ptr()});
  EXPECT_MESSAGE(fuser(leaf({3, 8}), {leaf({4})}),
                 "[ScaledSwiGLU] scales must have the input's shape without its last dimension, "
                 "[3], got [4]");
  EXPECT_MESSAGE(fuser(leaf({3, 8}), {at::zeros({3}, on_device(at::kLong))}), "floating dtype");
  EXPECT_MESSAGE(fuser(leaf({3, 8})), "take 1 extra inputs, got 0");
}

}  // namespace
