// Models built with weights in low precision, and such models in archives: bytes against those of
// the recipe's quantizer, and what an archive must not do to a model.
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "quantized_model_support.h"

namespace ligature::testing {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// ---- QuantizedModelInit

TEST(QuantizedModelInitTest, WeightsAreInTheRecipesFormat) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const RecipePtr recipe = named.make();
    torch::manual_seed(3);
    Sequential plain = make_model(nullptr);
    torch::manual_seed(3);
    Sequential model = make_model(recipe);
    for (const auto& item : model->named_parameters()) {
      const bool wanted = item.key() == "1.weight" || item.key() == "3.weight";
      EXPECT_EQ(quantized_of(item.value()) != nullptr, wanted) << item.key();
      EXPECT_TRUE(item.value().requires_grad());
      EXPECT_TRUE(item.value().is_leaf());
    }
    const Tensor w = weight_of(model, 1);
    EXPECT_EQ(w.sizes(), weight_of(plain, 1).sizes());
    const QuantizerPtr quantizer = weight_quantizer(recipe);
    if (quantizer->delayed) {
      const Tensor amax = weight_of(plain, 1).detach().abs().max();
      quantizer->delayed->scale = (448.0f / amax).reshape({1});
    }
    const QuantizedPtr expected =
        quantizer->quantize(weight_of(plain, 1).detach(), weight_usage(quantizer));
    EXPECT_TRUE(same(quantized_of(w)->tensors(), expected->tensors()));
    EXPECT_TRUE(model->at<LinearImpl>(1).bias().equal(plain->at<LinearImpl>(1).bias()));
  }
}

TEST(QuantizedModelInitTest, ScopesNestAndBelongToAThread) {
  const auto is_quantized = [] { return quantized_of(Linear(8, 8)->weight()) != nullptr; };
  EXPECT_FALSE(is_quantized());
  {
    const QuantizedModelInit outer;
    EXPECT_EQ(quantized_of(Linear(8, 8)->weight())->format_tag().scaling, Scaling::Delayed);
    {
      const QuantizedModelInit off({.enabled = false});
      EXPECT_FALSE(is_quantized());
    }
    const auto fails = [] {
      const QuantizedModelInit inner({.enabled = false});
      LIGATURE_CHECK(false, "stop");
    };
    EXPECT_THROW(fails(), c10::ValueError);
    EXPECT_TRUE(is_quantized());
    bool elsewhere = true;
    std::thread([&] { elsewhere = is_quantized(); }).join();
    EXPECT_FALSE(elsewhere);
  }
  EXPECT_FALSE(is_quantized());
  EXPECT_THROW(exit_quantized_model_init(), c10::Error);
}

TEST(QuantizedModelInitTest, KeepsHighPrecisionValuesOnDemand) {
  const auto recipe = std::make_shared<MXFP8BlockScaling>();
  torch::manual_seed(5);
  Linear plain(32, 32);
  torch::manual_seed(5);
  Linear kept = [&] {
    const QuantizedModelInit init({.recipe = recipe, .preserve_high_precision_init_val = true});
    return Linear(32, 32);
  }();
  EXPECT_TRUE(high_precision_init_val(kept->weight()).equal(plain->weight().cpu()));
  clear_high_precision_init_val(kept->weight());
  EXPECT_FALSE(high_precision_init_val(kept->weight()).defined());
  EXPECT_FALSE(high_precision_init_val(weight_of(make_model(recipe), 1)).defined());
  EXPECT_FALSE(high_precision_init_val(plain->weight()).defined());
}

TEST(QuantizedModelInitTest, WhatCannotBeQuantized) {
  const auto none = [](const QuantizerRole&) { return nullptr; };
  const QuantizedModelInit leaves({.recipe = std::make_shared<CustomRecipe>(none)});
  EXPECT_EQ(quantized_of(Linear(8, 8)->weight()), nullptr);
  const QuantizedModelInit init;
  LinearOptions wide(8, 8);
  wide.dtype = at::kDouble;
  EXPECT_THROW(Linear{wide}, c10::TypeError);
  EXPECT_EQ(message_of([&] { Linear{wide}; }).find("[Linear] weight: low precision takes"), 0u);
}

TEST(QuantizedModelInitTest, ACloneHasWeightsAndStateOfItsOwn) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const RecipePtr recipe = named.make();
    Sequential model = make_model(recipe);
    train(model, recipe);
    const auto twin = std::dynamic_pointer_cast<SequentialImpl>(model->clone());
    const auto before = content(model);
    EXPECT_TRUE(same(content(Sequential(twin)), before));
    const auto steps = train(Sequential(twin), recipe);
    EXPECT_TRUE(same(content(model), before));
    EXPECT_TRUE(same(train(model, recipe), steps));
  }
}

// ---- archives

TEST(QuantizedArchiveTest, GoesOnAsIfNothingHadHappened) {
  for (const NamedRecipe& named : model_recipes()) {
    for (const bool quantized : {false, true}) {
      SCOPED_TRACE(named.name);
      const RecipePtr recipe = named.make();
      Sequential model = make_model(quantized ? recipe : nullptr);
      train(model, recipe);
      Sequential other = make_model(quantized ? recipe : nullptr);
      ASSERT_FALSE(same(content(model), content(other)));
      load(other, saved(model));
      EXPECT_TRUE(same(content(model), content(other)));
      EXPECT_TRUE(same(train(model, recipe), train(other, recipe)));
      EXPECT_TRUE(same(content(model), content(other)));
    }
  }
}

TEST(QuantizedArchiveTest, FromAnyFormatIntoAny) {
  std::vector<NamedRecipe> all = model_recipes();
  all.push_back({"none", [] { return RecipePtr(); }});
  for (const NamedRecipe& source : all) {
    for (const NamedRecipe& target : all) {
      SCOPED_TRACE(std::string(source.name) + " to " + target.name);
      Sequential model = make_model(source.make());
      {
        torch::NoGradGuard no_grad;
        weight_of(model, 1).copy_(torch::randn({64, 40}, on_device()) * 3);
      }
      const RecipePtr wanted = target.make();
      Sequential other = make_model(wanted);
      load(other, saved(model));
      const Tensor values = values_of(weight_of(model, 1));
      const Tensor w = weight_of(other, 1);
      EXPECT_EQ(quantized_of(w) != nullptr, wanted != nullptr);
      if (wanted == nullptr) {
        EXPECT_TRUE(w.equal(values));
        continue;
      }
      if (source.name == target.name) {
        EXPECT_TRUE(same(content(model), content(other)));
        continue;
      }
      const QuantizerPtr quantizer = weight_quantizer(wanted);
      if (quantizer->delayed) {  // chosen for the values that came, and from those before
        quantizer->delayed->scale = (448.0f / values.abs().max()).reshape({1});
      }
      const QuantizedPtr expected = quantizer->quantize(values, weight_usage(quantizer));
      EXPECT_TRUE(same(quantized_of(w)->tensors(), expected->tensors()));
    }
  }
}

TEST(QuantizedArchiveTest, FromAndToTorchAndBFloat16) {
  const auto recipe = std::make_shared<MXFP8BlockScaling>();
  torch::nn::Linear source(40, 64), back(40, 64);
  source->to(on_device().device());
  back->to(on_device().device());
  Linear linear = [&] {
    const QuantizedModelInit init({.recipe = recipe});
    return Linear(40, 64);
  }();
  load(linear, saved(source));
  const QuantizedPtr expected = weight_quantizer(recipe)->quantize(source->weight.detach());
  EXPECT_TRUE(same(quantized_of(linear->weight())->tensors(), expected->tensors()));
  EXPECT_TRUE(linear->bias().equal(source->bias));

  Sequential low = make_model(recipe);
  Sequential high = make_model(nullptr, at::kBFloat16);
  load(high, saved(low));
  EXPECT_EQ(weight_of(high, 1).scalar_type(), at::kBFloat16);
  EXPECT_TRUE(weight_of(high, 1).to(at::kFloat).equal(values_of(weight_of(low, 1))));
  Linear plain(40, 64);
  load(plain, saved(linear));
  load(back, saved(plain));
  EXPECT_TRUE(back->weight.equal(values_of(linear->weight())));
}

TEST(QuantizedArchiveTest, HoldsPlainTensorsUnderThePythonNames) {
  const RecipePtr recipe = model_recipes()[0].make();
  Sequential model = make_model(recipe);
  train(model, recipe);
  const Entries entries = entries_of(saved(model)).below.at("3");
  std::vector<std::string> names;
  for (const auto& [name, tensor] : entries.tensors) {
    EXPECT_EQ(quantized_of(tensor), nullptr);
    names.push_back(name);
  }
  std::vector<std::string> wanted = {"_recipe_state.backward.amax",
                                     "_recipe_state.backward.amax_history",
                                     "_recipe_state.backward.scale",
                                     "_recipe_state.forward.amax",
                                     "_recipe_state.forward.amax_history",
                                     "_recipe_state.forward.scale",
                                     "_recipe_state.recipe",
                                     "_recipe_state.version",
                                     "weight.format",
                                     "weight.rowwise_data",
                                     "weight.rowwise_scale"};
  if (weight_usage(weight_quantizer(recipe)).columnwise) {
    wanted.insert(wanted.end() - 3, {"weight.columnwise_data", "weight.columnwise_scale"});
  }
  EXPECT_EQ(names, wanted);
  EXPECT_EQ(entries.tensors.at("_recipe_state.forward.amax_history").sizes(),
            at::IntArrayRef({4, 2}));
}

TEST(QuantizedArchiveTest, FunctionsAreKnownByTheirKeys) {
  const auto make = [](const char* key) {
    DelayedScalingOptions options{.amax_history_len = 4};
    options.amax_function = [](const Tensor& history) { return history.max(); };
    options.functions_key = key;
    return std::make_shared<DelayedScaling>(options);
  };
  for (const char* key : {"largest", "amax:largest"}) {
    Sequential model = make_model(nullptr), other = make_model(nullptr);
    train(model, make(key));
    load(other, saved(model));
    EXPECT_TRUE(same(content(model), content(other)));
    EXPECT_TRUE(same(train(model, make(key)), train(other, make(key))));
  }
  Sequential unnamed = make_model(nullptr);
  train(unnamed, make(""));
  EXPECT_EQ(entries_of(saved(unnamed)).below.at("3").tensors.size(), 1u);
}

Tensor text(const std::string& json) {
  Tensor out = torch::empty({static_cast<int64_t>(json.size())}, at::kByte);
  std::copy(json.begin(), json.end(), out.data_ptr<uint8_t>());
  return out;
}
std::string text_of(const Tensor& bytes) {
  return {reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()),
          static_cast<size_t>(bytes.numel())};
}
Tensor with(const Tensor& t, double value) {
  Tensor out = t.clone();
  out.view(-1)[0] = value;
  return out;
}

struct Wrong {
  const char* recipe;
  const char* entry;
  std::function<Tensor(const Tensor&)> change;  // empty: it is not there
  const char* message;
};

std::function<Tensor(const Tensor&)> replaced(const std::string& from, const std::string& to) {
  return [=](const Tensor& bytes) {
    std::string json = text_of(bytes);
    const size_t at = json.find(from);
    TORCH_CHECK(at != std::string::npos, json);
    return text(json.replace(at, from.size(), to));
  };
}
std::function<Tensor(const Tensor&)> set_to(double value) {
  return [=](const Tensor& t) { return with(t, value); };
}

TEST(QuantizedArchiveTest, WhatIsWrongLeavesTheModelAsItWas) {
  const std::vector<Wrong> all = {
      {"delayed", "_recipe_state.version", [](const Tensor& t) { return t + 1; },
       "must be of version 1, which this version of Ligature reads, got 2"},
      {"delayed", "_recipe_state.version", nullptr, "is missing"},
      {"delayed", "_recipe_state.recipe", replaced("{", ""), "must be JSON in UTF-8"},
      {"delayed", "_recipe_state.recipe", replaced("DelayedScaling", "Other"),
       "wanted DelayedScaling with"},
      {"delayed", "_recipe_state.recipe", replaced("HYBRID", "E9M9"),
       "must be the name of a Format, got 'E9M9'"},
      {"delayed", "_recipe_state.recipe", replaced("len\":4", "len\":1000000000000"),
       "must be float32[1000000000000, 2]"},
      {"delayed", "_recipe_state.recipe", replaced("len\":4", "len\":-1"),
       "positive amax_history_len, got -1"},
      {"delayed", "_recipe_state.forward.scale", set_to(NAN), "must be numbers, got NaN"},
      {"delayed", "_recipe_state.forward.scale", set_to(0), "must be positive and finite, got 0"},
      {"delayed", "_recipe_state.forward.scale", [](const Tensor& t) { return t.narrow(0, 0, 1); },
       "must be float32[2], got float32[1]"},
      {"delayed", "_recipe_state.forward.amax", set_to(-2), "must be zero or more, got -2"},
      {"delayed", "_recipe_state.backward.amax_history", nullptr, "is missing"},
      {"delayed", "weight.rowwise_scale", set_to(NAN), "must be numbers, got NaN"},
      {"mxfp8", "weight.format", nullptr, "is missing"},
      {"mxfp8", "weight.format", replaced("version\":1", "version\":2"), "must be of version 1"},
      {"mxfp8", "weight.format", replaced("float32", "float64"),
       "of dtype float32, bfloat16, float16, got float64"},
      {"mxfp8", "weight.format", replaced("[40,64]", "[41,64]"), "says shape [41, 64], the shape"},
      {"mxfp8", "weight.format", replaced("\"mx\"", "\"odd\""), "of a known scaling, got odd"},
      {"mxfp8", "weight.format", replaced("hadamard", "bogus"), "no field 'bogus'"},
      {"mxfp8", "weight.format", [](const Tensor& t) { return t.narrow(0, 0, 10); },
       "must be JSON in UTF-8"},
      {"mxfp8", "weight.rowwise_data", nullptr, "is missing"},
      {"mxfp8", "weight.rowwise_data", [](const Tensor& t) { return t.narrow(0, 0, 39); },
       "must be uint8[40, 64], got uint8[39, 64]"},
      {"mxfp8", "weight.columnwise_scale", nullptr, "is missing"},
      {"mxfp8", "weight.rowwise_scale", set_to(255), "must be numbers, got NaN"},
      {"block", "weight.rowwise_scale", set_to(INFINITY), "must be positive and finite"},
      {"nvfp4", "weight.rowwise_scale", set_to(0x80), "must be zero or more, got a negative"},
      {"nvfp4", "weight.rowwise_amax", set_to(INFINITY), "must be finite"},
  };
  for (const Wrong& wrong : all) {
    SCOPED_TRACE(std::string(wrong.recipe) + " " + wrong.entry + " " + wrong.message);
    const auto named = std::find_if(model_recipes().begin(), model_recipes().end(), [&](auto& one) {
      return std::string(one.name) == wrong.recipe;
    });
    const RecipePtr recipe = named->make();
    Sequential model = make_model(recipe);
    train(model, recipe);
    Entries entries = entries_of(saved(model));
    auto& tensors = entries.below.at("3").tensors;
    ASSERT_TRUE(tensors.contains(wrong.entry));
    if (wrong.change) {
      tensors[wrong.entry] = wrong.change(tensors[wrong.entry]);
    } else {
      tensors.erase(wrong.entry);
    }
    for (const bool quantized : {true, false}) {
      Sequential other = make_model(quantized ? recipe : nullptr);
      const auto before = content(other);
      const std::string message = message_of([&] { load(other, saved(entries)); });
      EXPECT_NE(message.find(wrong.message), std::string::npos) << message;
      EXPECT_NE(message.find("'3."), std::string::npos) << message;
      EXPECT_TRUE(same(content(other), before));
    }
  }
}

TEST(QuantizedArchiveTest, PlainEntriesThatAreWrong) {
  const auto recipe = std::make_shared<MXFP8BlockScaling>();
  Sequential model = make_model(recipe);
  const auto before = content(model);
  const std::string plain = saved(make_model(nullptr));
  const auto refuses = [&](const std::function<void(Entries&)>& change, const std::string& wanted) {
    Entries entries = entries_of(plain);
    change(entries);
    const std::string message = message_of([&] { load(model, saved(entries)); });
    EXPECT_NE(message.find(wanted), std::string::npos) << message;
    EXPECT_TRUE(same(content(model), before));
  };
  refuses([](Entries& e) { e.below.at("3").tensors.erase("weight"); }, "'3.weight' is missing");
  refuses([](Entries& e) { e.below.erase("3"); }, "'3' is missing");
  refuses([](Entries& e) { e.below.at("3").tensors["weight"] = torch::ones({40, 65}); },
          "size mismatch for 3.weight");
  refuses([](Entries& e) { e.below.at("3").tensors["weight.rowwise_amax"] = torch::ones({1}); },
          "'3.weight' is there twice");
  EXPECT_ANY_THROW(load(model, plain.substr(0, plain.size() / 2)));
  EXPECT_TRUE(same(content(model), before));
}

}  // namespace
}  // namespace ligature::testing
