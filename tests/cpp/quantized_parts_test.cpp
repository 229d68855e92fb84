// Parts of quantized tensors that come from outside, models without memory, and what shares memory
// in inference mode: against plain tensors.
#include "ligature/quantized/quantized_parts.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "ligature/base/json_value.h"
#include "ligature/quantized/writes.h"
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

Tensor bytes(at::IntArrayRef sizes) { return torch::zeros(sizes, on_device(at::kByte)); }

TEST(QuantizedPartsTest, WhatKernelsCannotUse) {
  const auto quantizer = std::make_shared<Quantizer>(Format{.scaling = Scaling::MX});
  const QuantizedPtr quantized = quantizer->quantize(torch::randn({32, 32}, on_device()));
  Tensor freed = bytes({8, 8});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  const std::vector<std::pair<Tensor, std::string>> wrong = {
      {wrap_quantized(quantized), "a plain tensor, got a quantized one (mxfp8 e4m3)"},
      {bytes({8, 8}).to_sparse(), "dense, got a sparse tensor"},
      {bytes({1, 8}).expand({8, 8}), "got shape [8, 8] with strides [0, 1]"},
      {bytes({20}).as_strided({8, 8}, {1, 1}), "got shape [8, 8] with strides [1, 1]"},
      {freed, "a tensor with memory, got one whose memory was freed"},
      {torch::ones({4}, on_device())._neg_view(), "got one that stands for others"},
  };
  for (const auto& [part, message] : wrong) {
    EXPECT_NE(why_unusable(part).find(message), std::string::npos) << why_unusable(part);
  }
  for (const Tensor& part :
       {bytes({8, 8}), bytes({8, 8}).t(), bytes({8, 8}).narrow(1, 2, 4), bytes({0, 8}),
        bytes({1, 8}).expand({1, 8}), bytes({8, 8}).to("meta"), torch::zeros({}, on_device())}) {
    EXPECT_EQ(why_unusable(part), "");
  }
}

TEST(QuantizedPartsTest, WhatCannotBeOneTensor) {
  const auto name_of = [](size_t i) { return "part " + std::to_string(i); };
  const Tensor data = bytes({32, 32}), scale = torch::ones({1}, on_device());
  EXPECT_EQ(why_not_together({{data, scale, {}}, {data.clone(), scale, {}}}, name_of), "");
  EXPECT_EQ(why_not_together({{data, scale, {}}, {data.t(), scale, {}}}, name_of),
            "part 3 must have memory of its own, got that of another part");
  const std::string elsewhere = why_not_together({{data, scale.to("meta"), {}}, {}}, name_of);
  EXPECT_EQ(elsewhere.find("part 1 must be on "), 0u) << elsewhere;
}

TEST(QuantizedPartsTest, JsonIsInUtf8) {
  EXPECT_TRUE(parse_json("{\"a\":\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\"}"));
  for (const char* wrong : {"\"\xC3\"", "\"\xFF\"", "\"\x80\"", "\"\xC0\xAF\"", "\"\xED\xA0\x80\"",
                            "\"\xE2\x82\"", "\"\xF5\x80\x80\x80\""}) {
    EXPECT_FALSE(parse_json(wrong));
  }
}

TEST(QuantizedPartsTest, AnArchiveWithThemLeavesTheModelAsItWas) {
  const RecipePtr recipe = model_recipes()[4].make();
  const std::vector<std::tuple<const char*, std::function<Tensor(const Tensor&)>, const char*>>
      all = {{"weight.rowwise_data", [](const Tensor& t) { return t.narrow(0, 0, 1).expand_as(t); },
              "'3.weight.rowwise_data' must be a tensor whose elements have memory of their own"},
             {"weight.columnwise_data",
              [](const Tensor& t) {
                return torch::zeros({t.numel() + 1}, t.options()).as_strided(t.sizes(), {1, 1});
              },
              "'3.weight.columnwise_data' must be a tensor whose elements"},
             {"weight.format",
              [](const Tensor& t) {
                Tensor out = t.clone();
                out[30] = 0xC3;
                return out;
              },
              "'3.weight.format' must be JSON in UTF-8"}};
  for (const auto& [entry, change, message] : all) {
    Sequential model = make_model(recipe), other = make_model(recipe);
    Entries entries = entries_of(saved(other));
    auto& tensors = entries.below.at("3").tensors;
    tensors[entry] = change(tensors[entry].cpu());
    const auto before = content(model);
    const std::string got = message_of([&] { load(model, saved(entries)); });
    EXPECT_NE(got.find(message), std::string::npos) << got;
    EXPECT_TRUE(same(content(model), before));
  }
}

// ---- inference mode

TEST(QuantizedPartsTest, WhatSharesMemoryCountsVersionsAsItDoes) {
  using Function = std::function<Tensor(const Tensor&)>;
  const std::vector<Function> functions = {
      [](const Tensor& t) { return t.detach(); },
      [](const Tensor& t) { return t.alias(); },
      [](const Tensor& t) { return t.view({4, 8, 40}); },
      [](const Tensor& t) { return t.unsqueeze(0); },
      [](const Tensor& t) { return t.clone(); },
      [](const Tensor& t) { return t.to(at::kBFloat16); },
  };
  const auto quantized = [](const NamedRecipe& named) {
    const QuantizerPtr quantizer = weight_quantizer(named.make());
    return wrap_quantized(quantizer->quantize(torch::randn({32, 40}, on_device())));
  };
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    for (const Function& f : functions) {
      const Tensor outside = quantized(named), plain = torch::randn({32, 40}, on_device());
      {
        const c10::InferenceMode inside;
        EXPECT_EQ(f(outside).is_inference(), f(plain).is_inference());
        const Tensor made = quantized(named), made_plain = torch::randn({32, 40}, on_device());
        const c10::InferenceMode again(false);
        EXPECT_EQ(f(made).is_inference(), f(made_plain).is_inference());
        EXPECT_TRUE(quantized_of(f(made))->dequantize().equal(
            quantized_of(made)->dequantize(f(made).scalar_type()).view(f(made).sizes())));
      }
    }
  }
}

// ---- conversions, and models without memory

TEST(QuantizedPartsTest, EveryParameterIsConverted) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    for (const bool with_device : {false, true}) {
      const RecipePtr recipe = named.make();
      Sequential model = make_model(recipe);
      train(model, recipe);
      model->to(at::kHalf);
      EXPECT_NE(quantized_of(weight_of(model, 1)), nullptr);
      const Tensor values = values_of(weight_of(model, 1));
      with_device ? model->to(on_device().device(), at::kDouble) : model->to(at::kDouble);
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(item.value().scalar_type(), at::kDouble) << item.key();
        EXPECT_EQ(quantized_of(item.value()), nullptr) << item.key();
        EXPECT_TRUE(item.value().requires_grad()) << item.key();
      }
      EXPECT_TRUE(weight_of(model, 1).equal(values.to(at::kDouble)));
      EXPECT_EQ(weight_of(model, 1).grad().scalar_type(), at::kDouble);
      const Tensor x = torch::randn({4, 40}, on_device(at::kDouble));
      EXPECT_EQ(model->forward(x).scalar_type(), at::kDouble);
    }
  }
}

TEST(QuantizedPartsTest, AModelWithoutMemoryIsLoaded) {
  for (const NamedRecipe& named : model_recipes()) {
    SCOPED_TRACE(named.name);
    const RecipePtr recipe = named.make();
    const auto without = [&] {
      const QuantizedModelInit init({.recipe = recipe});
      BasicLinearOptions options(40, 64);
      options.device = at::kMeta;
      return BasicLinear(options);
    };
    const QuantizedModelInit init({.recipe = recipe});
    BasicLinear source(40, 64);
    BasicLinear model = without();
    ASSERT_TRUE(model->weight().is_meta());
    ASSERT_NE(quantized_of(model->weight()), nullptr);
    load(model, saved(source));
    EXPECT_TRUE(
        same(quantized_of(model->weight())->tensors(), quantized_of(source->weight())->tensors()));
    const QuantizedModelInit off({.enabled = false});
    BasicLinear plain(40, 64);
    model = without();
    load(model, saved(plain));
    ASSERT_NE(quantized_of(model->weight()), nullptr);
    const Tensor values = values_of(model->weight());
    const double error =
        ((values - plain->weight()).norm() / plain->weight().norm()).item<double>();
    EXPECT_LT(error, std::string(named.name).starts_with("nvfp4") ? 0.2 : 0.06);
    const Autocast autocast({.recipe = recipe});
    OperationFuser fuser({model.ptr()});
    fuser(torch::randn({4, 40}, on_device()))[0].sum().backward();
  }
}

// A model made without memory knows one orientation; a checkpoint of a GPU's has both. Rounding it
// again would change the scale's last bit.
TEST(QuantizedPartsTest, OtherOrientationsAreNotRoundedAgain) {
  const Float8CurrentScaling recipe;
  const QuantizerPtr quantizer = recipe.make_quantizer({"linear", "weight", ""}, at::kCPU);
  for (int seed = 0; seed < 20; ++seed) {
    torch::manual_seed(seed);
    const QuantizedPtr source = quantizer->quantize(torch::randn({40, 24}), {true, false});
    source->make_usage(true, true);
    for (const auto& [rows, columns] : {std::pair(true, false), {false, true}, {true, true}}) {
      const QuantizedPtr wanted = source->only(rows, columns);
      const QuantizedPtr model = wanted->map([](const Tensor& t) { return at::zeros_like(t); });
      write_quantized(model, Value(source));
      EXPECT_TRUE(same(model->tensors(), wanted->tensors()));
      write_quantized(model, Value(source->only(!rows, rows)));
      EXPECT_TRUE(same(model->tensors(), wanted->tensors()));
    }
  }
}

}  // namespace
}  // namespace ligature::testing
