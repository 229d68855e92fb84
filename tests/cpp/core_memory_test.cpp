// How much memory a step takes at its peak, and that nothing is overwritten which somebody can see.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <atomic>

#include "fused_test_support.h"
#include "tolerance.h"

using namespace ligature;

namespace {

/// The bytes that tensors hold above what they held when it was made, as allocators tell them.
class Peak {
 public:
  Peak()
      : counter_(std::make_shared<Counter>()),
        guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  int64_t bytes() const { return counter_->peak; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
      held += bytes;
      peak = std::max<int64_t>(peak, held);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::atomic<int64_t> held{0}, peak{0};
  };

  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

constexpr int64_t kTokens = 256, kModel = 16, kHidden = 64;  // hidden: before SwiGLU

/// Bytes of a float tensor.
constexpr int64_t bytes(int64_t rows, int64_t columns) { return 4 * rows * columns; }

struct Block {
  explicit Block(Recompute recompute, OpPtr activation = SwiGLU().ptr(),
                 int64_t inner = kHidden / 2) {
    ops = {make_norm<LayerNorm>(kModel, at::kFloat), make_linear(kModel, kHidden, at::kFloat),
           std::move(activation), make_linear(inner, kModel, at::kFloat)};
    for (const auto& op : ops) op->to(at::kCPU);
    randomize_parameters(ops);
    FuserOptions options;
    options.recompute = recompute;
    fuser = std::make_unique<OperationFuser>(ops, options);
    x = torch::randn({kTokens, kModel}).requires_grad_();
    dy = torch::randn({kTokens, kModel});
  }

  /// The gradients of input and parameters.
  Tensors gradients(bool keep_graph = false) {
    Tensors leaves = parameters_of(ops);
    leaves.push_back(x);
    const Tensor y = (*fuser)(x)[0];
    return torch::autograd::grad({y}, leaves, {dy}, keep_graph);
  }

  int64_t peak(bool keep_graph = false) {
    gradients();  // what is made once
    const Peak measured;
    gradients(keep_graph);
    return measured.bytes();
  }

  OpList ops;
  std::unique_ptr<OperationFuser> fuser;
  Tensor x, dy;
};

constexpr int64_t kStatistics = 2 * bytes(kTokens, 1);
constexpr int64_t kH = bytes(kTokens, kModel), kY = kH, kZ = bytes(kTokens, kHidden),
                  kA = bytes(kTokens, kHidden / 2), kDw2 = bytes(kModel, kHidden / 2);

TEST(Memory, RecomputedBlockHoldsTheHiddenTensorAndOneMore) {
  EXPECT_EQ(Block(Recompute::Cheap).peak(), kStatistics + kY + kZ + kA + kDw2);
}

TEST(Memory, PlainBlockHoldsWhatForwardSavedAndOneGradient) {
  EXPECT_EQ(Block(Recompute::None).peak(), kStatistics + kH + kY + kZ + kA + kDw2);
}

TEST(Memory, AKeptGraphIsNotOverwritten) {
  for (const Recompute recompute : {Recompute::None, Recompute::Cheap}) {
    EXPECT_GE(Block(recompute).peak(/*keep_graph=*/true), kStatistics + kY + 2 * kZ + kA + kDw2);
  }
}

TEST(Memory, GradientsAreTheSameWhetherTheGraphIsKeptOrNot) {
  const std::vector<std::pair<OpPtr, int64_t>> activations{{GELU().ptr(), kHidden},
                                                           {SReLU().ptr(), kHidden},
                                                           {SwiGLU().ptr(), kHidden / 2},
                                                           {ClampedSwiGLU().ptr(), kHidden / 2}};
  for (const auto& [activation, inner] : activations) {
    for (const Recompute recompute : {Recompute::None, Recompute::Cheap}) {
      Block block(recompute, activation, inner);
      const Tensors kept = block.gradients(true), given_back = block.gradients(false);
      for (size_t i = 0; i < kept.size(); ++i) {
        expect_same_bits(kept[i], given_back[i],
                         activation->name() + " gradient " + std::to_string(i));
      }
    }
  }
}

/// Gives out memory of its own, and holds no tensor of it.
struct LenderOptions {
  template <class F>
  void fields(F&&) {}
};
struct LenderImpl : Operation<LenderImpl> {
  using Options = LenderOptions;
  explicit LenderImpl(Options given = {}) : Operation("Lender"), options(given) {}
  OpForwardResult op_forward_compute(const Value& input, const OpArgs&) override {
    return {at::from_blob(memory.data(), input.sizes(), input.tensor().options()), {}};
  }
  void op_forward_save_ctx(OperationContext&, const Value&, ToSave&, const OpArgs&) override {}
  OpBackwardResult op_backward(OperationContext&, const Value& grad_output) override {
    return {grad_output, {}};
  }
  Options options;
  std::vector<float> memory = std::vector<float>(64, 0.5f);
};

TEST(Memory, WhatAnOperationLendsIsLeftAlone) {
  const auto lender = std::make_shared<LenderImpl>();
  OperationFuser fuser({lender, SwiGLU().ptr()});
  fuser(torch::randn({4, 16}).requires_grad_())[0].sum().backward();
  EXPECT_EQ(lender->memory, std::vector<float>(64, 0.5f));
}

/// Releases every saved value.
struct Holder : SavedValues {
  explicit Holder(Contexts& contexts) : all(contexts) { all.holder = this; }
  virtual ~Holder() { all.holder = nullptr; }
  void unpack(size_t) override {}
  void used(size_t, size_t) override {}
  bool try_release(const OperationContext&, size_t, bool& internal) override {
    internal = inside;
    return true;
  }
  Contexts& all;
  bool inside = true;
};

TEST(Memory, OnlyWhatNothingElseHoldsMayBeOverwritten) {
  const auto contexts = std::make_shared<Contexts>(1);
  OperationContext& ctx = (*contexts)[0];
  const auto may_overwrite = [&](const Tensor& saved) {
    ctx.save_for_backward({saved});
    return ctx.release_saved(0).may_overwrite;
  };
  const auto fresh = [&] {
    ctx.save_for_backward({torch::randn({4})});
    return ctx.release_saved(0);
  };
  EXPECT_FALSE(fresh().may_overwrite) << "nobody releases it";
  EXPECT_TRUE(ctx.saved_value(0).defined()) << "and so it is still there";
  Holder holder(*contexts);
  EXPECT_TRUE(fresh().may_overwrite);
  EXPECT_FALSE(ctx.saved_value(0).defined());
  const Tensor held = torch::randn({4});
  EXPECT_FALSE(may_overwrite(held)) << "somebody holds the tensor";
  EXPECT_FALSE(may_overwrite(held.view({2, 2}))) << "somebody holds another view";
  holder.inside = false;
  EXPECT_FALSE(fresh().may_overwrite) << "it came from outside";
}

}  // namespace
