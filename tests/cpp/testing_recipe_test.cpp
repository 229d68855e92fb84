// Fusions checked in low precision: within what the recipe's formats round, and no further.
#include <gtest/gtest.h>

#include <algorithm>

#include "ligature/fused/backward_linear_scale.h"
#include "ligature/fuser/registry.h"
#include "quantized_model_support.h"
#include "testing_support.h"

using namespace ligature;
using ligature::testing::CheckOptions;
using ligature::testing::Example;
using ligature::testing::NamedRecipe;
using ligature::testing::Report;

namespace {

std::vector<NamedRecipe> recipes() {
  auto all = ligature::testing::model_recipes();
  all.push_back({"nvfp4 stochastic", [] { return std::make_shared<NVFP4BlockScaling>(); }});
  return all;
}

constexpr size_t kFirstFp4 = 5;  ///< what rounds by a fourth hides more

CheckOptions options_for(const RecipePtr& recipe, size_t max_patterns) {
  CheckOptions options;
  options.device = on_device().device();
  options.recipe = recipe;
  // A GPU is shared by all test processes.
  options.max_patterns = options.device->is_cuda() ? 1 : max_patterns;
  return options;
}

class TestingRecipe : public OneThread, public ::testing::WithParamInterface<size_t> {
 protected:
  // Random rounding is drawn from here, and limits hold for most draws.
  void SetUp() override {
    OneThread::SetUp();
    torch::manual_seed(1);
  }
  RecipePtr recipe() const { return recipes()[GetParam()].make(); }
};

/// Products with an epilogue for a gradient in high precision.
bool fires_under_a_recipe(const std::string& name) {
  return !name.starts_with("BackwardLinearActivation") && name != "BackwardLinearBias";
}

TEST_P(TestingRecipe, EveryRegisteredFusion) {
  using Pass = ligature::Pass;
  for (const Pass pass : {Pass::Forward, Pass::Backward, Pass::Joint}) {
    for (const auto& fusion : registered_fusions(pass)) {
      if (std::get<FusionRule>(*fusion).needs_ranks) continue;  // distributed_test has them
      const auto examples = ligature::testing::find_examples(std::get<FusionRule>(*fusion));
      // TestingWalk has every activation.
      for (size_t i = 0; i < examples.size(); i += std::max<size_t>(examples.size() / 3, 1)) {
        const Report report = check_fusion(*fusion, pass, examples[i].make, examples[i].shapes,
                                           options_for(recipe(), 3));
        if (fires_under_a_recipe(fusion_name(*fusion))) {
          EXPECT_TRUE(report) << examples[i].text << "\n" << report.text();
        } else {
          expect_failures(report, "it does not fire");
        }
      }
    }
  }
}

OpList linear_scale(at::ScalarType dtype, at::Device device) {
  BasicLinearOptions options(40, 24);
  options.dtype = dtype;
  options.device = device;
  return {BasicLinear(options).ptr(), ConstantScale(-1.5).ptr()};
}

const std::vector<ligature::testing::ExampleShapes> kShapes{{{33, 40}}, {{2, 3, 40}}};

TEST_P(TestingRecipe, AScaleInTheProducts) {
  const Report report = check_fusion(backward_linear_scale_rule(), ligature::Pass::Backward,
                                     linear_scale, kShapes, options_for(recipe(), 8));
  EXPECT_TRUE(report) << report.text();
  EXPECT_GT(report.runs, 10);
}

/// Its gradients are off by a factor.
class Off : public BackwardLinearScale {
 public:
  using BackwardLinearScale::BackwardLinearScale;
  double of_input = 1, of_weight = 1;

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& dy, GradList extra) override {
    FuserBackwardResult out = BackwardLinearScale::fuser_backward(ctxs, dy, extra);
    if (out.grad_input.defined()) out.grad_input = out.grad_input.tensor() * of_input;
    for (Tensor& dw : out.grad_params[0]) {
      if (dw.defined()) dw = dw * of_weight;
    }
    return out;
  }
};

TEST_P(TestingRecipe, FindsWhatIsWrong) {
  const auto check = [&](double of_input, double of_weight) {
    FusionRule rule = backward_linear_scale_rule();
    rule.make = [=](const Match& match) -> OpPtr {
      auto made = std::make_shared<Off>(match.ops);
      made->of_input = of_input;
      made->of_weight = of_weight;
      return made;
    };
    return check_fusion(rule, ligature::Pass::Backward, linear_scale, kShapes,
                        options_for(recipe(), 8));
  };
  EXPECT_TRUE(check(1, 1));
  // The scale is forgotten, or applied twice.
  expect_failures(check(1 / -1.5, 1), "gradient of input is off by");
  expect_failures(check(1, -1.5), "gradient of BasicLinear.weight is off by");
  if (GetParam() < kFirstFp4) expect_failures(check(1.3, 1), "gradient of input is off by");
}

INSTANTIATE_TEST_SUITE_P(Recipes, TestingRecipe, ::testing::Range(size_t{0}, recipes().size()));

TEST(TestingRecipeOptions, WhatIsRefused) {
  CheckOptions options = options_for(std::make_shared<MXFP8BlockScaling>(), 1);
  EXPECT_MESSAGE(
      ligature::testing::check_operation(
          linear_scale, [](const Tensor& x, const auto&, const auto&) -> Tensors { return {x}; },
          kShapes, options),
      "an operation is checked without a recipe");
  options.dtypes = {at::kFloat, at::kDouble};
  EXPECT_MESSAGE(check_fusion(backward_linear_scale_rule(), ligature::Pass::Backward, linear_scale,
                              kShapes, options),
                 "dtypes must be float32, bfloat16 or float16 under a recipe, got Double");
}

TEST(TestingRecipeOptions, LeavesTheOperationsStateAlone) {
  BasicLinearOptions made(8, 8);
  made.dtype = at::kFloat;
  made.device = on_device().device();
  BasicLinear linear(made);
  const auto make = [&](at::ScalarType, at::Device) -> OpList {
    return {linear.ptr(), ConstantScale(2.0).ptr()};
  };
  CheckOptions options = options_for(std::make_shared<DelayedScaling>(), 2);
  options.dtypes = {at::kFloat};
  const Report report = check_fusion(backward_linear_scale_rule(), ligature::Pass::Backward, make,
                                     {{{5, 8}}, {{3, 8}}}, options);
  EXPECT_TRUE(report) << report.text();
  EXPECT_TRUE(linear->quantizations().empty());
}

}  // namespace
