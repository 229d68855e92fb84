// Every registered fusion is proven, on chains of operations found out from its pattern: a new one
// is tested the day it is registered.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "device.h"
#include "ligature/fuser/registry.h"
#include "ligature/ligature.h"
#include "ligature/testing/testing.h"
#include "testing_support.h"

using namespace ligature;
using ligature::testing::CheckOptions;
using ligature::testing::Example;
using ligature::testing::Report;

namespace {

using TestingWalk = OneThread;

/// An operation without options that must be given; null for others.
BasicOpPtr op_of(const std::string& name) {
  try {
    return make_operation(name, {});
  } catch (const c10::Error&) {
    return nullptr;
  }
}

/// A GPU waits for each result, and gets fewer of them.
CheckOptions walk_options(size_t max_patterns) {
  CheckOptions options;
  options.device = on_device().device();
  options.max_patterns = options.device->is_cpu() ? max_patterns : (max_patterns + 3) / 4;
  return options;
}

/// So that several processes can share the examples of a pass.
constexpr size_t kParts = 6;

void expect_proven(ligature::Pass pass, size_t part, const CheckOptions& options) {
  size_t count = 0;
  for (const auto& fusion : registered_fusions(pass)) {
    const auto* rule = std::get_if<FusionRule>(fusion.get());
    ASSERT_NE(rule, nullptr) << fusion_name(*fusion)
                             << " is no rule, so it needs a test of its own";
    if (rule->needs_ranks) continue;  // distributed_test has them
    const auto examples = ligature::testing::find_examples(*rule);
    EXPECT_FALSE(examples.empty()) << "no operations are known that " << rule->name << " fuses";
    for (const Example& example : examples) {
      if (count++ % kParts != part) continue;
      const Report report = check_fusion(*fusion, pass, example.make, example.shapes, options);
      EXPECT_TRUE(report) << example.text << "\n" << report.text();
    }
  }
}

class TestingWalkFusions
    : public OneThread,
      public ::testing::WithParamInterface<std::tuple<ligature::Pass, size_t>> {
 protected:
  static void expect(const CheckOptions& options) {
    expect_proven(std::get<0>(GetParam()), std::get<1>(GetParam()), options);
  }
};

TEST_P(TestingWalkFusions, AreProven) { expect(walk_options(20)); }

TEST_P(TestingWalkFusions, AreProvenWithParametersOfAnotherDtype) {
  CheckOptions options = walk_options(6);
  options.dtypes = {{at::kBFloat16, at::kFloat}, {at::kFloat, at::kBFloat16}, at::kHalf};
  expect(options);
}

TEST_P(TestingWalkFusions, AreProvenUnderAutocast) {
  CheckOptions options = walk_options(6);
  options.dtypes = {at::kFloat, at::kBFloat16};
  options.autocast = at::kBFloat16;
  expect(options);
}

INSTANTIATE_TEST_SUITE_P(Passes, TestingWalkFusions,
                         ::testing::Combine(::testing::Values(ligature::Pass::Forward,
                                                              ligature::Pass::Backward,
                                                              ligature::Pass::Joint),
                                            ::testing::Range(size_t{0}, kParts)));

TEST_F(TestingWalk, ExamplesCoverTheWholePattern) {
  EXPECT_EQ(ligature::testing::unknown_operations(), std::vector<std::string>());
  std::set<std::string> names, activations;
  for (const auto& fusion : registered_fusions(ligature::Pass::Forward)) {
    const auto& rule = std::get<FusionRule>(*fusion);
    if (rule.name != "ForwardLinearBiasActivation") continue;
    for (const Example& example : ligature::testing::find_examples(rule)) {
      const auto subject = example.make(at::kFloat, on_device().device());
      names.insert(describe(subject.ops));
      EXPECT_EQ(subject.params[0][0].sizes()[1], 20);
    }
  }
  for (const std::string& name : operation_names()) {
    if (std::dynamic_pointer_cast<ActivationOperation>(op_of(name)) != nullptr) {
      activations.insert(name);
    }
  }
  EXPECT_GE(activations.size(), 13U);
  size_t with_bias = 0;
  for (const std::string& name : activations) {
    const size_t bias = names.count("[BasicLinear, Bias, " + name + "]");
    EXPECT_GE(bias + names.count("[BasicLinear, " + name + "]"), 1U) << name;
    with_bias += bias;
  }
  EXPECT_GT(with_bias, 0U);
  EXPECT_LT(with_bias, activations.size());
}

TEST_F(TestingWalk, ExamplesOfARuleThatTakesNothing) {
  FusionRule rule{"Never",
                  {{"nothing", [](at::ArrayRef<OpPtr>) -> size_t { return 0; }, false}},
                  nullptr,
                  [](const Match& match) { return match.ops[0]; }};
  EXPECT_TRUE(ligature::testing::find_examples(rule).empty());
  rule.pattern = {of<GELUImpl>("GELU")};
  rule.why_not = [](const Match&, const PlanOptions&) { return "never"; };
  EXPECT_TRUE(ligature::testing::find_examples(rule).empty());
}

}  // namespace
