// The fuser's core: plans, registration, gradients through one node, custom operations in C++.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

// Of a user's own: in no namespace of the library's.
namespace user {

using namespace ligature;

/// y = 2 x
class Doubled : public FusedOperation {
 public:
  explicit Doubled(const OpList& ops) : FusedOperation("Doubled", ops) {}
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList) override {
    FuserForwardResult out;
    out.output = 2 * input.tensor();
    out.extra_outputs.resize(1);
    out.to_save.resize(1);
    return out;
  }
  void fuser_forward_save_ctx(CtxList, const Value&, FuserForwardResult&, ArgsList) override {}
  FuserBackwardResult fuser_backward(CtxList, const Value& grad, GradList) override {
    FuserBackwardResult out;
    out.grad_input = 2 * grad.tensor();
    out.grad_params.resize(1);
    out.grad_extra_inputs.resize(1);
    return out;
  }
};

}  // namespace user

namespace ligature {
namespace {

std::vector<std::string> names(const std::vector<PlanStep>& steps) {
  std::vector<std::string> out;
  for (const auto& step : steps) out.push_back(step.op->name());
  return out;
}

using Names = std::vector<std::string>;

Tensor torch_mlp(const Tensor& x, const std::vector<Tensor>& p) {
  Tensor h = torch::linear(torch::layer_norm(x, {x.size(-1)}, p[0], p[1], 1e-5), p[2], p[3]);
  auto halves = h.chunk(2, -1);
  return torch::linear(torch::silu(halves[0]) * halves[1], p[4], p[5]);
}

struct Mlp {
  Mlp() {
    torch::manual_seed(1);
    norm = LayerNorm(LayerNormOptions(8));
    fc1 = Linear(8, 24);
    act = SwiGLU();
    fc2 = Linear(12, 8);
    for (auto& module : modules()) module->to(torch::kFloat64);
  }
  OpList ops() const { return {norm.ptr(), fc1.ptr(), act.ptr(), fc2.ptr()}; }
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const {
    return {norm.ptr(), fc1.ptr(), act.ptr(), fc2.ptr()};
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> out;
    for (const auto& module : modules()) {
      for (const auto& p : module->parameters()) out.push_back(p);
    }
    return out;
  }
  LayerNorm norm{nullptr};
  Linear fc1{nullptr};
  SwiGLU act{nullptr};
  Linear fc2{nullptr};
};

TEST(Fuser, MatchesTorchForwardAndBackward) {
  Mlp mlp;
  OperationFuser fuser(mlp.ops());
  Tensor x = torch::randn({3, 5, 8}, on_device(torch::kFloat64)).requires_grad_();
  Tensor y = fuser(x)[0];
  Tensor reference = torch_mlp(x, mlp.parameters());
  expect_close(y, reference, "y");
  Tensor dy = torch::randn_like(y);
  auto inputs = mlp.parameters();
  inputs.push_back(x);
  auto expected = torch::autograd::grad({reference}, inputs, {dy});
  auto actual = torch::autograd::grad({y}, inputs, {dy});
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_close(actual[i], expected[i], "gradient " + std::to_string(i));
  }
}

TEST(Fuser, PlanGroupsDifferentlyInForwardAndBackward) {
  Mlp mlp;
  OperationFuser fuser(mlp.ops());
  EXPECT_EQ(fuser.plan(), nullptr);
  fuser(torch::randn({2, 8}, on_device(torch::kFloat64)).requires_grad_());
  EXPECT_EQ(names(fuser.plan()->forward),
            (Names{"LayerNorm", "ForwardLinearBiasActivation", "ForwardLinearBiasActivation"}));
  EXPECT_EQ(names(fuser.plan()->backward),
            (Names{"LayerNorm", "BasicLinear", "BackwardActivationBias", "BasicLinear", "Bias"}));
}

TEST(Fuser, PlansAreCachedPerSituation) {
  Mlp mlp;
  OperationFuser fuser(mlp.ops());
  Tensor x = torch::randn({2, 8}, on_device(torch::kFloat64));
  fuser(x);
  auto first = fuser.plan();
  {
    torch::NoGradGuard no_grad;
    fuser(x);
  }
  EXPECT_NE(fuser.plan(), first);
  fuser(x);
  EXPECT_EQ(fuser.plan(), first);
}

TEST(Registry, FunctionsRunOncePerPlanAndHandlesUnregister) {
  Mlp mlp;
  OperationFuser fuser(mlp.ops());
  Tensor x = torch::randn({2, 8}, on_device(torch::kFloat64));
  int calls = 0;
  ScopedFusion scoped(
      register_forward_fusion(FusionFunction{"count", [&](const OpList& ops, const PlanOptions&) {
                                               ++calls;
                                               return ops;
                                             }}));
  fuser(x);
  fuser(x);
  EXPECT_EQ(calls, 1);
  FusionHandle& handle = *scoped;
  EXPECT_TRUE(handle.registered());
  handle.unregister();
  handle.unregister();
  EXPECT_FALSE(handle.registered());
  fuser(x);
  EXPECT_EQ(calls, 1);
}

TEST(Registry, AResultThatIsNotTheSameOperationsNamesBothLists) {
  Mlp mlp;
  OperationFuser fuser(mlp.ops());
  ScopedFusion scoped(
      register_backward_fusion(FusionFunction{"drop", [](const OpList& ops, const PlanOptions&) {
                                                return OpList(ops.begin(), ops.end() - 1);
                                              }}));
  try {
    fuser(torch::randn({2, 8}, on_device(torch::kFloat64)));
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("[LayerNorm, BasicLinear, Bias, SwiGLU, BasicLinear, Bias]"),
              std::string::npos);
    EXPECT_NE(message.find("[LayerNorm, BasicLinear, Bias, SwiGLU, BasicLinear]"),
              std::string::npos);
  }
  (*scoped).unregister();
  EXPECT_NO_THROW(fuser(torch::randn({2, 8}, on_device(torch::kFloat64))));
}

TEST(Registry, ConsiderationsSayWhyNot) {
  OperationFuser fuser({BasicLinear(4, 4).ptr(), Dropout(0.1).ptr(), AddExtraInput().ptr()});
  fuser(torch::randn({2, 4}, on_device()), {torch::randn({2, 4}, on_device())});
  bool found = false;
  for (const auto& report : fuser.plan()->reports) {
    for (const auto& c : report.considered) {
      if (c.fusion != "ForwardLinearBiasAdd") continue;
      found = true;
      EXPECT_NE(c.reason.find("found Dropout"), std::string::npos) << c.reason;
    }
  }
  EXPECT_TRUE(found);
}

// ---- operations of a user's own

struct NoOptions {
  template <class F>
  void fields(F&&) {}
};

class SquareImpl : public Operation<SquareImpl> {  // split form
 public:
  using Options = NoOptions;
  explicit SquareImpl(Options given = {}) : Operation("Square"), options(given) {}
  OpForwardResult op_forward_compute(const Value& input, const OpArgs&) override {
    OpForwardResult result{input.tensor() * input.tensor(), {}};
    result.to_save.state.set("factor", 2.0);
    return result;
  }
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave&,
                           const OpArgs&) override {
    ctx.save_for_backward({input});
  }
  OpBackwardResult op_backward(OperationContext& ctx, const Value& dy) override {
    return {dy.tensor() * ctx.state.get<double>("factor") * ctx.saved_tensor(0), {}};
  }
  Options options;
};

class LearnableScaleImpl : public Operation<LearnableScaleImpl> {  // classic form
 public:
  using Options = NoOptions;
  explicit LearnableScaleImpl(Options given = {}) : Operation("LearnableScale"), options(given) {
    register_parameter("scale", torch::tensor(3.0, on_device(torch::kFloat64)));
  }
  Value op_forward(OperationContext& ctx, const Value& input, const OpArgs& args) override {
    ctx.save_for_backward({input, args.params[0]});
    return input.tensor() * args.params[0];
  }
  OpBackwardResult op_backward(OperationContext& ctx, const Value& dy) override {
    return {dy.tensor() * ctx.saved_tensor(1), {(dy.tensor() * ctx.saved_tensor(0)).sum()}};
  }
  Options options;
};

TEST(CustomOperation, BothFormsBesideBuiltIns) {
  auto scale = std::make_shared<LearnableScaleImpl>();
  auto square = std::make_shared<SquareImpl>();
  SiLU silu;
  OperationFuser fuser({scale, square, silu.ptr()});
  Tensor x = torch::randn({3, 4}, on_device(torch::kFloat64)).requires_grad_();
  Tensor s = scale->parameters()[0];
  Tensor y = fuser(x)[0];
  Tensor reference = torch::silu((x * s) * (x * s));
  expect_close(y, reference, "y");
  auto expected = torch::autograd::grad({reference.sum()}, {x, s});
  auto actual = torch::autograd::grad({y.sum()}, {x, s});
  expect_close(actual[0], expected[0], "dx");
  expect_close(actual[1], expected[1], "ds");
}

TEST(CustomOperation, BadContextIsAnError) {
  class Forgetful : public Operation<Forgetful> {
   public:
    using Options = NoOptions;
    explicit Forgetful(Options given = {}) : Operation("Forgetful"), options(given) {}
    Value op_forward(OperationContext&, const Value& input, const OpArgs&) override {
      return input.tensor() + 1;
    }
    OpBackwardResult op_backward(OperationContext& ctx, const Value&) override {
      return {ctx.saved_tensor(0), {}};
    }
    Options options;
  };
  OperationFuser fuser({std::make_shared<Forgetful>()});
  Tensor y = fuser(torch::ones({2}, on_device()).requires_grad_())[0];
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

// A joint rule as data: fuses a scale and a square, saves only the input.
class ScaledSquare : public FusedOperation {
 public:
  explicit ScaledSquare(const OpList& ops) : FusedOperation("ScaledSquare", ops) {}
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override {
    FuserForwardResult result;
    Tensor z = input.tensor() * args[0].params[0];
    result.output = z * z;
    result.extra_outputs.resize(2);
    result.to_save.resize(2);
    return result;
  }
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult&,
                              ArgsList args) override {
    ctxs[0]->save_for_backward({input, args[0].params[0]});
  }
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& dy, GradList) override {
    const Tensor& x = ctxs[0]->saved_tensor(0);
    const Tensor& s = ctxs[0]->saved_tensor(1);
    FuserBackwardResult result;
    Tensor dz = dy.tensor() * 2 * x * s;
    result.grad_input = dz * s;
    result.grad_params = {{(dz * x).sum()}, {}};
    result.grad_extra_inputs.resize(2);
    return result;
  }
};

TEST(Registry, JointRuleServesBothDirectionsWithOneInstance) {
  auto scale = std::make_shared<LearnableScaleImpl>();
  auto square = std::make_shared<SquareImpl>();
  OperationFuser fuser({scale, square});
  FusionRule rule;
  rule.name = "ScaledSquare";
  rule.pattern = {of<LearnableScaleImpl>("LearnableScale"), of<SquareImpl>("Square")};
  rule.make = [](const Match& match) { return std::make_shared<ScaledSquare>(match.ops); };
  ScopedFusion scoped(register_forward_backward_fusion(rule));
  Tensor x = torch::randn({3, 4}, on_device(torch::kFloat64)).requires_grad_();
  Tensor s = scale->parameters()[0];
  Tensor y = fuser(x)[0];
  ASSERT_EQ(names(fuser.plan()->forward), Names{"ScaledSquare"});
  EXPECT_EQ(fuser.plan()->forward[0].op, fuser.plan()->backward[0].op);
  Tensor reference = (x * s) * (x * s);
  auto expected = torch::autograd::grad({reference.sum()}, {x, s});
  auto actual = torch::autograd::grad({y.sum()}, {x, s});
  expect_close(actual[0], expected[0], "dx");
  expect_close(actual[1], expected[1], "ds");
  (*scoped).unregister();
  fuser(x);
  EXPECT_EQ(names(fuser.plan()->forward), (Names{"LearnableScale", "Square"}));
}

TEST(Fuser, KeepsThePlansUsedLast) {
  Linear linear(8, 8);
  OperationFuser fuser({linear.ptr()});
  // 24 situations: more would be more recipes than an operation remembers.
  const auto call = [&](int64_t i) {
    const at::AutoGradMode gradients(i / 6 % 2 == 0);
    const Autocast autocast(
        {.recipe = std::make_shared<DelayedScaling>(DelayedScalingOptions{.margin = i % 6})});
    fuser(torch::randn({2, 8}, on_device(i / 12 == 0 ? at::kFloat : at::kBFloat16)));
    return fuser.plan();
  };
  const std::weak_ptr<const Plan> first = call(0), second = call(1);
  for (int64_t i = 2; i < 16; ++i) call(i);
  EXPECT_FALSE(second.expired());
  EXPECT_EQ(call(0), first.lock());  // used again: the other is the oldest
  call(16);
  EXPECT_FALSE(first.expired());
  EXPECT_TRUE(second.expired());
  for (int64_t i = 17; i < 200; ++i) call(i % 24);
  EXPECT_LE(fuser.plans().size(), 18u);
  EXPECT_GT(fuser.dropped_plans(), 100u);
}

TEST(Fuser, AFunctionOfARecipeMakesNoOtherPlan) {
  Linear linear(8, 8);
  OperationFuser fuser({linear.ptr()});
  std::shared_ptr<const Plan> plan;
  for (int i = 0; i < 5; ++i) {
    DelayedScalingOptions options;
    options.amax_function = [](const Tensor& history) { return history.max(); };
    options.functions_key = std::to_string(i);
    const Autocast autocast({.recipe = std::make_shared<DelayedScaling>(options)});
    fuser(torch::randn({2, 8}, on_device()));
    if (plan == nullptr) plan = fuser.plan();
    EXPECT_EQ(fuser.plan(), plan);
  }
}

TEST(Registry, FusedOperationsGoWithTheirFusion) {
  OperationFuser fuser({ConstantScale(2.0).ptr()}), idle({ConstantScale(2.0).ptr()});
  std::vector<std::weak_ptr<FusibleOperation>> made;
  const auto alive = [&] {
    return std::count_if(made.begin(), made.end(), [](const auto& op) { return !op.expired(); });
  };
  const Tensor x = torch::randn({3}, on_device()).requires_grad_();
  for (int i = 0; i < 3; ++i) {
    Tensor kept;
    {
      const ScopedFusion scoped(register_forward_backward_fusion(
          FusionFunction{"double", [&](const OpList& ops, const PlanOptions&) -> OpList {
                           auto op = std::make_shared<user::Doubled>(ops);
                           made.push_back(op);
                           return {op};
                         }}));
      fuser(x);
      fuser(x.detach());
      kept = idle(x)[0];
      EXPECT_EQ(names(fuser.plan()->forward), Names{"Doubled"});
      EXPECT_GE(alive(), 2);
    }
    EXPECT_EQ(names(fuser.plan()->forward), Names{"Doubled"});  // that was the last call
    EXPECT_NE(fuser.explain().text().find("Doubled"), std::string::npos);
    EXPECT_EQ(alive(), 1);  // a graph's
    kept.sum().backward();
    kept = Tensor();
    EXPECT_EQ(alive(), 0);
  }
}

/// Calls back when it runs, as Python's garbage collector may.
class Calling : public user::Doubled {
 public:
  Calling(const OpList& ops, const std::function<void()>& call) : Doubled(ops), call_(call) {}
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override {
    call_();
    return Doubled::fuser_forward_compute(input, args);
  }

 private:
  const std::function<void()>& call_;
};

// When a fusion goes, fusers trace their last calls. What runs then may end any other fuser.
TEST(Registry, FusersEndWhileTheyLookAtAFusionThatGoes) {
  using Fusers = std::vector<std::shared_ptr<OperationFuser>>;
  for (int round = 0; round < 4; ++round) {
    Fusers fusers;
    std::function<void()> call = [] {};
    int calls = 0;
    {
      ScopedFusion scoped(register_forward_fusion(
          FusionFunction{"double", [&](const OpList& ops, const PlanOptions&) -> OpList {
                           return {std::make_shared<Calling>(ops, call)};
                         }}));
      OperationFuser alone({ConstantScale(2.0).ptr()});  // not shared
      for (int i = 0; i < 3; ++i) {
        fusers.push_back(std::make_shared<OperationFuser>(OpList{ConstantScale(2.0).ptr()}));
        (*fusers.back())(torch::randn({3}, on_device()));
      }
      alone(torch::randn({3}, on_device()));
      call = [&] {
        ++calls;
        fusers.clear();
      };
      (*scoped).unregister();
      call = [] {};
    }
    EXPECT_GE(calls, 1);
    EXPECT_TRUE(fusers.empty());
  }
}

}  // namespace
}  // namespace ligature
