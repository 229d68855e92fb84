// Quantized values between two steps, neighbours' quantizers, and what the node saves of them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

namespace ligature {
namespace {

struct NoOptions {
  template <class F>
  void fields(F&&) {}
};

/// MXFP8 holds the data below exactly.
std::shared_ptr<Quantizer> exact_quantizer() {
  Format format;
  format.scaling = Scaling::MX;
  return std::make_shared<Quantizer>(format);
}

/// Hands its input on in the format that the next operation asks for.
class ProducerImpl : public Operation<ProducerImpl> {
 public:
  using Options = NoOptions;
  explicit ProducerImpl(Options given = {}) : Operation("Producer"), options(given) {}
  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override {
    asked = args.next_op_input_quantizer;
    if (asked == nullptr) return {input.tensor().clone(), {}};
    return {asked->quantize(input.tensor()), {}};
  }
  void op_forward_save_ctx(OperationContext&, const Value&, ToSave&, const OpArgs&) override {}
  OpBackwardResult op_backward(OperationContext&, const Value& dy) override { return {dy, {}}; }
  Options options;
  const Quantizer* asked = nullptr;
};

/// Squares a quantized input, and saves it as it is.
class ConsumerImpl : public Operation<ConsumerImpl> {
 public:
  using Options = NoOptions;
  explicit ConsumerImpl(Options given = {}) : Operation("Consumer"), options(given) {}
  QuantizerPtr get_input_quantizer() override { return quantizer; }
  OpForwardResult op_forward_compute(const Value& input, const OpArgs&) override {
    was_quantized = input.is_quantized();
    Tensor x = input.dequantized();
    return {x * x, {}};
  }
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave&,
                           const OpArgs&) override {
    ctx.save_for_backward({input});
  }
  OpBackwardResult op_backward(OperationContext& ctx, const Value& dy) override {
    saved_quantized = ctx.saved_value(0).is_quantized();
    return {dy.tensor() * 2 * ctx.saved_value(0).dequantized(), {}};
  }
  Options options;
  QuantizerPtr quantizer = exact_quantizer();
  bool was_quantized = false;
  bool saved_quantized = false;
};

TEST(Value, QuantizedBetweenTwoStepsAndInTheNode) {
  auto producer = std::make_shared<ProducerImpl>();
  auto consumer = std::make_shared<ConsumerImpl>();
  OperationFuser fuser({producer, consumer});
  Tensor x = torch::tensor({0.25F, -1.0F, 0.5F}, on_device()).requires_grad_();
  Tensor y = fuser(x)[0];
  EXPECT_EQ(producer->asked, consumer->quantizer.get());
  EXPECT_TRUE(consumer->was_quantized);
  expect_close(y, (x * x).to(torch::kFloat64), at::kFloat, "y");
  y.sum().backward();
  EXPECT_TRUE(consumer->saved_quantized);
  expect_close(x.grad(), (2 * x).to(torch::kFloat64), at::kFloat, "dx");
}

TEST(Value, ALinearTakesAQuantizedInput) {
  auto producer = std::make_shared<ProducerImpl>();
  class QuantizingLinear : public BasicLinearImpl {
   public:
    using BasicLinearImpl::BasicLinearImpl;
    QuantizerPtr get_input_quantizer() override { return quantizer; }
    QuantizerPtr quantizer = exact_quantizer();
  };
  auto linear = std::make_shared<QuantizingLinear>(3, 2);
  OperationFuser fuser({producer, linear});
  Tensor x = torch::tensor({{0.25F, -1.0F, 0.5F}}, on_device()).requires_grad_();
  Tensor w = linear->weight();
  Tensor y = fuser(x)[0];
  Tensor reference = torch::linear(x.to(torch::kFloat64), w.to(torch::kFloat64));
  expect_close(y, reference, at::kFloat, "y");
  auto expected = torch::autograd::grad({reference.sum()}, {x, w});
  auto actual = torch::autograd::grad({y.sum()}, {x, w});
  expect_close(actual[0], expected[0], "dx");
  expect_close(actual[1], expected[1], "dw");
}

TEST(Value, PlainAccessToAQuantizedOneIsRefused) {
  Value value(exact_quantizer()->quantize(torch::ones({2}, on_device())));
  EXPECT_THROW(value.tensor(), c10::Error);
  EXPECT_EQ(value.dequantized().sum().item<float>(), 2.0F);
}

}  // namespace
}  // namespace ligature
