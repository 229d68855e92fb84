// Wrong uses of the C++ interface: each is an exception, and the program goes on.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "device.h"
#include "ligature/kernels/bias_activation.h"
#include "ligature/ligature.h"

namespace ligature {
namespace {

Tensor random(at::IntArrayRef sizes) { return torch::randn(sizes, on_device()); }

template <class F>
void expect_error(const F& f, const std::string& word) {
  try {
    f();
    ADD_FAILURE() << "no error; wanted one with '" << word << "'";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(word), std::string::npos)
        << error.what_without_backtrace();
  }
}

// ---- nothing where an operation is wanted

struct Pair : FusedOperation {
  explicit Pair(const OpList& ops) : FusedOperation("Pair", ops) {}
  template <class Op>
  Op& part(size_t i) {
    return basic_op<Op>(i);
  }
};

TEST(Misuse, NoOperationInAFuser) {
  expect_error([] { OperationFuser fuser({nullptr}); }, "operation 0");
  expect_error([] { OperationFuser fuser({GELU().ptr(), nullptr}); }, "operation 1");
  expect_error([] { Pair fused({GELU().ptr(), nullptr}); }, "operation 1");
}

TEST(Misuse, NoModuleInASequential) {
  const auto make = [](auto module) { return std::make_shared<SequentialImpl>(module); };
  expect_error([&] { make(std::shared_ptr<GELUImpl>()); }, "null");
  expect_error([&] { make(std::shared_ptr<torch::nn::LinearImpl>()); }, "null");
  EXPECT_THROW(make(GELU(nullptr)), c10::Error);
  Sequential model(GELU(), Linear(8, 8));
  expect_error([&] { model->push_back(std::shared_ptr<GELUImpl>()); }, "null");
  expect_error([&] { model->replace(0, std::shared_ptr<GELUImpl>()); }, "null");
  EXPECT_THROW(model->replace(7, GELU()), c10::Error);
  ASSERT_EQ(model->size(), 2U);  // as it was
  EXPECT_NO_THROW(model->forward(random({4, 8})));
}

TEST(Misuse, APartOfAnotherClass) {
  Sequential model(GELU(), Linear(8, 8));
  expect_error([&] { model->at<LayerNormImpl>(0); }, "GELU");
  EXPECT_NO_THROW(model->at<GELUImpl>(0));
  Pair fused({GELU().ptr(), Identity().ptr()});
  expect_error([&] { fused.part<LayerNormImpl>(0); }, "GELU");
  expect_error([&] { fused.part<GELUImpl>(2); }, "2");
  EXPECT_NO_THROW(fused.part<GELUImpl>(0));
}

TEST(Misuse, FunctionsThatAreNone) {
  const auto run = [](Fusion fusion) {
    const ScopedFusion registered(register_forward_fusion(std::move(fusion), true));
    OperationFuser fuser({GELU().ptr(), Identity().ptr()});
    fuser(random({4, 8}));
  };
  expect_error([&] { run(FusionFunction{"empty", nullptr}); }, "empty");
  const Pattern pattern{of<GELUImpl>("GELU")};
  expect_error([&] { run(FusionRule{"no factory", pattern, nullptr, nullptr}); }, "no factory");
  expect_error(
      [&] { run(FusionRule{"no pattern", {}, nullptr, [](const Match&) { return OpPtr(); }}); },
      "no pattern");
  expect_error(
      [&] {
        run(FusionRule{
            "no test", {PatternElement{"any", nullptr, false}}, nullptr, [](const Match& m) {
              return m.ops[0];
            }});
      },
      "no test");
  expect_error(
      [&] {
        run(FusionRule{"gives nothing", pattern, nullptr, [](const Match&) { return OpPtr(); }});
      },
      "gives nothing");
  expect_error(
      [&] {
        run(FusionFunction{"gives null", [](const OpList& ops, const PlanOptions&) {
                             return OpList(ops.size());
                           }});
      },
      "gives null");
  expect_error(
      [&] {
        run(FusionRule{
            "too greedy",
            {PatternElement{"more", [](at::ArrayRef<OpPtr>) -> size_t { return 99; }, false}},
            nullptr,
            [](const Match& m) { return m.ops[0]; }});
      },
      "too greedy");
  expect_error([&] { register_fusion(static_cast<Pass>(17), FusionFunction{"f", nullptr}); },
               "pass");
  expect_error([] { CustomRecipe recipe(nullptr); }, "function");
}

// ---- enumerators that are none

template <class E>
E unknown() {
  return static_cast<E>(77);
}

TEST(Misuse, FormatsThatAreNone) {
  std::vector<Format> formats(4);
  formats[0].scaling = unknown<Scaling>();
  formats[1].element = unknown<Element>();
  formats[2].scaling = Scaling::NV;
  formats[2].element = Element::E2M1;
  formats[2].four_over_six = unknown<FourOverSix>();
  formats[3].amax_epsilon = std::nanf("");
  const std::vector<std::string> fields = {"scaling", "element", "four_over_six", "amax_epsilon"};
  const auto good = std::make_shared<Quantizer>(Format{});
  const Tensor x = random({32, 32});
  const QuantizedPtr q = good->quantize(x);
  for (size_t i = 0; i < formats.size(); ++i) {
    expect_error([&] { Quantizer quantizer(formats[i]); }, fields[i]);
    if (fields[i] == "amax_epsilon") continue;
    kernels::QuantizeArgs args;
    args.format = formats[i];
    args.rowwise = args.columnwise = true;
    expect_error([&] { kernels::quantize(x, args); }, fields[i]);
    expect_error([&] { kernels::dequantize(q->rowwise(), formats[i], 32, at::kFloat); }, fields[i]);
    expect_error(
        [&] {
          QuantizedTensor made(formats[i], {32, 32}, at::kFloat, {q->rowwise(), q->columnwise()});
          made.dequantize();
        },
        fields[i]);
  }
}

TEST(Misuse, OtherEnumeratorsThatAreNone) {
  const Tensor x = random({4, 8});
  const kernels::ActivationSpec spec{unknown<kernels::ActivationKind>()};
  expect_error([&] { kernels::activation_forward(x, spec); }, "activation");
  expect_error([&] { kernels::activation_backward(x, x, spec); }, "activation");
  expect_error([&] { kernels::bias_activation_forward(x, random({8}), spec, true); }, "activation");
  const auto fp8 = unknown<Fp8Format>();
  expect_error([&] { DelayedScaling recipe({.fp8_format = fp8}); }, "fp8_format");
  expect_error([&] { Float8CurrentScaling recipe({.fp8_format = fp8}); }, "fp8_format");
  expect_error([&] { Float8BlockScaling recipe({.fp8_format = fp8}); }, "fp8_format");
  expect_error([&] { MXFP8BlockScaling recipe({.fp8_format = fp8}); }, "fp8_format");
}

// ---- contexts of one thread that end in another

TEST(Misuse, AnAutocastThatIsDestroyedInAnotherThread) {
  auto autocast = std::make_unique<Autocast>(
      AutocastOptions{.recipe = std::make_shared<Float8CurrentScaling>()});
  EXPECT_TRUE(autocast_state().enabled);
  std::thread([&] {
    EXPECT_FALSE(autocast_state().enabled);
    autocast.reset();
    EXPECT_EQ(autocast_depth(), 0);
  }).join();
  // It ends where it was entered.
  EXPECT_FALSE(autocast_state().enabled);
  EXPECT_EQ(autocast_depth(), 0);
}

TEST(Misuse, AnAutocastOfAThreadThatIsGone) {
  std::unique_ptr<Autocast> autocast;
  std::thread([&] { autocast = std::make_unique<Autocast>(); }).join();
  EXPECT_EQ(autocast_depth(), 0);
  autocast.reset();
  EXPECT_EQ(autocast_depth(), 0);
}

TEST(Misuse, AutocastsThatEndInAnotherOrder) {
  const auto outer_recipe = std::make_shared<Float8CurrentScaling>();
  const auto inner_recipe = std::make_shared<MXFP8BlockScaling>();
  auto outer = std::make_unique<Autocast>(AutocastOptions{.recipe = outer_recipe});
  auto inner = std::make_unique<Autocast>(AutocastOptions{.recipe = inner_recipe});
  for (const bool other_thread : {true, false}) {
    if (other_thread) {
      std::thread([&] { outer.reset(); }).join();
    } else {
      outer.reset();
    }
    EXPECT_EQ(autocast_state().recipe, inner_recipe);
    inner.reset();
    EXPECT_FALSE(autocast_state().enabled);
    EXPECT_EQ(autocast_depth(), 0);
    outer = std::make_unique<Autocast>(AutocastOptions{.recipe = outer_recipe});
    inner = std::make_unique<Autocast>(AutocastOptions{.recipe = inner_recipe});
  }
}

// What delayed scaling noted counts, whichever thread ends the context.
TEST(Misuse, DelayedScalingIsUpdatedFromAnotherThread) {
  const auto recipe = std::make_shared<DelayedScaling>();
  BasicLinear linear(32, 32);
  OperationFuser fuser({linear.ptr()});
  const auto scale = [&] {
    return linear->quantization()->forward_quantizer(0)->delayed->scale.item<float>();
  };
  auto autocast = std::make_unique<Autocast>(AutocastOptions{.recipe = recipe});
  fuser(torch::full({32, 32}, 2.0, on_device()));
  EXPECT_EQ(scale(), 1.0f);
  std::thread([&] { autocast.reset(); }).join();
  EXPECT_FALSE(autocast_state().enabled);
  EXPECT_EQ(scale(), 224.0f);
}

// An update that fails is an exception of the next call, or of end().
TEST(Misuse, AnUpdateThatFails) {
  const auto recipe = std::make_shared<DelayedScaling>();
  BasicLinear linear(32, 32);
  OperationFuser fuser({linear.ptr()});
  const auto fails = [](at::Tensor&) { throw std::runtime_error("no network"); };
  const auto make = [&] {
    auto made = std::make_unique<Autocast>(AutocastOptions{.recipe = recipe, .reduce_amax = fails});
    fuser(random({32, 32}));
    return made;
  };
  const auto expect_reported = [](const auto& f) {
    try {
      f();
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find("no network"), std::string::npos);
    }
  };
  make().reset();
  expect_reported([&] { fuser(random({32, 32})); });
  EXPECT_NO_THROW(fuser(random({32, 32})));  // once
  std::thread([&, autocast = make()]() mutable { autocast.reset(); }).join();
  expect_reported([&] { fuser(random({32, 32})); });
  {
    const auto autocast = make();
    expect_reported([&] { autocast->end(); });
    EXPECT_EQ(autocast_depth(), 0);
    EXPECT_NO_THROW(autocast->end());
  }
  EXPECT_NO_THROW(fuser(random({32, 32})));
}

TEST(Misuse, AModelInitThatIsDestroyedInAnotherThread) {
  auto init = std::make_unique<QuantizedModelInit>(
      QuantizedModelInitOptions{.recipe = std::make_shared<MXFP8BlockScaling>()});
  EXPECT_NE(quantized_model_init(), nullptr);
  std::thread([&] { init.reset(); }).join();
  EXPECT_EQ(quantized_model_init(), nullptr);
  std::thread([&] { init = std::make_unique<QuantizedModelInit>(); }).join();
  init.reset();
  EXPECT_EQ(quantized_model_init(), nullptr);
}

TEST(Misuse, AStrictScopeThatIsDestroyedInAnotherThread) {
  auto strict = std::make_unique<StrictScope>(std::vector<std::string>{"no such fusion"});
  OperationFuser fuser({GELU().ptr()});
  EXPECT_THROW(fuser(random({4, 8})), c10::Error);
  std::thread([&] { strict.reset(); }).join();
  EXPECT_NO_THROW(fuser(random({4, 8})));
  auto outer = std::make_unique<StrictScope>(std::vector<std::string>{"no such fusion"});
  auto inner = std::make_unique<StrictScope>(std::vector<std::string>{"another"});
  outer.reset();
  EXPECT_THROW(fuser(random({4, 8})), c10::Error);
  inner.reset();
  EXPECT_NO_THROW(fuser(random({4, 8})));
}

}  // namespace
}  // namespace ligature
