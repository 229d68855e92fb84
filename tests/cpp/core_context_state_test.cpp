// What contexts keep besides tensors: structs of built-in operations, and values by name.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"

namespace ligature {
namespace {

struct Small {
  std::optional<double> scale;
  std::optional<bool> centered;
  bool off = false;

  template <class F>
  void fields(F&& f) {
    f("scale", scale);
    f("centered", centered);
    f("off", off);
  }
};

std::string text(const ContextState& state) {
  std::string out;
  for (const auto& [name, value] : state.all()) {
    out += (out.empty() ? "" : " ") + name + "=" + to_string(value);
  }
  return out;
}

TEST(ContextState, IsFilledFromNames) {
  ContextState state;
  state.set("scale", 2.5);
  state.set("centered", std::string("no"));  // of another kind
  state.set("more", int64_t{3});
  EXPECT_EQ(std::as_const(state).as<Small>().scale, 2.5);
  EXPECT_EQ(text(state), "scale=2.5 centered='no' more=3");
  const Small& small = state.as<Small>();
  EXPECT_EQ(small.scale, 2.5);
  EXPECT_FALSE(small.centered.has_value());
  EXPECT_EQ(state.get<std::string>("centered"), "no");
  EXPECT_EQ(state.get<int64_t>("more"), 3);
}

TEST(ContextState, IsReadAndSetByName) {
  ContextState state;
  Small& small = state.as<Small>();
  EXPECT_TRUE(state.empty());
  small.centered = false;
  EXPECT_EQ(text(state), "centered=False");
  EXPECT_FALSE(state.find("scale").has_value());
  EXPECT_EQ(state.get_or("scale", 4.0), 4.0);
  EXPECT_THROW(state.get<double>("scale"), c10::Error);
  state.set("scale", 0.5);
  state.set("off", true);
  state.set("more", 1.0);
  EXPECT_EQ(small.scale, 0.5);
  EXPECT_TRUE(small.off);
  EXPECT_EQ(state.get<double>("scale"), 0.5);
  EXPECT_EQ(text(state), "more=1 scale=0.5 centered=False off=True");
  // A value of another kind takes the field's away.
  state.set("scale", int64_t{2});
  state.set("off", PlainValue{});
  EXPECT_FALSE(small.scale.has_value());
  EXPECT_FALSE(small.off);
  EXPECT_EQ(state.get<int64_t>("scale"), 2);
  state.set("scale", 3.0);
  EXPECT_EQ(small.scale, 3.0);
  EXPECT_EQ(state.get<double>("scale"), 3.0);
}

TEST(ContextState, TurnsFromOneStructToAnother) {
  ContextState state;
  state.as<ConstantScaleState>().scale = 2.0;
  EXPECT_EQ(std::as_const(state).as<Small>().scale, 2.0);
  Small& small = state.as<Small>();
  EXPECT_EQ(small.scale, 2.0);
  small.off = true;
  EXPECT_EQ(state.as<ConstantScaleState>().scale, 2.0);
  EXPECT_EQ(text(state), "off=True scale=2");
  PlainState plain;
  plain.set("s", 1.0);
  state = plain;
  EXPECT_EQ(text(state), "s=1");
  EXPECT_FALSE(state.as<ConstantScaleState>().scale.has_value());
}

TEST(ContextState, CopiesAreDeep) {
  Contexts contexts(2);
  contexts[0].state.as<ReshapeState>().input_shape = std::vector<int64_t>{2, 3};
  contexts[1].state.set("s", 1.0);
  Contexts copy(2);
  for (size_t i = 0; i < 2; ++i) copy[i] = contexts[i];
  contexts[0].state.as<ReshapeState>().input_shape->push_back(4);
  contexts[1].state.set("s", 2.0);
  EXPECT_EQ(text(copy[0].state), "input_shape=[2, 3]");
  EXPECT_EQ(text(copy[1].state), "s=1");
  ContextState moved = std::move(copy[0].state);
  EXPECT_EQ(moved.as<ReshapeState>().input_shape, (std::vector<int64_t>{2, 3}));
  moved = ContextState(moved);
  EXPECT_EQ(text(moved), "input_shape=[2, 3]");
  moved = {};
  EXPECT_TRUE(moved.empty());
}

// ---- of built-in operations

std::string left_by(BasicOperation& op, bool calibrating = false) {
  std::vector<Tensor> params;
  op.collect_parameters(params);
  OpArgs args;
  args.params = params;
  args.requires_grad.op = args.requires_grad.input = true;
  args.requires_grad.params.set(0);
  args.calibrating = calibrating;
  OperationContext ctx;
  op.op_forward(ctx, torch::randn({3, 8}, on_device()), args);
  return text(ctx.state);
}

TEST(ContextState, OfBuiltInOperations) {
  EXPECT_EQ(left_by(*BasicLinear(8, 4)), "dtype=Float input_dtype=Float weight_dtype=Float");
  EXPECT_EQ(left_by(*BasicLinear(8, 4), true),
            "dtype=Float input_dtype=Float weight_dtype=Float calibrating=True");
  EXPECT_EQ(left_by(*Bias(8)), "bias_dtype=Float");
  EXPECT_EQ(left_by(*RMSNorm(RMSNormOptions(8))), "zero_centered_gamma=False");
  EXPECT_EQ(left_by(*LayerNorm(LayerNormOptions(8))), "bias_dtype=Float zero_centered_gamma=False");
  EXPECT_EQ(left_by(*GELU()), "");
  EXPECT_EQ(left_by(*SiTUGLU()), "beta1=4 beta2=25 glu_interleave_size=0");
  EXPECT_EQ(left_by(*Dropout(0.25)), "p=0.25");
  EXPECT_EQ(left_by(*Dropout(0.0)), "");
  EXPECT_EQ(left_by(*ConstantScale(3.0)), "scale=3");
  EXPECT_EQ(left_by(*Reshape(ReshapeOptions({-1}))), "input_shape=[3, 8]");
  EXPECT_EQ(left_by(*Quantize()), "");
}

TEST(ContextState, WhatAFusionSetsByNameCounts) {
  // Before the operation's own struct is made, and after it.
  ClampedSwiGLU activation;
  const Tensor x = torch::full({2, 8}, 3.0, on_device()), dy = torch::ones({2, 4}, on_device());
  const auto gradient = [&](bool own, std::optional<double> limit) {
    OperationContext ctx;
    ctx.requires_grad.op = ctx.requires_grad.input = true;
    OpArgs args;
    args.requires_grad = ctx.requires_grad;
    if (own) {
      activation->op_forward(ctx, x, args);
    } else {
      ctx.save_for_backward({x});
    }
    if (limit) ctx.state.set("limit", *limit);
    EXPECT_EQ(activation->complete_context(ctx, args), "");
    EXPECT_EQ(ctx.state.get<double>("limit"), limit.value_or(7.0));
    return activation->op_backward(ctx, dy).grad_input.tensor().clone();
  };
  EXPECT_TRUE(gradient(true, {}).ne(0).all().item<bool>());
  EXPECT_TRUE(gradient(true, {}).equal(gradient(false, {})));
  EXPECT_TRUE(gradient(true, 1.0).eq(0).all().item<bool>());  // cut off
  EXPECT_TRUE(gradient(false, 1.0).eq(0).all().item<bool>());

  ConstantScale scale(2.0);
  OperationContext ctx;
  ctx.requires_grad.input = true;
  ctx.state.set("scale", 5.0);
  EXPECT_TRUE(scale->op_backward(ctx, dy).grad_input.tensor().eq(5).all().item<bool>());
}

TEST(ContextState, AStateThatIsMissingIsNamed) {
  OperationContext ctx;
  ctx.requires_grad.input = true;
  const Tensor dy = torch::ones({2, 4}, on_device());
  EXPECT_THROW(Reshape(ReshapeOptions({8}))->op_backward(ctx, dy), c10::Error);
  ctx.save_for_backward({dy});
  EXPECT_THROW(Dropout(0.5)->op_backward(ctx, dy), c10::Error);
}

}  // namespace
}  // namespace ligature
