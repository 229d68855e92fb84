// What is written into a quantized tensor loses no more than its format's rounding; what delayed
// scaling learns of it; and that it has one state for every recipe.
#include <gtest/gtest.h>

#include <cmath>

#include "ligature/kernels/log.h"
#include "ligature/recipes/recipe_state.h"
#include "ligature/recipes/weights.h"
#include "quantized_model_support.h"

namespace ligature::testing {
namespace {

Linear make_linear(const RecipePtr& recipe, at::ScalarType dtype = at::kFloat) {
  LinearOptions options(64, 32);
  options.bias = false;
  options.dtype = dtype;
  const QuantizedModelInit init({.recipe = recipe});
  return Linear(options);
}

/// Half a step of the element type, at each value and at the smallest there is.
void expect_holds(const NamedRecipe& named, const Tensor& weight, const Tensor& given) {
  const Tensor wanted = given.detach().to(at::kDouble);
  const double amax = wanted.abs().max().item<double>();
  const bool fp4 = std::string(named.name).starts_with("nvfp4");
  const Tensor bound = wanted.abs() * (fp4 ? 0 : 0.0625 + 0.008) + amax * (fp4 ? 0.26 : 1e-5);
  const Tensor error = (values_of(weight).to(at::kDouble) - wanted).abs();
  EXPECT_TRUE((error <= bound).all().item<bool>())
      << named.name << ": " << (error / amax).max().item<double>();
}

DelayedTensors weight_state(Linear linear) {
  return recipe_states(*linear->recipe_state_owner()).back().forward.at(1);
}

Tensor run(Linear linear, const RecipePtr& recipe, const Tensor& x) {
  OperationFuser fuser({linear.ptr()});
  const Autocast autocast({.recipe = recipe});
  return fuser(x)[0];
}

TEST(QuantizedWritesTest, LoseNoMoreThanTheRounding) {
  using Write = std::function<void(Tensor&)>;
  const std::vector<std::pair<const char*, Write>> writes = {
      {"copy_",
       [](Tensor& w) { w.copy_(torch::linspace(-7, 5, w.numel(), on_device()).view(w.sizes())); }},
      {"fill_", [](Tensor& w) { w.fill_(3.0); }},
      {"mul_", [](Tensor& w) { w.mul_(20); }},
      {"div_", [](Tensor& w) { w.div_(1000); }},
      {"init", [](Tensor& w) { torch::nn::init::uniform_(w, -9, 9); }},
      {"detach", [](Tensor& w) { w.detach().add_(5); }},
      {"view", [](Tensor& w) { w.view({4, 8, 64}).mul_(30); }},
      {"out", [](Tensor& w) { torch::add_out(w, torch::full_like(w, 4.0), torch::ones_like(w)); }},
      {"foreach", [](Tensor& w) { at::_foreach_mul_(std::vector<Tensor>{w}, 40.0); }},
  };
  for (const NamedRecipe& named : model_recipes()) {
    for (const auto& [name, write] : writes) {
      SCOPED_TRACE(name);
      torch::NoGradGuard no_grad;
      Linear linear = make_linear(named.make());
      Tensor weight = linear->weight();
      Tensor wanted = values_of(weight);
      torch::manual_seed(3);
      write(weight);
      torch::manual_seed(3);
      write(wanted);
      expect_holds(named, weight, wanted);
    }
  }
}

TEST(QuantizedWritesTest, AnOptimizerThatGrowsWeights) {
  for (const NamedRecipe& named : model_recipes()) {
    Linear linear = make_linear(named.make());
    {
      torch::NoGradGuard no_grad;
      linear->weight().fill_(0.01);
    }
    torch::optim::SGD optimizer(linear->parameters(), 1.0);
    for (int step = 0; step < 8; ++step) {
      linear->weight().mutable_grad() = torch::full({32, 64}, -0.5, on_device());
      const Tensor before = values_of(linear->weight());
      optimizer.step();
      expect_holds(named, linear->weight(), before + 0.5);
    }
  }
}

TEST(QuantizedWritesTest, ValuesThatAreNoNumbersAndVerySmallOnes) {
  for (const auto format : {Fp8Format::E4M3, Fp8Format::E5M2}) {
    const auto recipe =
        std::make_shared<DelayedScaling>(DelayedScalingOptions{.fp8_format = format});
    const float largest = format == Fp8Format::E4M3 ? 448 : 57344;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      torch::NoGradGuard no_grad;
      Linear linear = make_linear(recipe, dtype);
      Tensor weight = linear->weight();
      for (const float special : {INFINITY, -INFINITY, NAN}) {
        Tensor values = torch::linspace(-600, 900, 2048, on_device()).view({32, 64}).to(dtype);
        values[31][63] = special;
        values[0][9] = special;
        weight.copy_(values);
        // 900 is still the largest finite one but two, as it was cut out: what is left says it.
        const Tensor finite = values.masked_fill(values.isfinite().logical_not(), 0);
        const float amax = finite.abs().max().item<float>();
        const QuantizedPtr q = quantized_of(weight);
        const auto& part = q->rowwise().defined() ? q->rowwise() : q->columnwise();
        EXPECT_FLOAT_EQ(part.scale.item<float>(), amax / largest);
        const Tensor got = values_of(weight);
        const Tensor same = got.masked_fill(values.isfinite().logical_not(), 0);
        EXPECT_TRUE(torch::allclose(same.to(at::kFloat), finite.to(at::kFloat), 0.13, 0.01));
        EXPECT_EQ(got[0][9].isnan().item<bool>(), std::isnan(special));
      }
      weight.fill_(INFINITY);
      EXPECT_TRUE(values_of(weight).isfinite().all().item<bool>());
      weight.zero_();
      EXPECT_EQ(values_of(weight).abs().max().item<float>(), 0.0f);
    }
    Linear linear = make_linear(recipe);
    torch::NoGradGuard no_grad;
    for (const float value : {1e-39f, 1e-30f, 1e30f, 3e38f}) {
      linear->weight().fill_(value);
      EXPECT_NEAR(values_of(linear->weight()).max().item<float>() / value, 1.0f, 0.13f) << value;
    }
  }
}

TEST(QuantizedWritesTest, TheMarginIsKeptAndNeverCutsOff) {
  for (const int64_t margin : {-3, 0, 2, 1000}) {
    const auto recipe = std::make_shared<DelayedScaling>(DelayedScalingOptions{.margin = margin});
    Linear linear = make_linear(recipe);
    torch::NoGradGuard no_grad;
    linear->weight().fill_(7.0);
    const QuantizedPtr q = quantized_of(linear->weight());
    const auto& part = q->rowwise().defined() ? q->rowwise() : q->columnwise();
    const double wanted = 7.0 / 448 * std::exp2(std::clamp<double>(margin, 0, 99));
    EXPECT_NEAR(part.scale.item<float>() / wanted, 1, 1e-6) << margin;
  }
}

TEST(QuantizedWritesTest, TheHistoryLearnsWhatAStepComputedWith) {
  const auto recipe =
      std::make_shared<DelayedScaling>(DelayedScalingOptions{.amax_history_len = 4});
  Linear linear = make_linear(recipe);
  const Tensor x = torch::ones({4, 64}, on_device());
  torch::NoGradGuard no_grad;
  linear->weight().fill_(50.0);  // nobody computes with it
  EXPECT_EQ(weight_state(linear).scale.item<float>(), 1.0f);
  for (const float value : {2.0f, 0.5f, 4.0f}) {
    linear->weight().fill_(value);
    EXPECT_EQ(weight_state(linear).amax.item<float>(), 0.0f);
    const Tensor y = run(linear, recipe, x);
    EXPECT_TRUE(torch::allclose(y, torch::full_like(y, 64 * value)));
  }
  const Tensor wanted = torch::tensor({4.0f, 0.5f, 2.0f, 0.0f}, on_device());
  EXPECT_TRUE(torch::allclose(weight_state(linear).history, wanted));
  EXPECT_FLOAT_EQ(weight_state(linear).scale.item<float>(), 448.0f / 4.0f);
}

TEST(QuantizedWritesTest, AScaleOfTheUsersIsKeptByItsQuantizer) {
  auto quantizer = make_delayed_quantizer(Element::E4M3, 1, on_device().device());
  const Tensor x = torch::full({16, 32}, 1000.0, on_device());
  const QuantizedPtr q = quantizer->quantize(x, {true, false});
  EXPECT_EQ(q->dequantize().max().item<float>(), 448.0f);
  write_quantized(q, 2 * x, *quantizer);
  EXPECT_EQ(q->dequantize().max().item<float>(), 448.0f);
  EXPECT_EQ(quantizer->delayed->amax.item<float>(), 2000.0f);
  write_quantized(q, Value(3 * x));
  EXPECT_FLOAT_EQ(q->dequantize().max().item<float>(), 3000.0f);
  EXPECT_EQ(quantizer->delayed->amax.item<float>(), 2000.0f);
}

TEST(QuantizedWritesTest, TheAmaxOfCodes) {
  for (const Element element : {Element::E4M3, Element::E5M2}) {
    Format format{.scaling = Scaling::Delayed, .element = element};
    for (const int64_t columns : {1, 7, 16, 100, 5000}) {
      kernels::QuantizedMatrix q;
      q.data = torch::randint(0, 256, {3, columns}, on_device(at::kByte));
      q.scale = torch::full({1}, 0.37f, on_device(at::kFloat));
      const auto dtype = element == Element::E4M3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
      const Tensor values = q.data.cpu().view(dtype).to(at::kFloat).abs();
      const Tensor counted = values.masked_fill(values.isnan(), 0);
      Tensor amax = torch::zeros({1}, on_device(at::kFloat));
      kernels::update_amax(q, format, columns, amax);
      EXPECT_EQ(amax.item<float>(), counted.max().item<float>() * 0.37f);
      Tensor larger = torch::full({1}, INFINITY, on_device(at::kFloat));
      kernels::update_amax(q, format, columns, larger);
      EXPECT_EQ(larger.item<float>(), INFINITY);
    }
  }
}

// ---- one state of delayed scaling

std::vector<float> floats(const Tensor& t) {
  const Tensor cpu = t.cpu().contiguous();
  return {cpu.const_data_ptr<float>(), cpu.const_data_ptr<float>() + cpu.numel()};
}

TEST(DelayedStateTest, GoesOnWhateverTheRecipeSays) {
  Linear linear(LinearOptions(64, 32));
  const auto input = [&] { return recipe_states(*linear->recipe_state_owner()).back().forward[0]; };
  float value = 1;
  torch::NoGradGuard no_grad;
  const auto step = [&](DelayedScalingOptions options) {
    run(linear, std::make_shared<DelayedScaling>(options),
        torch::full({4, 64}, value, on_device()));
    value *= 2;
  };
  step({.amax_history_len = 3});
  step({.margin = 2, .amax_history_len = 3});
  EXPECT_EQ(floats(input().history), (std::vector<float>{2, 1, 0}));
  EXPECT_EQ(input().scale.item<float>(), 448.0f / 2 / 4);
  step({.amax_history_len = 5, .amax_compute_algo = "most_recent"});
  EXPECT_EQ(floats(input().history), (std::vector<float>{4, 2, 1, 0, 0}));
  for (int i = 0; i < 3; ++i) {
    const auto twice = [](const Tensor& history) { return 2 * history.max(); };
    step({.amax_history_len = 2,
          .amax_function = twice,
          .functions_key = "function " + std::to_string(i)});
    EXPECT_EQ(input().scale.item<float>(), 448.0f / value);
  }
  EXPECT_EQ(floats(input().history), (std::vector<float>{32, 16}));
  EXPECT_LE(linear->basic_ops()[0]->quantizations().size(), 8u);
  step({.fp8_format = Fp8Format::E5M2, .amax_history_len = 2});
  EXPECT_EQ(input().scale.item<float>(), 57344.0f / 64);
}

TEST(DelayedStateTest, AnotherFormatBeginsWithAScaleForIt) {
  Linear linear(LinearOptions(64, 32));
  const BasicOpPtr op = linear->basic_ops()[0];
  torch::NoGradGuard no_grad;
  run(linear, std::make_shared<DelayedScaling>(), torch::full({4, 64}, 2.0, on_device()));
  const auto scale = [&](Fp8Format format) {
    const auto recipe =
        std::make_shared<DelayedScaling>(DelayedScalingOptions{.fp8_format = format});
    return op->quantization(recipe, on_device().device())->forward[0]->delayed->scale.item<float>();
  };
  EXPECT_EQ(scale(Fp8Format::E5M2), 57344.0f / 2);
  EXPECT_EQ(scale(Fp8Format::E4M3), 448.0f / 2);
}

TEST(DelayedStateTest, OutlivesRecipesThatAreForgotten) {
  Linear linear(LinearOptions(64, 32));
  const BasicOpPtr op = linear->basic_ops()[0];
  const auto delayed = std::make_shared<DelayedScaling>();
  const Tensor x = torch::full({4, 64}, 2.0, on_device());
  torch::NoGradGuard no_grad;
  run(linear, delayed, x);
  std::vector<std::weak_ptr<OpQuantization>> known;
  std::vector<std::weak_ptr<QuantizedTensor>> weights;
  for (int i = 1; i < 20; ++i) {
    const auto recipe = std::make_shared<Float8CurrentScaling>(
        Float8CurrentScalingOptions{.amax_epsilon = static_cast<float>(i)});
    run(linear, recipe, x);
    known.push_back(op->quantization());
    const OpQuantizationPtr own = op->quantization();
    const Usage usage = own->forward[1]->usage_for({true, false}, on_device().device());
    const Tensor& weight = linear->weight();
    weights.push_back((*own->weights)[0].get(weight, *own->forward[1], usage, weight));
  }
  const auto alive = [](const auto& pointers) {
    return std::count_if(pointers.begin(), pointers.end(),
                         [](const auto& p) { return !p.expired(); });
  };
  EXPECT_LE(alive(known), 8);
  EXPECT_LE(alive(weights), 2);
  EXPECT_EQ(
      op->quantization(delayed, on_device().device())->forward[0]->delayed->scale.item<float>(),
      224.0f);
}

// ---- when a weight is looked at

TEST(WeightCacheTest, AChangedCounterIsProofEnough) {
  if (!on_device().device().is_cpu()) GTEST_SKIP() << "a GPU's memory is not looked at";
  Linear linear(LinearOptions(64, 32));
  OperationFuser fuser({linear.ptr()});
  const auto recipe = std::make_shared<MXFP8BlockScaling>();
  const Tensor x = torch::randn({4, 64});
  torch::NoGradGuard no_grad;
  const auto quantized = [&] {
    kernels::KernelLog log(at::kCPU);
    const Autocast autocast({.recipe = recipe});
    fuser(x);
    const auto calls = log.take();
    return std::count_if(calls.begin(), calls.end(),
                         [](const kernels::KernelCall& call) { return call.name == "quantize"; });
  };
  EXPECT_EQ(quantized(), 2);  // input and weight
  EXPECT_EQ(quantized(), 1);
  EXPECT_EQ(quantized(), 1);
  for (int step = 0; step < 3; ++step) {
    linear->weight().add_(0.1);
    EXPECT_EQ(quantized(), 2);
  }
  // Nobody asked twice for the last ones: what they were is not known, and it is made once more.
  EXPECT_EQ(quantized(), 2);
  EXPECT_EQ(quantized(), 1);
  linear->weight().data().neg_();
  EXPECT_EQ(quantized(), 2);
  EXPECT_EQ(quantized(), 1);
  linear->weight().add_(0.1);
  EXPECT_EQ(quantized(), 2);
  linear->weight().data().neg_();
  EXPECT_EQ(quantized(), 2);
}

}  // namespace
}  // namespace ligature::testing
