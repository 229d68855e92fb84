// Outputs in the memory of an argument: whoever writes into one of the two is caught by whoever
// saved the other, as with torch's own views.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"

namespace ligature {
namespace {

Tensor random(at::IntArrayRef sizes) { return torch::randn(sizes, on_device()); }

/// A user's operation that returns a view.
struct TurnedImpl : Operation<TurnedImpl> {
  struct Options {};
  explicit TurnedImpl(Options options_ = {}) : Operation("Turned"), options(options_) {}
  OpForwardResult op_forward_compute(const Value& input, const OpArgs&) override {
    return {input.tensor().t(), {}};
  }
  void op_forward_save_ctx(OperationContext&, const Value&, ToSave&, const OpArgs&) override {}
  OpBackwardResult op_backward(OperationContext&, const Value& grad_output) override {
    return {grad_output.tensor().t(), {}};
  }
  Options options;
};
TORCH_MODULE(Turned);

OpPtr reshape() { return Reshape(ReshapeOptions({-1})).ptr(); }

OpPtr evaluated_dropout() {
  Dropout dropout(0.5);
  dropout->eval();
  return dropout.ptr();
}

std::vector<OpList> runs_of_views() {
  return {{reshape()},
          {Identity().ptr(), reshape()},
          {reshape(), Reshape(ReshapeOptions({2, -1})).ptr()},
          {evaluated_dropout(), reshape()},
          {Turned().ptr()},
          {Identity().ptr()},
          {evaluated_dropout()}};
}

// `write` writes into the output of a call; what torch saved of the input must notice.
void expect_noticed(const OpList& ops, const std::function<void(Tensor)>& write,
                    const std::string& where) {
  const Tensor w = random({4, 8}).requires_grad_();
  Tensor x = random({4, 8});
  const Tensor product = (w * x).sum();  // saves x
  OperationFuser fuser(ops);
  const Tensor y = fuser(x)[0];
  ASSERT_TRUE(y.is_alias_of(x)) << where;
  write(y);
  EXPECT_THROW(product.backward(), c10::Error) << where << " " << describe(ops);
}

TEST(Views, AWriteIntoAnOutputIsNoticedWithoutGradients) {
  for (const OpList& ops : runs_of_views()) {
    const torch::NoGradGuard no_grad;
    const at::AutoGradMode on(true);
    expect_noticed(ops, [](Tensor y) { y.add_(1); }, "an input without a gradient");
  }
  for (const OpList& ops : runs_of_views()) {
    const Tensor w = random({4, 8}).requires_grad_();
    Tensor x = random({4, 8}).requires_grad_();
    const Tensor product = (w * x).sum();
    {
      const torch::NoGradGuard no_grad;
      OperationFuser fuser(ops);
      fuser(x)[0].add_(1);
    }
    EXPECT_THROW(product.backward(), c10::Error) << "no_grad " << describe(ops);
  }
}

TEST(Views, AWriteIntoAnOutputIsNoticedInInferenceMode) {
  for (const OpList& ops : runs_of_views()) {
    const Tensor w = random({4, 8}).requires_grad_();
    Tensor x = random({4, 8});
    const Tensor product = (w * x).sum();
    {
      const c10::InferenceMode inference;
      OperationFuser fuser(ops);
      fuser(x)[0].add_(1);
    }
    EXPECT_THROW(product.backward(), c10::Error) << describe(ops);
    const c10::InferenceMode inference;
    OperationFuser fuser(ops);
    Tensor own = random({4, 8});
    EXPECT_NO_THROW(fuser(own)[0].add_(1)) << describe(ops);
  }
}

TEST(Views, AWriteIntoAnOutputIsNoticedWithGradients) {
  for (const OpList& ops : runs_of_views()) {
    const Tensor w = random({4, 8}).requires_grad_();
    const Tensor leaf = random({4, 8}).requires_grad_();
    Tensor x = leaf * 1;
    const Tensor product = (w * x).sum();
    OperationFuser fuser(ops);
    const Tensor y = fuser(x)[0];
    {
      const torch::NoGradGuard no_grad;
      Tensor(y).add_(1);
    }
    EXPECT_THROW(product.backward(), c10::Error) << describe(ops);
  }
}

// The same the other way round: an operation behind a view saves it.
TEST(Views, AWriteIntoTheInputIsNoticedBehindAView) {
  for (const OpList& first : runs_of_views()) {
    for (const bool frozen : {false, true}) {
      OpList ops = first;
      ops.push_back(SiLU().ptr());
      OperationFuser fuser(ops);
      const Tensor leaf = random({4, 8}).requires_grad_();
      Tensor x = leaf * 1;
      const Tensor y = fuser(x)[0];
      {
        const torch::NoGradGuard no_grad;
        frozen ? x.detach().mul_(3) : x.mul_(3);
      }
      EXPECT_THROW(y.sum().backward(), c10::Error) << describe(ops);
    }
  }
}

TEST(Views, OutputsInOneMemoryCountOneVersion) {
  // The extra output is what the Reshape's output is a view of.
  OperationFuser fuser({Linear(8, 8).ptr(), MakeExtraOutput().ptr(), reshape()});
  const torch::NoGradGuard no_grad;
  const auto outputs = fuser(random({4, 8}));
  ASSERT_TRUE(outputs[0].is_alias_of(outputs[1]));
  const auto before = outputs[1]._version();
  Tensor(outputs[0]).add_(1);
  EXPECT_EQ(outputs[1]._version(), before + 1);
}

TEST(Views, AQuantizedInputThatIsReturnedIsTheInput) {
  const auto quantizer = std::make_shared<Quantizer>(Format{});
  const Tensor q = wrap_quantized(quantizer->quantize(random({4, 8})));
  OperationFuser fuser({Identity().ptr()});
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(fuser(q)[0].is_same(q));
}

}  // namespace
}  // namespace ligature
