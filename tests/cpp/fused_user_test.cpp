// Fused operations of users: channels whose two ends they cover, contexts filled as te.ops fills
// them, gradients left out, and the list of operations that registered fusions see.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

namespace {

using at::Tensor;
using namespace ligature;
using Names = std::vector<std::string>;

template <class F>
std::string error_of(F&& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

Tensor leaf(at::IntArrayRef sizes) {
  return torch::randn(sizes, on_device(torch::kFloat64)).requires_grad_();
}

Names names(const OpList& ops) {
  Names out;
  for (const auto& op : ops) out.push_back(op->name());
  return out;
}

FuserForwardResult forward_result(Tensor output, size_t count) {
  FuserForwardResult result;
  result.output = std::move(output);
  result.extra_outputs.resize(count);
  result.to_save.resize(count);
  return result;
}

// ---- both ends of a channel

/// (1 + s) x: a fork, a scale and the addition of the fork's extra output.
class Residual : public FusedOperation {
 public:
  explicit Residual(const OpList& ops) : FusedOperation("Residual", ops) {}

  FuserForwardResult fuser_forward(CtxList, const Value& input, ArgsList args) override {
    EXPECT_FALSE(args[2].extra_inputs[0].defined());
    FuserForwardResult result = forward_result((1 + scale()) * input.tensor(), 3);
    if (returns_output) result.extra_outputs[0] = {input.tensor() * 1};
    return result;
  }
  FuserBackwardResult fuser_backward(CtxList, const Value& dy, GradList grads) override {
    FuserBackwardResult result;
    Tensor dx = (1 + scale()) * dy.tensor();
    if (grads[0][0].defined()) dx = dx + grads[0][0];
    result.grad_input = dx;
    result.grad_params.resize(3);
    result.grad_extra_inputs = {{}, {}, {100 * dy.tensor()}};
    return result;
  }

  static inline bool returns_output = false;

 private:
  double scale() const { return basic_op<ConstantScaleImpl>(1).options.scale; }
};

FusionRule residual_rule() {
  FusionRule rule;
  rule.name = "Residual";
  rule.pattern = {of<MakeExtraOutputImpl>("MakeExtraOutput"),
                  of<ConstantScaleImpl>("ConstantScale"), of<AddExtraInputImpl>("AddExtraInput")};
  rule.make = [](const Match& match) { return std::make_shared<Residual>(match.ops); };
  return rule;
}

struct Branch {
  explicit Branch(bool to_caller) {
    fork->set_extra_output_channel(0, "r", to_caller);
    join->set_extra_input_channel(0, "r");
  }
  OpList ops(OpList rest = {}) const {
    OpList all{fork.ptr(), ConstantScale(3.0).ptr(), join.ptr()};
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
  }
  MakeExtraOutput fork;
  AddExtraInput join;
};

TEST(UserFusion, CoversBothEndsOfAChannel) {
  for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    for (bool returns_output : {false, true}) {
      Residual::returns_output = returns_output;
      ScopedFusion scoped(register_fusion(pass, residual_rule()));
      OperationFuser fuser(Branch(false).ops());
      const Tensor x = leaf({3, 4});
      const Tensor y = fuser(x)[0];
      expect_close(y.detach(), 4 * x.detach(), "y");
      expect_close(torch::autograd::grad({y.sum()}, {x})[0], torch::full_like(x, 4), "dx");
      EXPECT_EQ(fuser.plan()->forward.size(), pass == Pass::Backward ? 3 : 1);
      EXPECT_EQ(fuser.plan()->backward.size(), pass == Pass::Forward ? 3 : 1);
    }
  }
}

TEST(UserFusion, OmittedOutputsThatOthersNeedAreNamed) {
  Residual::returns_output = false;
  for (Pass pass : {Pass::Joint, Pass::Forward}) {
    ScopedFusion scoped(register_fusion(pass, residual_rule()));
    const Tensor x = leaf({3, 4});
    OperationFuser to_caller(Branch(true).ops());
    EXPECT_NE(error_of([&] { to_caller(x); })
                  .find("[Residual] returned None as extra output 0 of MakeExtraOutput (operation "
                        "0), which is public"),
              std::string::npos);
    AddExtraInput other;
    other->set_extra_input_channel(0, "r");
    OperationFuser outside(Branch(false).ops({SiLU().ptr(), other.ptr()}));
    EXPECT_NE(error_of([&] {
                outside(x);
              }).find("which is consumed outside its fusion, by AddExtraInput (operation 4)"),
              std::string::npos);
  }
  Residual::returns_output = true;
  ScopedFusion scoped(register_forward_backward_fusion(residual_rule()));
  AddExtraInput other;
  other->set_extra_input_channel(0, "r");
  OperationFuser fuser(Branch(true).ops({SiLU().ptr(), other.ptr()}));
  const Tensor x = leaf({3, 4});
  const auto out = fuser(x);
  const Tensor loss = out[0].sum() + 5 * out[1].sum();
  const Tensor reference = (torch::silu(4 * x) + 6 * x).sum();
  expect_close(torch::autograd::grad({loss}, {x})[0], torch::autograd::grad({reference}, {x})[0],
               "dx");
}

TEST(UserFusion, MayDeclineAChannel) {
  class Declines : public Residual {
   public:
    using Residual::Residual;
    bool handles_internal_channels() const override { return false; }
  };
  FusionRule rule = residual_rule();
  rule.make = [](const Match& match) { return std::make_shared<Declines>(match.ops); };
  ScopedFusion scoped(register_forward_backward_fusion(rule));
  OperationFuser fuser(Branch(false).ops());
  expect_close(fuser(torch::ones({2}, on_device()))[0], torch::full({2}, 4.0, on_device()), "y");
  EXPECT_EQ(fuser.plan()->forward.size(), 3);
}

// ---- contexts as te.ops fills them

/// LayerNorm, linear and SiLU, forward only.
class NormLinearSiLU : public FusedOperation {
 public:
  explicit NormLinearSiLU(const OpList& ops) : FusedOperation("NormLinearSiLU", ops) {}

  FuserForwardResult fuser_forward(CtxList ctxs, const Value& input, ArgsList args) override {
    const Tensor rows = input.tensor().reshape({-1, input.sizes().back()});
    const Tensor mean = rows.mean({1});
    const Tensor rstd = (rows.var({1}, false) + 1e-5).rsqrt();
    const Tensor normed =
        (rows - mean.unsqueeze(1)) * rstd.unsqueeze(1) * args[0].params[0] + args[0].params[1];
    const Tensor x = normed.view(input.sizes());
    const Tensor z = torch::matmul(x, args[1].params[0].t());
    if (complete) ctxs[0]->save_for_backward({rows, mean, rstd});
    ctxs[1]->save_for_backward({x, args[1].params[0]});
    ctxs[1]->state.set("with_quantized_compute", false);
    ctxs[2]->save_for_backward({z});
    ctxs[2]->state.set("dtype", z.scalar_type());
    return forward_result(torch::silu(z), 3);
  }

  static inline bool complete = true;
};

FusionRule norm_linear_silu_rule() {
  FusionRule rule;
  rule.name = "NormLinearSiLU";
  rule.pattern = {of<LayerNormImpl>("LayerNorm"), of<BasicLinearImpl>("BasicLinear"),
                  of<SiLUImpl>("SiLU")};
  rule.make = [](const Match& match) { return std::make_shared<NormLinearSiLU>(match.ops); };
  return rule;
}

TEST(UserFusion, ContextsOfTeOpsAreUnderstood) {
  ScopedFusion scoped(register_forward_fusion(norm_linear_silu_rule()));
  LayerNorm norm(LayerNormOptions(8));
  BasicLinear linear(8, 6);
  for (const std::shared_ptr<FusibleOperation>& op : OpList{norm.ptr(), linear.ptr()}) {
    op->to(torch::kFloat64);
  }
  const Tensor x = leaf({2, 3, 8});
  const std::vector<Tensor> leaves{x, norm->own_parameters()["weight"],
                                   norm->own_parameters()["bias"], linear->weight()};
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 1; i < leaves.size(); ++i) leaves[i].normal_();
  }
  const Tensor reference =
      torch::silu(torch::matmul(torch::layer_norm(x, {8}, leaves[1], leaves[2]), leaves[3].t()));
  const Tensor dy = torch::randn_like(reference);
  const auto expected = torch::autograd::grad({reference}, leaves, {dy});

  OperationFuser fuser({norm.ptr(), linear.ptr(), SiLU().ptr()});
  NormLinearSiLU::complete = true;
  const Tensor y = fuser(x)[0];
  ASSERT_EQ(fuser.plan()->forward.size(), 1);
  const auto actual = torch::autograd::grad({y}, leaves, {dy});
  expect_close(y.detach(), reference.detach(), "y");
  for (size_t i = 0; i < leaves.size(); ++i) {
    expect_close(actual[i], expected[i], "gradient " + std::to_string(i));
  }

  NormLinearSiLU::complete = false;
  const Tensor z = fuser(x)[0];
  EXPECT_NE(error_of([&] { torch::autograd::grad({z}, leaves, {dy}); })
                .find("[LayerNorm] its backward cannot use the context that NormLinearSiLU filled: "
                      "save_for_backward(input, mean, rstd) is expected, got 0 tensors"),
            std::string::npos);
}

// ---- gradients left out

struct NoOptions {
  template <class F>
  void fields(F&&) {}
};

class Cut : public Operation<Cut> {
 public:
  using Options = NoOptions;
  explicit Cut(Options given = {}) : Operation("Cut"), options(given) {}
  Value op_forward(OperationContext&, const Value& input, const OpArgs&) override {
    return input.tensor().sin();
  }
  OpBackwardResult op_backward(OperationContext&, const Value&) override { return {}; }
  Options options;
};

TEST(UserOperation, NoGradientOfItsInputIsNone) {
  Linear before(4, 4), after(4, 4);
  for (const OpPtr& op : OpList{before.ptr(), after.ptr()}) op->to(torch::kFloat64);
  MakeExtraOutput fork;
  fork->set_extra_output_channel(0, "r", true);
  OperationFuser fuser(
      {SiLU().ptr(), fork.ptr(), before.ptr(), std::make_shared<Cut>(), after.ptr()});
  const Tensor x = leaf({3, 4});
  auto out = fuser(x);
  const Tensor w = before->own_parameters()["weight"], v = after->own_parameters()["weight"];
  auto grads = torch::autograd::grad({out[0].sum()}, {x, w, v}, {}, false, false, true);
  EXPECT_FALSE(grads[0].defined());
  EXPECT_FALSE(grads[1].defined());
  EXPECT_TRUE(grads[2].defined());
  out = fuser(x);
  const Tensor loss = out[0].sum() + 3 * out[1].sum();
  grads = torch::autograd::grad({loss}, {x, w}, {}, false, false, true);
  const Tensor reference = 3 * torch::silu(x).sum();
  expect_close(grads[0], torch::autograd::grad({reference}, {x})[0], "dx");
}

// ---- what registered fusions see

Names seen(Pass pass, const OpList& ops, const std::vector<Tensor>& extras = {}) {
  Names found;
  ScopedFusion scoped(
      register_fusion(pass, FusionFunction{"look", [&](const OpList& given, const PlanOptions&) {
                                             found = names(given);
                                             return given;
                                           }}));
  OperationFuser fuser(ops);
  fuser(torch::randn({3, 4}, on_device()).requires_grad_(), extras);
  return found;
}

TEST(Registry, UsersSeeTheOperationsAsTeOpsShowsThem) {
  const Tensor extra = torch::randn({3, 4}, on_device());
  const auto add = [](bool in_place) {
    return AddExtraInput(AddExtraInputOptions(in_place)).ptr();
  };
  const auto fork = [](bool in_place) {
    return MakeExtraOutput(MakeExtraOutputOptions(in_place)).ptr();
  };
  EXPECT_EQ(seen(Pass::Forward, {Linear(4, 4).ptr(), SiLU().ptr()}),
            (Names{"BasicLinear", "Bias", "SiLU"}));
  EXPECT_EQ(seen(Pass::Forward, {Linear(4, 4).ptr()}), (Names{"BasicLinear", "Bias"}));
  EXPECT_EQ(seen(Pass::Forward, {Linear(4, 4).ptr(), add(true)}, {extra.clone()}),
            (Names{"ForwardLinearBiasAdd"}));
  EXPECT_EQ(seen(Pass::Forward, {Linear(4, 4).ptr(), add(false)}, {extra}),
            (Names{"BasicLinear", "Bias", "AddExtraInput"}));
  EXPECT_EQ(seen(Pass::Backward, {Linear(4, 4).ptr(), GELU().ptr()}),
            (Names{"BasicLinear", "Bias", "GELU"}));
  EXPECT_EQ(seen(Pass::Backward, {fork(true), BasicLinear(4, 4).ptr()}),
            (Names{"BackwardLinearAdd"}));
  EXPECT_EQ(seen(Pass::Backward, {fork(false), BasicLinear(4, 4).ptr()}),
            (Names{"MakeExtraOutput", "BasicLinear"}));
  EXPECT_EQ(seen(Pass::Backward, {fork(false), RMSNorm(RMSNormOptions(4)).ptr()}),
            (Names{"BackwardAddRMSNorm"}));
}

TEST(Registry, EveryFusionIsListedOnce) {
  for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    Names before;
    for (const auto& fusion : registered_fusions(pass)) before.push_back(fusion_name(*fusion));
    EXPECT_EQ(std::set<std::string>(before.begin(), before.end()).size(), before.size());
    const auto function = [](std::string name) {
      return FusionFunction{std::move(name),
                            [](const OpList& ops, const PlanOptions&) { return ops; }};
    };
    ScopedFusion appended(register_fusion(pass, function("appended")));
    ScopedFusion prepended(register_fusion(pass, function("prepended"), true));
    size_t of_te_ops = 0;
    for (const auto& turn : fusion_turns(pass)) of_te_ops += turn.only_in_te_ops;
    const FusionList all = registered_fusions(pass);
    ASSERT_EQ(all.size(), before.size() + 2);
    EXPECT_EQ(fusion_name(*all[0]), "prepended");
    EXPECT_EQ(fusion_name(*all[1 + of_te_ops]), "appended");
  }
}

// ---- bindings of channels

TEST(Channels, BindingsAndTheirErrors) {
  MakeExtraOutput fork;
  AddExtraInput join;
  EXPECT_THROW(fork->set_extra_output_channel(1, "r"), c10::IndexError);
  EXPECT_THROW(fork->set_extra_output_channel(-1, "r"), c10::IndexError);
  EXPECT_THROW(join->set_extra_input_channel(-1, "r"), c10::IndexError);
  EXPECT_NE(error_of([&] {
              join->set_extra_input_channel(-1, "r");
            }).find("[AddExtraInput] has 1 extra inputs, so there is none with index -1"),
            std::string::npos);
  EXPECT_THROW(join->set_extra_input_channel(0, ""), c10::ValueError);
  EXPECT_NE(error_of([&] { join->set_extra_input_channel(0, ""); }).find("non-empty string"),
            std::string::npos);
  fork->set_extra_output_channel(0, "r", false);
  join->set_extra_input_channel(0, "r");
  fork->set_extra_output_channel(0, std::nullopt);
  join->set_extra_input_channel(0, std::nullopt);
  OperationFuser fuser({fork.ptr(), join.ptr()});
  EXPECT_EQ(fuser.num_extra_inputs(), 1);
  EXPECT_EQ(fuser.num_extra_outputs(), 1);
}

TEST(Channels, NobodyNeedTakeOne) {
  MakeExtraOutput fork;
  fork->set_extra_output_channel(0, "unused", false);
  OperationFuser fuser({SiLU().ptr(), fork.ptr(), ConstantScale(2.0).ptr()});
  const Tensor x = leaf({3, 4});
  const auto out = fuser(x);
  ASSERT_EQ(out.size(), 1);
  const Tensor reference = 2 * torch::silu(x);
  expect_close(out[0].detach(), reference.detach(), "y");
  expect_close(torch::autograd::grad({out[0].sum()}, {x})[0],
               torch::autograd::grad({reference.sum()}, {x})[0], "dx");
}

// ---- an addition in place

TEST(AddExtraInputInPlace, TakesALeafThatNeedsAGradient) {
  for (bool view : {false, true}) {
    Linear linear(4, 4);
    linear->to(torch::kFloat64);
    OperationFuser fuser({linear.ptr(), AddExtraInput(AddExtraInputOptions(true)).ptr()});
    const Tensor x = leaf({3, 4}), base = leaf({6, 4});
    const Tensor extra = view ? base.slice(0, 0, 6, 2) : base.detach().slice(0, 0, 3).clone();
    if (!view) extra.requires_grad_();
    const Tensor& wanted_leaf = view ? base : extra;
    const Tensor before = extra.detach().clone();
    const Tensor y = fuser(x, {extra})[0];
    EXPECT_TRUE(wanted_leaf.is_leaf());
    const Tensor sum = before + torch::linear(x, linear->own_parameters()["weight"],
                                              linear->own_parameters()["bias"]);
    expect_close(extra.detach().contiguous(), sum.detach(), "what was written");
    expect_close(y.detach().contiguous(), sum.detach(), "y");
    const auto grads = torch::autograd::grad({y.square().sum()}, {x, wanted_leaf});
    expect_close(grads[0], torch::autograd::grad({sum.square().sum()}, {x})[0], "dx");
    const Tensor dextra = 2 * sum.detach();
    Tensor wanted = dextra;
    if (view) {
      wanted = torch::zeros_like(base);
      wanted.slice(0, 0, 6, 2).copy_(dextra);
    }
    expect_close(grads[1], wanted, "gradient of the leaf");
  }
}

}  // namespace
