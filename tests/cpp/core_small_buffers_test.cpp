// The small buffers of a run share one allocation; nothing that a caller sees does.
#include <gtest/gtest.h>

#include <set>

#include "device.h"
#include "fused_test_support.h"
#include "ligature/kernels/small_buffers.h"

using namespace ligature;

namespace {

constexpr int64_t kAlignment = SmallBufferRun::kAlignment;

/// As tensors name it: with a number, where it has one.
at::Device place() { return at::empty({0}, on_device()).device(); }

const void* memory_of(const Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

Tensors take(const std::vector<std::vector<int64_t>>& shapes, at::ScalarType dtype = at::kFloat) {
  Tensors out;
  for (const auto& shape : shapes) out.push_back(take_small(shape, {}, dtype, place()));
  return out;
}

TEST(SmallBuffers, ThereAreNoneOutsideOfARun) {
  EXPECT_FALSE(take_small({4}, {}, at::kFloat, place()).defined());
  EXPECT_EQ(empty_small({4}, on_device()).storage().nbytes(), 16);
}

TEST(SmallBuffers, TheSecondRunHasOneAllocationAndNoTwoOverlap) {
  SmallBytes bytes{0};
  const std::vector<std::vector<int64_t>> shapes{{3}, {65, 5}, {0}, {1}};
  {
    const SmallBufferRun run(bytes);
    for (const Tensor& t : take(shapes)) EXPECT_FALSE(t.defined());
  }
  EXPECT_EQ(bytes, kAlignment + 6 * kAlignment + 0 + kAlignment);
  Tensors taken;
  {
    const SmallBufferRun run(bytes);
    taken = take(shapes);
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    ASSERT_TRUE(taken[i].defined());
    EXPECT_EQ(taken[i].sizes(), at::IntArrayRef(shapes[i]));
    EXPECT_TRUE(taken[i].is_contiguous());
    EXPECT_EQ(memory_of(taken[i]), memory_of(taken[0]));
    EXPECT_EQ(taken[i].storage_offset() * 4 % kAlignment, 0);
    taken[i].fill_(static_cast<double>(i));
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    EXPECT_TRUE(taken[i].eq(static_cast<double>(i)).all().item<bool>()) << i;
  }
}

TEST(SmallBuffers, StridesAndDtypesAreThoseAskedFor) {
  SmallBytes bytes{4096};
  const SmallBufferRun run(bytes);
  const at::Device device = place();
  const Tensor before = take_small({7}, {}, at::kByte, device);
  const Tensor turned = take_small({5, 3}, {1, 5}, at::kFloat, device);
  const Tensor wide = take_small({4}, {}, at::kDouble, device);
  EXPECT_EQ(turned.strides(), at::IntArrayRef({1, 5}));
  EXPECT_EQ(turned.scalar_type(), at::kFloat);
  EXPECT_EQ(wide.scalar_type(), at::kDouble);
  EXPECT_EQ(static_cast<const char*>(turned.const_data_ptr()) -
                static_cast<const char*>(before.const_data_ptr()),
            kAlignment);
  EXPECT_EQ(static_cast<const char*>(wide.const_data_ptr()) -
                static_cast<const char*>(before.const_data_ptr()),
            2 * kAlignment);
}

TEST(SmallBuffers, WhatIsLargeOrMoreThanExpectedIsByItself) {
  SmallBytes bytes{2 * kAlignment};
  {
    const SmallBufferRun run(bytes);
    const int64_t floats = SmallBufferRun::kLargest / 4;
    const Tensors taken = take({{1}, {floats + 1}, {1}, {1}});
    EXPECT_TRUE(taken[0].defined());
    EXPECT_FALSE(taken[1].defined());
    EXPECT_TRUE(taken[2].defined());
    EXPECT_FALSE(taken[3].defined());
  }
  EXPECT_EQ(bytes, 3 * kAlignment);  // the next run has room for the last one too
  {
    const SmallBufferRun run(bytes);
    const int64_t floats = SmallBufferRun::kLargest / 4;
    for (int64_t i = 0; i < 20; ++i) take({{floats}});
  }
  EXPECT_EQ(bytes, SmallBufferRun::kLimit);
}

TEST(SmallBuffers, OneAloneIsByItself) {
  SmallBytes bytes{4096};
  {
    const SmallBufferRun run(bytes), inner(bytes);
  }
  EXPECT_EQ(bytes, 0);
  {
    const SmallBufferRun run(bytes);
    take({{3}});
  }
  EXPECT_EQ(bytes, 0);
}

TEST(SmallBuffers, OwnBuffersAreOutsideOfTheRun) {
  SmallBytes bytes{4096};
  const SmallBufferRun run(bytes);
  {
    const OwnBuffers own;
    EXPECT_FALSE(take({{3}})[0].defined());
  }
  EXPECT_TRUE(take({{3}})[0].defined());
}

std::vector<RecipePtr> recipes() {
  return {std::make_shared<DelayedScaling>(), std::make_shared<Float8CurrentScaling>(),
          std::make_shared<Float8BlockScaling>(), std::make_shared<MXFP8BlockScaling>()};
}

TEST(SmallBuffers, ResultsOfAStepAreTheSameBitsAndByThemselves) {
  for (const RecipePtr& recipe : recipes()) {
    const auto block = [&] {
      torch::manual_seed(3);
      OpList ops{make_norm<LayerNorm>(128, at::kBFloat16), make_linear(128, 256, at::kBFloat16),
                 SwiGLU().ptr(), make_linear(128, 128, at::kBFloat16)};
      randomize_parameters(ops);
      return ops;
    };
    const auto x = torch::randn({64, 128}, on_device(at::kBFloat16)).requires_grad_();
    const auto dy = torch::randn_like(x);
    const OpList ops = block(), fresh = block();
    OperationFuser fuser(ops);
    const auto step = [&](OperationFuser& made, const OpList& of) {
      Tensor y;
      {
        Autocast autocast({.recipe = recipe});
        y = made(x)[0];
      }
      Tensors leaves = parameters_of(of);
      leaves.push_back(x);
      Tensors out = torch::autograd::grad({y}, leaves, {dy});
      out.push_back(y);
      return out;
    };
    OperationFuser first(fresh);
    // A fuser that is new makes every buffer by itself; delayed scaling has the same history.
    const Tensors wanted = step(first, fresh);
    for (int i = 0; i < 3; ++i) {
      for (const auto& op : ops) {
        for (const auto& basic : op->basic_ops()) basic->reset_recipe_state(recipe, x.device());
      }
      const Tensors got = step(fuser, ops);
      std::set<const void*> memory;
      for (size_t k = 0; k < got.size(); ++k) {
        expect_same_bits(got[k], wanted[k], recipe->name() + " result " + std::to_string(k));
        EXPECT_EQ(got[k].storage().nbytes(), got[k].nbytes());
        EXPECT_TRUE(memory.insert(memory_of(got[k])).second);
      }
    }
    EXPECT_GT(fuser.plan()->forward_bytes, 0) << recipe->name();
    EXPECT_GT(fuser.plan()->backward_bytes, 0) << recipe->name();
  }
}

TEST(SmallBuffers, AQuantizedOutputIsTheCallersAlone) {
  OperationFuser fuser({make_linear(32, 32, at::kBFloat16), Quantize().ptr()});
  const auto x = torch::randn({64, 32}, on_device(at::kBFloat16)).requires_grad_();
  for (int i = 0; i < 3; ++i) {
    Autocast autocast({.recipe = std::make_shared<MXFP8BlockScaling>()});
    const Tensor y = fuser(x)[0];
    const QuantizedPtr quantized = quantized_of(y);
    ASSERT_NE(quantized, nullptr);
    for (const Tensor& t : quantized->tensors()) EXPECT_EQ(t.storage().nbytes(), t.nbytes());
  }
}

}  // namespace
