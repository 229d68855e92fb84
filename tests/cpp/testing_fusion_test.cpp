// check_fusion lets a right fusion pass and finds what is wrong with a wrong one.
#include <gtest/gtest.h>

#include <functional>

#include "device.h"
#include "ligature/fused/forward_linear_bias_activation.h"
#include "ligature/ligature.h"
#include "ligature/testing/testing.h"
#include "testing_support.h"

using namespace ligature;
using ligature::testing::check_fusion;
using ligature::testing::CheckOptions;
using ligature::testing::Report;
using Pass = ligature::Pass;

namespace {

using TestingFusion = OneThread;

class Faulty;

/// Ways to spoil an operation that runs its basic operations one by one.
struct Fault {
  std::function<void(Faulty&, CtxList, const Value& input, ArgsList, FuserForwardResult&)> forward;
  std::function<void(Faulty&, CtxList, const Value& dy)> before_backward;
  std::function<void(Faulty&, CtxList, const Value& dy, FuserBackwardResult&)> backward;
};

class Faulty : public FusedOperation {
 public:
  Faulty(const OpList& ops, const Fault& fault) : FusedOperation("Faulty", ops), fault_(fault) {}

  FuserForwardResult fuser_forward(CtxList ctxs, const Value& input, ArgsList args) override {
    FuserForwardResult out;
    Value x = input;
    for (size_t i = 0; i < num_basic_ops(); ++i) {
      auto result = basic_ops()[i]->fuser_forward(ctxs.slice(i, 1), x, args.slice(i, 1));
      x = std::move(result.output);
      out.extra_outputs.push_back(std::move(result.extra_outputs[0]));
    }
    out.output = std::move(x);
    if (fault_.forward) fault_.forward(*this, ctxs, input, args, out);
    return out;
  }

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grads) override {
    if (fault_.before_backward) fault_.before_backward(*this, ctxs, grad_output);
    FuserBackwardResult out;
    out.grad_params.resize(num_basic_ops());
    out.grad_extra_inputs.resize(num_basic_ops());
    Value dy = grad_output;
    for (size_t i = num_basic_ops(); i-- > 0;) {
      if (!ctxs[i]->requires_grad.op) break;
      auto result = basic_ops()[i]->fuser_backward(ctxs.slice(i, 1), dy, grads.slice(i, 1));
      dy = std::move(result.grad_input);
      out.grad_params[i] = std::move(result.grad_params[0]);
      out.grad_extra_inputs[i] = std::move(result.grad_extra_inputs[0]);
    }
    out.grad_input = std::move(dy);
    if (fault_.backward) fault_.backward(*this, ctxs, grad_output, out);
    return out;
  }

  std::vector<Value> stash;  // what it must not have

 private:
  Fault fault_;
};

FusionRule rule(const Fault& fault) {
  return {
      "Faulty",
      {of<BiasImpl>("Bias"), optional(of<GELUImpl>("GELU")),
       optional(of<AddExtraInputImpl>("AddExtraInput"))},
      nullptr,
      [fault](const Match& match) -> OpPtr { return std::make_shared<Faulty>(match.ops, fault); }};
}

Report check(Pass pass, const Fault& fault, CheckOptions options = {}) {
  options.device = on_device().device();
  return check_fusion(rule(fault), pass, bias_gelu, {{{2, 3, 8}}, {{5, 8}}}, options);
}

TEST_F(TestingFusion, LetsRightOnesPass) {
  for (const Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    const Report report = check(pass, {});
    EXPECT_TRUE(report) << report.text();
    EXPECT_GT(report.runs, 40U);
    EXPECT_EQ(report.text(), "all of " + std::to_string(report.runs) + " runs agree");
  }
}

TEST_F(TestingFusion, WrongGradients) {
  Fault of_input;
  of_input.backward = [](Faulty&, CtxList, const Value&, FuserBackwardResult& out) {
    if (out.grad_input.defined()) out.grad_input = out.grad_input.tensor() * 1.1;
  };
  expect_failures(check(Pass::Backward, of_input), "gradient of input is off by");
  Fault of_parameter;
  of_parameter.backward = [](Faulty&, CtxList, const Value&, FuserBackwardResult& out) {
    if (!out.grad_params[0].empty() && out.grad_params[0][0].defined()) {
      out.grad_params[0][0][2] += 0.5;
    }
  };
  for (const Pass pass : {Pass::Joint, Pass::Backward}) {
    const Report report = check(pass, of_parameter);
    expect_failures(report, "gradient of Bias.bias is off by 0.5 (allowed ");
    expect_failures(report,
                    "Faulty, bfloat16 [2, 3, 8], input and Bias.bias need gradients: gradient of "
                    "Bias.bias is off by 0.5 (allowed ");
    EXPECT_NE(report.failures[0].find(") at [2]"), std::string::npos) << report.failures[0];
  }
}

TEST_F(TestingFusion, WrongInOneDtypeOnly) {
  Fault fault;
  fault.backward = [](Faulty&, CtxList, const Value&, FuserBackwardResult& out) {
    if (out.grad_input.defined() && out.grad_input.dtype() == at::kBFloat16) {
      out.grad_input = out.grad_input.tensor() * 1.25;
    }
  };
  const Report report = check(Pass::Backward, fault);
  expect_failures(report, "gradient of input is off by");
  for (const auto& failure : report.failures) {
    EXPECT_NE(failure.find("bfloat16"), std::string::npos) << failure;
  }
}

TEST_F(TestingFusion, ForgottenSavedTensor) {
  Fault forgets;
  forgets.forward = [](Faulty&, CtxList ctxs, const Value&, ArgsList, FuserForwardResult&) {
    ctxs[1]->save_for_backward({});
  };
  expect_failures(check(Pass::Forward, forgets), "context of GELU has 0 saved tensors, wanted 1");
  Fault undefined;
  undefined.forward = [](Faulty&, CtxList ctxs, const Value&, ArgsList args, FuserForwardResult&) {
    if (args[1].requires_grad.op) ctxs[1]->save_for_backward({Value()});
  };
  expect_failures(check(Pass::Forward, undefined), "saved tensor 0 of GELU is missing");
  // A joint one may save what it likes, but must get by with it.
  expect_failures(check(Pass::Joint, forgets),
                  "backward wants saved tensor 0, but forward saved 0");
}

TEST_F(TestingFusion, WrongContexts) {
  Fault value;
  value.forward = [](Faulty&, CtxList ctxs, const Value& x, ArgsList args, FuserForwardResult&) {
    if (args[1].requires_grad.op) ctxs[1]->save_for_backward({x});
  };
  expect_failures(check(Pass::Forward, value), "saved tensor 0 of GELU is off by");
  Fault dtype;
  dtype.forward = [](Faulty&, CtxList ctxs, const Value&, ArgsList, FuserForwardResult&) {
    if (ctxs[1]->num_saved() == 0) return;
    ctxs[1]->save_for_backward({ctxs[1]->saved_tensor(0).to(at::kFloat)});
  };
  expect_failures(check(Pass::Forward, dtype),
                  "saved tensor 0 of GELU has dtype float32, wanted bfloat16");
  Fault state;
  state.forward = [](Faulty&, CtxList ctxs, const Value&, ArgsList args, FuserForwardResult&) {
    if (args[0].requires_grad.op) ctxs[0]->state.set("bias_dtype", at::kHalf);
  };
  expect_failures(check(Pass::Forward, state),
                  "context of Bias has bias_dtype = Half, wanted Double");
  Fault more;
  more.forward = [](Faulty&, CtxList ctxs, const Value& x, ArgsList args, FuserForwardResult&) {
    if (args[0].requires_grad.op) ctxs[0]->save_for_backward({x});
  };
  expect_failures(check(Pass::Forward, more), "context of Bias has 1 saved tensors, wanted 0");
  CheckOptions enough;
  enough.contexts = ligature::testing::ContextMatch::Enough;
  EXPECT_TRUE(check(Pass::Forward, more, enough));
}

TEST_F(TestingFusion, OutputThatSharesMemory) {
  Fault fault;
  fault.forward = [](Faulty&, CtxList, const Value& x, ArgsList, FuserForwardResult& out) {
    out.output = x;
  };
  CheckOptions options;
  options.device = on_device().device();
  options.randomize_parameters = false;  // a bias of zero: the output has the input's values
  const auto bias = [](at::ScalarType dtype, at::Device device) -> OpList {
    return {make_bias(8, dtype, device)};
  };
  const Report report = check_fusion(rule(fault), Pass::Forward, bias, {{{5, 8}}}, options);
  expect_failures(report, "output shares memory with input");
  options.may_alias = true;
  EXPECT_TRUE(check_fusion(rule(fault), Pass::Forward, bias, {{{5, 8}}}, options));
}

TEST_F(TestingFusion, ChangedArguments) {
  Fault input;
  input.forward = [](Faulty&, CtxList, const Value& x, ArgsList, FuserForwardResult&) {
    Tensor(x.tensor()).add_(1);
  };
  expect_failures(check(Pass::Forward, input),
                  "input and Bias.bias need gradients: input was changed");
  Fault parameter;
  parameter.forward = [](Faulty&, CtxList, const Value&, ArgsList args, FuserForwardResult&) {
    Tensor(args[0].params[0]).mul_(2);
  };
  expect_failures(check(Pass::Forward, parameter), "Bias.bias was changed");
  Fault gradient;
  gradient.backward = [](Faulty&, CtxList, const Value& dy, FuserBackwardResult&) {
    if (dy.tensor().is_non_overlapping_and_dense()) Tensor(dy.tensor()).mul_(2);
  };
  expect_failures(check(Pass::Backward, gradient), "the gradient given for the output was changed");
  Fault extra;
  extra.forward = [](Faulty&, CtxList, const Value&, ArgsList args, FuserForwardResult&) {
    Tensor(args.back().extra_inputs[0]).add_(1);
  };
  CheckOptions options;
  options.device = on_device().device();
  const auto make = [](bool in_place) {
    return [in_place](at::ScalarType dtype, at::Device device) -> OpList {
      return {make_bias(8, dtype, device), GELU().ptr(),
              AddExtraInput(AddExtraInputOptions(in_place)).ptr()};
    };
  };
  expect_failures(check_fusion(rule(extra), Pass::Forward, make(false), {{{5, 8}}}, options),
                  "extra input of AddExtraInput was changed");
  for (const bool in_place : {false, true}) {
    const Report right = check_fusion(rule({}), Pass::Forward, make(in_place), {{{5, 8}}}, options);
    EXPECT_TRUE(right) << right.text();
  }
}

TEST_F(TestingFusion, StateOnTheFusedOperation) {
  Fault fault;
  fault.forward = [](Faulty& self, CtxList ctxs, const Value&, ArgsList, FuserForwardResult&) {
    self.stash = ctxs[1]->saved();
    ctxs[1]->save_for_backward({});
  };
  fault.before_backward = [](Faulty& self, CtxList ctxs, const Value&) {
    ctxs[1]->save_for_backward(self.stash);
  };
  expect_failures(check(Pass::Joint, fault), "backward of the first of two forwards");
}

TEST_F(TestingFusion, SpoiledSavedTensor) {
  Fault fault;
  fault.backward = [](Faulty&, CtxList ctxs, const Value&, FuserBackwardResult&) {
    Tensor(ctxs[1]->saved_tensor(0)).add_(1);
  };
  const Report report = check(Pass::Backward, fault);
  expect_failures(report, "backward changed saved tensor 0 of GELU");
}

TEST_F(TestingFusion, ParameterReadInBackward) {
  // Correct as long as nothing happens to the parameter between forward and backward.
  Fault fault;
  fault.forward = [](Faulty& self, CtxList ctxs, const Value& x, ArgsList args,
                     FuserForwardResult&) {
    self.stash = {args[0].params[0]};
    if (args[1].requires_grad.op) ctxs[1]->save_for_backward({x});
  };
  fault.before_backward = [](Faulty& self, CtxList ctxs, const Value&) {
    ctxs[1]->save_for_backward({ctxs[1]->saved_tensor(0) + self.stash[0].tensor()});
  };
  const Report report = check(Pass::Joint, fault);
  expect_failures(report,
                  "Bias.bias edited between forward and backward: gradient of input is off");
}

TEST_F(TestingFusion, GradientsOfAWrongKind) {
  Fault dtype;
  dtype.backward = [](Faulty&, CtxList, const Value&, FuserBackwardResult& out) {
    for (Tensor& grad : out.grad_params[0]) {
      if (grad.defined()) grad = grad.to(at::kFloat);
    }
  };
  expect_failures(check(Pass::Backward, dtype),
                  "gradient of Bias.bias has dtype float32, wanted bfloat16");
  Fault missing;
  missing.backward = [](Faulty&, CtxList ctxs, const Value&, FuserBackwardResult& out) {
    if (!ctxs[0]->requires_grad.input) out.grad_params[0].clear();
  };
  const Report report = check(Pass::Backward, missing);
  expect_failures(report, "Bias.bias needs a gradient: gradient of Bias.bias is missing");
  Fault unneeded;
  unneeded.backward = [](Faulty&, CtxList, const Value&, FuserBackwardResult& out) {
    if (out.grad_params[0].empty() || !out.grad_params[0][0].defined()) {
      out.grad_params[0] = {at::zeros({8}, on_device(out.grad_input.dtype()))};
    }
  };
  expect_failures(check(Pass::Backward, unneeded),
                  "gradient of Bias.bias is given, though none is needed");
  CheckOptions options;
  options.may_give_unneeded = true;
  EXPECT_TRUE(check(Pass::Backward, unneeded, options));
  Fault shape;
  shape.backward = [](Faulty&, CtxList, const Value&, FuserBackwardResult& out) {
    // Autograd would add these up in silence.
    for (Tensor& grad : out.grad_params[0]) {
      if (grad.defined()) grad = (grad / 3).expand({3, 8}).contiguous();
    }
  };
  expect_failures(check(Pass::Backward, shape),
                  "gradient of Bias.bias has shape [3, 8], wanted [8]");
}

TEST_F(TestingFusion, NarrowerNeedsInBackward) {
  Fault fault;
  fault.forward = [](Faulty&, CtxList ctxs, const Value&, ArgsList args, FuserForwardResult&) {
    const GradFlags& needs = args[0].requires_grad;
    ctxs[0]->state.set("both", needs.input && needs.param(0));
  };
  fault.backward = [](Faulty&, CtxList ctxs, const Value&, FuserBackwardResult& out) {
    // Takes it that what forward was told is asked for together.
    const bool both = ctxs[0]->state.get<bool>("both");
    if (both && !ctxs[0]->requires_grad.param(0)) out.grad_input = {};
  };
  expect_failures(check(Pass::Joint, fault),
                  "need gradients, only that of input asked: gradient of input is missing");
}

TEST_F(TestingFusion, RoundingMayDecideAtAKink) {
  // One rounding instead of two makes some sums positive that were negative, and their gradients
  // come and go: not what a fusion is to be blamed for.
  const auto make = [](at::ScalarType dtype, at::Device device) -> OpList {
    LinearOptions options(32, 32);
    options.dtype = dtype;
    options.device = device;
    return {Linear(options).ptr(), ReLU().ptr()};
  };
  CheckOptions options;
  options.device = on_device().device();
  options.dtypes = {at::kBFloat16, at::kHalf};
  const Report report = check_fusion(forward_linear_bias_activation_rule(), Pass::Forward, make,
                                     {{{512, 32}}}, options);
  EXPECT_TRUE(report) << report.text();
}

TEST_F(TestingFusion, DoesNotFire) {
  const auto make = [](at::ScalarType, at::Device) -> OpList { return {GELU().ptr()}; };
  expect_failures(check_fusion(rule({}), Pass::Forward, make, {{{5, 8}}}),
                  "Faulty, float64: it does not fire on [GELU]: wanted Bias, found none");
  FusionRule refusing = rule({});
  refusing.why_not = [](const Match&, const PlanOptions&) { return "it is Sunday"; };
  expect_failures(check_fusion(refusing, Pass::Forward, bias_gelu, {{{5, 8}}}),
                  "it does not fire on [Bias, GELU]: it is Sunday");
  const FusionFunction idle{"Idle", [](const OpList& ops, const PlanOptions&) { return ops; }};
  expect_failures(
      check_fusion(idle, Pass::Forward, bias_gelu, {{{5, 8}}}),
      "Idle, float64: it does not fire on [Bias, GELU]: it left the operations as they");
  const FusionFunction dropping{
      "Dropping", [](const OpList& ops, const PlanOptions&) { return OpList{ops[0]}; }};
  expect_failures(check_fusion(dropping, Pass::Backward, bias_gelu, {{{5, 8}}}),
                  "it must return the same basic operations in order: given [Bias, GELU], "
                  "returned [Bias]");
}

TEST_F(TestingFusion, WrongShapesAreTold) {
  expect_failures(check_fusion(rule({}), Pass::Forward, bias_gelu, {{{5, 7}}}),
                  "the basic operations fail: [Bias] input's last dimension must be size=8");
  EXPECT_MESSAGE(check_fusion(rule({}), Pass::Forward, bias_gelu, {}),
                 "a check needs at least one shape");
}

TEST_F(TestingFusion, LeavesRandomNumbersAndFlagsAlone) {
  torch::manual_seed(3);
  const Tensor wanted = at::rand({4});
  torch::manual_seed(3);
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(check(Pass::Forward, {}));
  EXPECT_FALSE(at::GradMode::is_enabled());
  EXPECT_TRUE(at::equal(at::rand({4}), wanted));
}

TEST_F(TestingFusion, UnderAutocast) {
  CheckOptions options;
  options.autocast = at::kBFloat16;
  options.dtypes = {at::kFloat};
  EXPECT_TRUE(check(Pass::Forward, {}, options));
  Fault fault;
  fault.forward = [](Faulty&, CtxList, const Value&, ArgsList args, FuserForwardResult& out) {
    if (args[0].autocast_dtype) out.output = out.output.tensor().to(at::kFloat);
  };
  expect_failures(check(Pass::Forward, fault, options),
                  "output has dtype float32, wanted bfloat16");
}

}  // namespace
