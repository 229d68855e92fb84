// Torch's functions on quantized tensors made in C++: values and gradients against plain tensors of
// the same values, writes against the quantizer, optimizers step by step.
#include <gtest/gtest.h>

#include <sstream>

#include "quantized_model_support.h"

namespace ligature::testing {
namespace {

Tensor leaf(const RecipePtr& recipe, at::IntArrayRef sizes) {
  const QuantizerPtr quantizer = weight_quantizer(recipe);
  const Tensor x = torch::randn(sizes, on_device());
  if (quantizer->delayed) quantizer->delayed->scale.fill_(50.0f);
  return wrap_quantized(quantizer->quantize(x, weight_usage(quantizer))).set_requires_grad(true);
}

/// What a write of these values leaves: with delayed scaling, a scale that holds them.
QuantizedPtr again(const Tensor& wrapper, const Tensor& values) {
  const QuantizedPtr q = quantized_of(wrapper);
  const Usage usage{q->rowwise().defined(), q->columnwise().defined()};
  if (q->format_tag().scaling != Scaling::Delayed) return q->quantizer()->quantize(values, usage);
  auto quantizer = make_delayed_quantizer(q->format_tag().element, 1, values.device());
  const Tensor amax = values.detach().to(at::kFloat).abs().max().reshape({1});
  quantizer->delayed->scale = torch::full_like(amax, 448.0f) / amax;
  return quantizer->quantize(values, usage);
}

bool holds(const Tensor& wrapper, const Tensor& values) {
  return same(quantized_of(wrapper)->tensors(), again(wrapper, values)->tensors());
}

TEST(QuantizedFunctionsTest, ComputeWithTheValues) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const Tensor w = leaf(named.make(), {48, 40});
    const Tensor v = values_of(w);
    const Tensor x = torch::randn({8, 40}, on_device());
    const Tensor rows = torch::tensor({3, 1}, on_device(at::kLong));
    torch::NoGradGuard no_grad;
    EXPECT_TRUE((w + 1).equal(v + 1));
    EXPECT_TRUE((1 + w).equal(1 + v));
    EXPECT_TRUE(torch::matmul(x, w.t()).equal(torch::matmul(x, v.t())));
    EXPECT_TRUE(torch::nn::functional::linear(x, w).equal(torch::nn::functional::linear(x, v)));
    EXPECT_TRUE(torch::cat({w, v}, 0).equal(torch::cat({v, v}, 0)));
    EXPECT_TRUE(w.index_select(0, rows).equal(v.index_select(0, rows)));
    EXPECT_TRUE(w.index({rows}).equal(v.index({rows})));
    EXPECT_TRUE(w.to(at::kDouble).equal(v.to(at::kDouble)));
    EXPECT_EQ(w.norm().item<float>(), v.norm().item<float>());
    EXPECT_EQ(w[2][3].item<float>(), v[2][3].item<float>());
    EXPECT_TRUE(torch::zeros_like(w).equal(torch::zeros_like(v)));
    EXPECT_EQ(quantized_of(torch::empty_like(w)), nullptr);
    std::ostringstream a, b;
    a << w.detach();
    b << v;
    EXPECT_EQ(a.str(), b.str());
  }
}

TEST(QuantizedFunctionsTest, GradientsReachALeaf) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const Tensor w = leaf(named.make(), {48, 40});
    const Tensor v = values_of(w).to(at::kDouble).requires_grad_();
    const auto loss = [](const Tensor& t) {
      torch::manual_seed(1);
      const Tensor x = torch::randn({8, 40}, on_device()).to(t.dtype());
      return (torch::matmul(x, t.t()).tanh() * 2).sum() + (t * t).mean() +
             t.view({6, 8, 40}).select(0, 1).sum() + t.clone().slice(1, 3, 7).sum() +
             torch::stack({t, t}).pow(3).mean();
    };
    loss(w).backward();
    loss(v).backward();
    ASSERT_TRUE(w.grad().defined());
    EXPECT_EQ(quantized_of(w.grad()), nullptr);
    EXPECT_TRUE(torch::allclose(w.grad().to(at::kDouble), v.grad(), 1e-5, 1e-5));
  }
}

TEST(QuantizedFunctionsTest, GradientsInAnotherDtypeAndTwice) {
  const Tensor w = leaf(std::make_shared<MXFP8BlockScaling>(), {32, 32});
  const Tensor half = w.to(at::kBFloat16);
  EXPECT_NE(quantized_of(half), nullptr);
  half.sum().backward();
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(w.grad().equal(torch::ones({32, 32}, on_device())));
  w.mutable_grad() = Tensor();
  const Tensor first = torch::autograd::grad({w.pow(3).sum()}, {w}, {}, true, true)[0];
  first.sum().backward();
  EXPECT_TRUE(torch::allclose(w.grad(), 6 * values_of(w)));
}

TEST(QuantizedFunctionsTest, SomeKeepTheQuantizedData) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const Tensor w = leaf(named.make(), {48, 40});
    const auto parts = quantized_of(w)->tensors();
    const auto is_same_data = [&](const Tensor& t) {
      return quantized_of(t) != nullptr && quantized_of(t)->tensors()[0].is_same(parts[0]);
    };
    EXPECT_TRUE(is_same_data(w.detach()));
    EXPECT_FALSE(w.detach().requires_grad());
    EXPECT_TRUE(is_same_data(at::alias(w)));
    EXPECT_TRUE(is_same_data(w.data()));
    EXPECT_TRUE(is_same_data(w.view({6, 8, 40})));
    EXPECT_TRUE(is_same_data(w.reshape({-1, 8, 40})));
    EXPECT_TRUE(is_same_data(w.unsqueeze(0)));
    EXPECT_TRUE(is_same_data(w.unsqueeze(0).squeeze(0)));
    EXPECT_TRUE(w.contiguous().is_same(w));
    EXPECT_EQ(quantized_of(w.view({-1})), nullptr);
    for (const Tensor& copy :
         {w.clone(), w.to(at::kBFloat16), w.to(w.device(), at::kFloat, false, true)}) {
      ASSERT_NE(quantized_of(copy), nullptr);
      EXPECT_FALSE(is_same_data(copy));
      EXPECT_TRUE(same(quantized_of(copy)->tensors(), parts));
      EXPECT_TRUE(copy.requires_grad());
    }
    EXPECT_EQ(w.to(at::kBFloat16).scalar_type(), at::kBFloat16);
  }
}

TEST(QuantizedFunctionsTest, WhatIsWrittenIsQuantized) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const Tensor w = leaf(named.make(), {48, 40});
    const Tensor other = leaf(named.make(), {48, 40});
    const Tensor x = torch::randn({48, 40}, on_device());
    const Tensor part = quantized_of(w)->tensors()[0];
    torch::NoGradGuard no_grad;
    Tensor v = values_of(w);
    const auto version = w._version();
    const auto part_version = part._version();
    EXPECT_TRUE(w.mul_(1.5).is_same(w));
    EXPECT_TRUE(holds(w, v * 1.5));
    EXPECT_GT(w._version(), version);
    EXPECT_GT(part._version(), part_version);
    v = values_of(w);
    w.addcdiv_(x, x.abs() + 1, 0.25);
    EXPECT_TRUE(holds(w, v.addcdiv(x, x.abs() + 1, 0.25)));
    Tensor out = w;
    torch::add_out(out, x, other);
    EXPECT_TRUE(holds(w, x + values_of(other)));
    v = values_of(w);
    w.add_(w);
    EXPECT_TRUE(holds(w, v + v));
    w.copy_(x.to(at::kDouble));
    EXPECT_TRUE(holds(w, x));
    w.copy_(torch::ones({40}, on_device()));
    EXPECT_TRUE(holds(w, torch::ones({48, 40}, on_device())));
    w.copy_(other);
    EXPECT_TRUE(same(quantized_of(w)->tensors(), quantized_of(other)->tensors()));
    Tensor plain = torch::zeros({48, 40}, on_device());
    plain.copy_(w);
    EXPECT_TRUE(plain.equal(values_of(w)));
    w.zero_();
    EXPECT_TRUE(values_of(w).equal(torch::zeros({48, 40}, on_device())));
    torch::nn::init::constant_(w, 2.0);
    EXPECT_TRUE(holds(w, torch::full({48, 40}, 2.0, on_device())));
    EXPECT_TRUE(quantized_of(w)->tensors()[0].is_same(part));
  }
}

TEST(QuantizedFunctionsTest, WritesAndAutograd) {
  const auto recipe = std::make_shared<Float8CurrentScaling>();
  const Tensor w = leaf(recipe, {16, 16});
  EXPECT_THROW(w.mul_(2), c10::Error);
  EXPECT_THROW(w.copy_(torch::ones({16, 16}, on_device())), c10::Error);
  const Tensor copy = w.clone();
  copy.mul_(3);  // of a computed one, autograd follows
  copy.sum().backward();
  EXPECT_TRUE(w.grad().equal(torch::full({16, 16}, 3.0, on_device())));
  const Tensor x = torch::randn({16, 16}, on_device()).requires_grad_();
  const Tensor target = leaf(recipe, {16, 16}).detach();
  target.copy_(x * 2);
  EXPECT_TRUE(target.requires_grad());
  target.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({16, 16}, 2.0, on_device())));
}

TEST(QuantizedFunctionsTest, DataIsTakenOverFromQuantizedTensorsOnly) {
  Linear linear = [] {
    const QuantizedModelInit init({.recipe = std::make_shared<MXFP8BlockScaling>()});
    return Linear(32, 32);
  }();
  EXPECT_THROW(linear->weight().set_data(torch::ones({32, 32}, on_device())), c10::Error);
  const Tensor before = values_of(linear->weight());
  linear->to(at::kBFloat16);
  EXPECT_EQ(linear->weight().scalar_type(), at::kBFloat16);
  EXPECT_EQ(linear->bias().scalar_type(), at::kBFloat16);
  EXPECT_TRUE(values_of(linear->weight()).to(at::kFloat).equal(before));
}

// One AdamW of plain tensors; after each of its writes the weight is quantized and dequantized.
class RoundedAdamW {
 public:
  RoundedAdamW(const Tensor& w, double lr, double decay)
      : like_(w),
        values_(values_of(w)),
        m_(torch::zeros_like(values_)),
        v_(torch::zeros_like(values_)),
        lr_(lr),
        decay_(decay) {}

  void step(const Tensor& grad) {
    ++step_;
    write(values_ * (1 - lr_ * decay_));
    m_ = m_.mul(0.9).add(grad, 1 - 0.9);
    v_ = v_.mul(0.999).addcmul(grad, grad, 1 - 0.999);
    const Tensor denominator = (v_.sqrt() / std::sqrt(1 - std::pow(0.999, step_))).add(1e-8);
    write(values_.addcdiv(m_, denominator, -lr_ / (1 - std::pow(0.9, step_))));
  }
  const QuantizedPtr& weight() const { return quantized_; }

 private:
  void write(const Tensor& values) {
    quantized_ = again(like_, values);
    values_ = quantized_->dequantize();
  }
  Tensor like_, values_, m_, v_;
  QuantizedPtr quantized_;
  double lr_, decay_;
  int step_ = 0;
};

TEST(QuantizedFunctionsTest, AdamWTrainsAQuantizedWeight) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const RecipePtr recipe = named.make();
    Linear linear = [&] {
      const QuantizedModelInit init({.recipe = recipe});
      return Linear(32, 32);
    }();
    OperationFuser fuser({linear.ptr()});
    torch::manual_seed(11);
    const Tensor x = torch::randn({64, 32}, on_device());
    const Tensor target = torch::matmul(x, torch::randn({32, 32}, on_device()) / 6);
    const Tensor w = linear->weight();
    RoundedAdamW reference(w, 0.01, 0.1);
    torch::optim::AdamW optimizer(linear->parameters(),
                                  torch::optim::AdamWOptions(0.01).weight_decay(0.1));
    std::vector<float> losses;
    for (int step = 0; step < 30; ++step) {
      Tensor loss;
      {
        Autocast autocast({.recipe = recipe});
        loss = torch::mse_loss(fuser(x)[0], target);
      }
      optimizer.zero_grad();
      loss.backward();
      losses.push_back(loss.item<float>());
      reference.step(w.grad());
      optimizer.step();
      ASSERT_TRUE(same(quantized_of(w)->tensors(), reference.weight()->tensors())) << step;
    }
    if (std::string(named.name).find("nvfp4") == std::string::npos) {
      EXPECT_LT(losses.back(), 0.7 * losses.front());
    }
    EXPECT_TRUE(w.is_same(linear->weight()));
    EXPECT_NE(quantized_of(linear->weight()), nullptr);
  }
}

TEST(QuantizedFunctionsTest, EveryOptimizerTakesIt) {
  const auto recipe = std::make_shared<MXFP8BlockScaling>();
  const Tensor x = torch::randn({64, 40}, on_device());
  const auto losses = [&](const auto& make) {
    Sequential model = make_model(recipe);
    const Tensor before = values_of(weight_of(model, 1));
    auto optimizer = make(model->parameters());
    std::vector<float> out;
    for (int step = 0; step < 20; ++step) {
      const auto closure = [&] {
        Autocast autocast({.recipe = recipe});
        optimizer.zero_grad();
        const Tensor loss = torch::mse_loss(model->forward(x), x);
        loss.backward();
        return loss;
      };
      out.push_back(optimizer.step(closure).template item<float>());
    }
    EXPECT_NE(quantized_of(weight_of(model, 1)), nullptr);
    EXPECT_FALSE(values_of(weight_of(model, 1)).equal(before));
    EXPECT_LT(out.back(), out.front());
  };
  losses([](auto p) { return torch::optim::SGD(p, torch::optim::SGDOptions(0.1).momentum(0.9)); });
  losses([](auto p) { return torch::optim::Adam(p, 0.01); });
  losses([](auto p) { return torch::optim::RMSprop(p, 0.003); });
  losses([](auto p) { return torch::optim::Adagrad(p, 0.03); });
}

TEST(QuantizedFunctionsTest, DequantizePassesTheGradient) {
  const Tensor w = leaf(std::make_shared<MXFP8BlockScaling>(), {32, 32});
  const Tensor values = w.dequantize();
  EXPECT_EQ(quantized_of(values), nullptr);
  EXPECT_TRUE(values.equal(values_of(w)));
  (values * 3).sum().backward();
  EXPECT_TRUE(w.grad().equal(torch::full({32, 32}, 3.0, on_device())));
}

TEST(QuantizedFunctionsTest, PlainTensorsHaveNoSuchKey) {
  const Tensor w = leaf(std::make_shared<MXFP8BlockScaling>(), {32, 32});
  const auto key = c10::DispatchKey::PrivateUse3;
  EXPECT_TRUE(w.key_set().has(key));
  EXPECT_FALSE((w + 1).key_set().has(key));
  EXPECT_FALSE(torch::ones({2}).key_set().has(key));
}

}  // namespace
}  // namespace ligature::testing
