// Sequential and channels in C++.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

namespace ligature {
namespace {

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Sequential, GroupsOperationsAndRunsOtherModules) {
  torch::manual_seed(3);
  Sequential model(Linear(4, 8), GELU(), torch::nn::Linear(8, 8), torch::nn::Tanh(), SiLU(),
                   Linear(8, 2));
  model->to(on_device().device());
  Tensor x = torch::randn({3, 4}, on_device());
  Tensor y = model->forward(x);
  EXPECT_EQ(model->fusers().size(), 2);
  auto p = model->named_parameters();
  Tensor h = torch::gelu(torch::linear(x, p["0.weight"], p["0.bias"]), "tanh");
  h = torch::silu(torch::tanh(torch::linear(h, p["2.weight"], p["2.bias"])));
  expect_close(y.detach(), torch::linear(h, p["5.weight"], p["5.bias"]).detach(), "y");
}

TEST(Sequential, ContainerProtocol) {
  Sequential model(Identity{}, SiLU{});
  model->insert(1, ConstantScale(2.0));
  ASSERT_EQ(model->size(), 3);
  EXPECT_EQ(model->at<ConstantScaleImpl>(1).options.scale, 2.0);
  Tensor x = torch::randn({4}, on_device());
  expect_close(model->forward(x), torch::silu(2 * x), "inserted");
  model->erase(2);
  expect_close(model->forward(x), 2 * x, "erased");
  model->replace(1, ConstantScale(3.0));
  expect_close(model->forward(x), 3 * x, "replaced");
  EXPECT_NE(error_of([&] { model->erase(7); }).find("no module 7 among 2"), std::string::npos);
}

TEST(Sequential, ExtraInputsOutputsAndNesting) {
  Sequential inner(MakeExtraOutput{}, ConstantScale(2.0));
  Sequential outer(AddExtraInput{}, inner, AddExtraInput{});
  Tensor x = torch::randn({3}, on_device()), a = torch::randn({3}, on_device()),
         b = torch::randn({3}, on_device());
  auto out = outer->forward(x, {a, b});
  ASSERT_EQ(out.size(), 2);
  expect_close(out[0], 2 * (x + a) + b, "y");
  expect_close(out[1], x + a, "extra output");
  EXPECT_NE(error_of([&] { outer->forward(x, {a}); }).find("takes 2 extra inputs, got 1"),
            std::string::npos);
  EXPECT_NE(error_of([&] { inner->forward(x); }).find("extra outputs"), std::string::npos);
}

TEST(Sequential, CloneHasParametersOfItsOwn) {
  MakeExtraOutput start;
  AddExtraInput end;
  start->set_extra_output_channel(0, "residual", false);
  end->set_extra_input_channel(0, "residual");
  Sequential model(start, LayerNorm(LayerNormOptions(4)), Linear(4, 4), Dropout(0.5), end);
  model->eval();
  auto copy = std::dynamic_pointer_cast<SequentialImpl>(model->clone());
  Tensor x = torch::randn({2, 4}, on_device());
  expect_same_bits(copy->forward(x).detach(), model->forward(x).detach(), "copy");
  {
    torch::NoGradGuard no_grad;
    copy->named_parameters()["2.weight"].zero_();
  }
  EXPECT_FALSE(torch::equal(copy->forward(x), model->forward(x)));
}

struct Residual {
  Residual(bool to_caller, bool frozen = false) {
    start->set_extra_output_channel(0, "residual", to_caller);
    end->set_extra_input_channel(0, "residual");
    linear->to(torch::kFloat64);
    if (frozen) {
      for (auto& p : linear->parameters()) p.set_requires_grad(false);
    }
  }
  MakeExtraOutput start;
  Linear linear{4, 4};
  AddExtraInput end;
};

TEST(Channels, ResidualInsideOneFuser) {
  for (bool to_caller : {false, true}) {
    Residual r(to_caller);
    OperationFuser fuser({r.start.ptr(), r.linear.ptr(), r.end.ptr()});
    Tensor x = torch::randn({3, 4}, on_device(torch::kFloat64)).requires_grad_();
    auto out = fuser(x);
    ASSERT_EQ(out.size(), to_caller ? 2 : 1);
    Tensor w = r.linear->own_parameters()["weight"], b = r.linear->own_parameters()["bias"];
    Tensor reference = x + torch::linear(x, w, b);
    Tensor loss = out[0].square().sum();
    Tensor expected_loss = reference.square().sum();
    if (to_caller) {
      loss = loss + out[1].sum();
      expected_loss = expected_loss + x.sum();
    }
    auto actual = torch::autograd::grad({loss}, {x, w});
    auto expected = torch::autograd::grad({expected_loss}, {x, w});
    expect_close(out[0].detach(), reference.detach(), "y");
    expect_close(actual[0], expected[0], "dx");
    expect_close(actual[1], expected[1], "dw");
  }
}

TEST(Channels, FanOutSumsGradients) {
  MakeExtraOutput start;
  AddExtraInput first, second;
  start->set_extra_output_channel(0, "x", false);
  first->set_extra_input_channel(0, "x");
  second->set_extra_input_channel(0, "x");
  OperationFuser fuser({start.ptr(), SiLU().ptr(), first.ptr(), SiLU().ptr(), second.ptr()});
  Tensor x = torch::randn({5}, on_device(torch::kFloat64)).requires_grad_();
  Tensor y = fuser(x)[0];
  Tensor reference = torch::silu(torch::silu(x) + x) + x;
  expect_close(y.detach(), reference.detach(), "y");
  expect_close(torch::autograd::grad({y.sum()}, {x})[0],
               torch::autograd::grad({reference.sum()}, {x})[0], "dx");
}

TEST(Channels, ErrorsNameTheOperations) {
  {
    AddExtraInput end;
    end->set_extra_input_channel(0, "lost");
    EXPECT_NE(error_of([&] {
                OperationFuser({SiLU().ptr(), end.ptr()});
              }).find("channel 'lost', which AddExtraInput (operation 1) takes, has no producer"),
              std::string::npos);
  }
  {
    Residual r(false);
    EXPECT_NE(error_of([&] {
                OperationFuser({r.end.ptr(), r.start.ptr()});
              }).find("has no earlier producer: MakeExtraOutput (operation 1) comes later"),
              std::string::npos);
  }
  {
    MakeExtraOutput a, b;
    a->set_extra_output_channel(0, "x");
    b->set_extra_output_channel(0, "x");
    EXPECT_NE(error_of([&] { OperationFuser({a.ptr(), b.ptr()}); })
                  .find("multiple producers: MakeExtraOutput (operation 0) and MakeExtraOutput "
                        "(operation 1)"),
              std::string::npos);
  }
  {
    MakeExtraOutput a;
    OperationFuser fuser({a.ptr()});
    EXPECT_NE(error_of([&] { a->set_extra_output_channel(0, "late"); }).find("fixed"),
              std::string::npos);
    EXPECT_NE(error_of([&] { a->set_extra_output_channel(3, "x"); }).find("none with index 3"),
              std::string::npos);
  }
  {
    MakeExtraOutput start;
    AddExtraInput end(AddExtraInputOptions(true));
    start->set_extra_output_channel(0, "x", false);
    end->set_extra_input_channel(0, "x");
    EXPECT_NE(error_of([&] { OperationFuser({start.ptr(), end.ptr()}); }).find("works in place"),
              std::string::npos);
  }
}

TEST(Errors, ComeBeforeAnyKernel) {
  Tensor buffer = torch::zeros({2, 4}, on_device());
  AddExtraInput add(AddExtraInputOptions(true));
  OperationFuser fuser({add.ptr(), Linear(5, 3).ptr()});
  const std::string message = error_of([&] { fuser(torch::ones({2, 4}, on_device()), {buffer}); });
  EXPECT_NE(message.find("[Linear] input's last dimension must be in_features=5, got [2, 4]"),
            std::string::npos)
      << message;
  EXPECT_EQ(buffer.abs().sum().item<float>(), 0.0F);
}

}  // namespace
}  // namespace ligature
