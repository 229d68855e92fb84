// Recipes as data: their fields by name, the keys made of them, and what is refused.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>

#include "ligature/ligature.h"

namespace ligature {
namespace {

PlainState state(std::initializer_list<std::pair<const char*, PlainValue>> fields) {
  PlainState out;
  for (const auto& [name, value] : fields) out.set(name, value);
  return out;
}

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_error(const std::string& recipe, const PlainState& fields, const std::string& part) {
  const std::string got = error_of([&] { make_recipe(recipe, fields); });
  EXPECT_NE(got.find(part), std::string::npos) << got;
}

Format format_of(const Recipe& recipe, const char* tensor) {
  return recipe.make_quantizer({"linear", tensor, ""}, at::kCPU)->format_tag();
}

TEST(RecipeByName, DefaultsAreThoseOfTheClass) {
  EXPECT_EQ(make_recipe("DelayedScaling")->key(), DelayedScaling().key());
  EXPECT_EQ(make_recipe("Float8CurrentScaling")->key(), Float8CurrentScaling().key());
  EXPECT_EQ(make_recipe("Float8BlockScaling")->key(), Float8BlockScaling().key());
  EXPECT_EQ(make_recipe("MXFP8BlockScaling")->key(), MXFP8BlockScaling().key());
  EXPECT_EQ(make_recipe("NVFP4BlockScaling")->key(), NVFP4BlockScaling().key());
  // Other tests register recipes of their own.
  const std::vector<std::string> names = recipe_names();
  for (const char* name : {"CustomRecipe", "DelayedScaling", "Float8BlockScaling",
                           "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"}) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  }
}

TEST(RecipeByName, EveryFieldCanBeSetAndIsPartOfTheKey) {
  const auto another = [](const std::string& name, const PlainValue& value) -> PlainValue {
    if (const auto* flag = std::get_if<bool>(&value)) return !*flag;
    if (const auto* number = std::get_if<int64_t>(&value)) return *number == 2 ? 1 : int64_t{2};
    if (std::holds_alternative<double>(value)) return 0.1;
    if (name == "fp8_format") return "E5M2";
    if (name == "backward_override") return "dequantized";
    if (name == "amax_compute_algo") return "most_recent";
    if (name == "nvfp4_4over6") return "weights";
    if (name == "nvfp4_4over6_e4m3_use_256") return "none";
    if (name == "nvfp4_4over6_err_mode") return "MSE";
    if (name.ends_with(".amax_epsilon")) return 0.5;
    return false;  // a role's, which are not set
  };
  for (const std::string& name : recipe_names()) {
    if (name == "CustomRecipe") continue;
    const RecipePtr plain = make_recipe(name);
    for (const auto& [field, value] : recipe_fields(name)) {
      SCOPED_TRACE(name + " " + field);
      PlainState fields;
      fields.set(field, another(field, value));
      // Only one of the three may have square blocks, the weight.
      if (field == "x_block_scaling_dim" || field == "grad_block_scaling_dim") {
        fields.set("w_block_scaling_dim", int64_t{1});
      }
      const RecipePtr made = make_recipe(name, fields);
      EXPECT_NE(made->key(), plain->key());
      EXPECT_NE(made->plan_key(), plain->plan_key());
      EXPECT_EQ(made->name(), name);
      EXPECT_EQ(make_recipe(name, made->options_state())->key(), made->key());
    }
  }
}

TEST(RecipeByName, KeysTellEverythingInWords) {
  EXPECT_EQ(MXFP8BlockScaling().key(),
            "MXFP8BlockScaling(fp8_format='E4M3', enable_2d_quantization=False, "
            "backward_override=None)");
  const auto epsilon = [](float value) {
    return Float8CurrentScaling(Float8CurrentScalingOptions{.amax_epsilon = value}).key();
  };
  EXPECT_NE(epsilon(1.0f), epsilon(std::nextafter(1.0f, 2.0f)));
  const CustomRecipe::Factory none = [](const QuantizerRole&) { return nullptr; };
  EXPECT_EQ(CustomRecipe(none, "mine").key(),
            "CustomRecipe(factory_key='mine', backward_override=None)");
  EXPECT_NE(CustomRecipe(none).key(), CustomRecipe(none).key());
}

TEST(RecipeByName, FunctionsAreNoPartOfPlans) {
  const auto latest = [](const at::Tensor& history) { return history.narrow(0, 0, 1); };
  const DelayedScaling one({.amax_function = latest, .functions_key = "one"});
  const DelayedScaling other({.amax_function = latest, .functions_key = "other"});
  EXPECT_NE(one.key(), other.key());
  EXPECT_EQ(one.plan_key(), other.plan_key());
  EXPECT_NE(one.plan_key(), DelayedScaling().plan_key());
}

TEST(RecipeByName, WhatIsWrongIsNamed) {
  EXPECT_NE(error_of([] { make_recipe("Float9"); }).find("no recipe named 'Float9'"),
            std::string::npos);
  expect_error("MXFP8BlockScaling", state({{"margin", int64_t{1}}}),
               "[MXFP8BlockScaling] there is no field 'margin'");
  expect_error("MXFP8BlockScaling", state({{"enable_2d_quantization", int64_t{1}}}),
               "[MXFP8BlockScaling] enable_2d_quantization cannot be 1");
  expect_error("MXFP8BlockScaling", state({{"fp8_format", "E9M9"}}),
               "[MXFP8BlockScaling] fp8_format must be 'E4M3', 'E5M2' or 'HYBRID', got 'E9M9'");
  expect_error("NVFP4BlockScaling", state({{"backward_override", "bf16"}}),
               "[NVFP4BlockScaling] backward_override must be None, 'high_precision' or "
               "'dequantized', got 'bf16'");
  expect_error("Float8CurrentScaling", state({{"amax_epsilon", -1.0}}), "must be zero or more");
  expect_error("CustomRecipe", {}, "qfactory must be a function, got none");
}

TEST(RecipeRoles, SettingsOfOneRole) {
  const Float8CurrentScaling current(
      {.use_power_2_scales = true,
       .fp8_quant_fwd_weight = {.power_2_scale = false, .amax_epsilon = 0.5f}});
  EXPECT_TRUE(format_of(current, "input").power_of_2_scales);
  EXPECT_TRUE(format_of(current, "grad_output").power_of_2_scales);
  EXPECT_FALSE(format_of(current, "weight").power_of_2_scales);
  EXPECT_EQ(format_of(current, "weight").amax_epsilon, 0.5f);
  EXPECT_EQ(format_of(current, "input").amax_epsilon, 0.0f);

  const auto fp4 = make_recipe("NVFP4BlockScaling",
                               state({{"fp4_quant_bwd_grad.stochastic_rounding", false},
                                      {"fp4_quant_fwd_inp.random_hadamard_transform", false}}));
  EXPECT_FALSE(format_of(*fp4, "grad_output").stochastic_rounding);
  EXPECT_TRUE(format_of(*fp4, "grad_output").hadamard);
  EXPECT_FALSE(format_of(*fp4, "input").hadamard);
  EXPECT_TRUE(format_of(*fp4, "weight").block_2d);
  // A format that there is not is refused at once.
  expect_error("NVFP4BlockScaling",
               state({{"fp4_quant_fwd_weight.random_hadamard_transform", true}}), "square blocks");
}

}  // namespace
}  // namespace ligature
