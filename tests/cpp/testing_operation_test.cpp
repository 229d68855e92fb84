// check_operation lets a right operation pass and finds what is wrong with a wrong one.
#include <gtest/gtest.h>

#include <functional>

#include "device.h"
#include "ligature/ligature.h"
#include "ligature/testing/testing.h"
#include "testing_support.h"

using namespace ligature;
using ligature::testing::check_operation;
using ligature::testing::CheckOptions;
using ligature::testing::Reference;
using ligature::testing::Report;

namespace {

using TestingOperation = OneThread;

class MultiplyImpl;

/// Ways to spoil it.
struct Fault {
  std::function<void(MultiplyImpl&, const Value& x, const OpArgs&, OpForwardResult&)> compute;
  std::function<void(MultiplyImpl&, OperationContext&, const OpArgs&)> save;
  std::function<void(MultiplyImpl&, OperationContext&, const Value& dy, OpBackwardResult&)>
      backward;
};

struct MultiplyOptions : ParameterOptions {
  Fault fault;
  template <class F>
  void fields(F&&) {}
};

/// y = x * w, element by element, in the split form.
class MultiplyImpl : public Operation<MultiplyImpl> {
 public:
  using Options = MultiplyOptions;
  explicit MultiplyImpl(Options given) : Operation("Multiply"), options(std::move(given)) {
    add_parameter("w", {8}, options.tensor_options());
  }
  void initialize_parameter(const std::string&, Tensor& parameter) override { parameter.fill_(1); }

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override {
    OpForwardResult out{input.tensor() * args.params[0], {}};
    if (options.fault.compute) options.fault.compute(*this, input, args, out);
    return out;
  }
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave&,
                           const OpArgs& args) override {
    ctx.save_for_backward({input, args.params[0]});
    if (options.fault.save) options.fault.save(*this, ctx, args);
  }
  OpBackwardResult op_backward(OperationContext& ctx, const Value& dy) override {
    OpBackwardResult out{{}, {Tensor()}};
    if (ctx.num_saved() == 2) {
      if (ctx.requires_grad.input) out.grad_input = dy.tensor() * ctx.saved_tensor(1);
      if (ctx.requires_grad.param(0)) {
        out.grad_params[0] = (dy.tensor() * ctx.saved_tensor(0)).flatten(0, -2).sum(0);
      }
    }
    if (options.fault.backward) options.fault.backward(*this, ctx, dy, out);
    return out;
  }

  Options options;
  std::vector<Value> stash;
};

Reference formula() {
  return [](const Tensor& x, const auto& params, const auto&) -> std::vector<Tensor> {
    return {x * params[0]};
  };
}

Report check(const Fault& fault, CheckOptions options = {}) {
  options.device = on_device().device();
  const auto make = [&](at::ScalarType dtype, at::Device device) -> OpList {
    MultiplyOptions of_op;
    of_op.dtype = dtype;
    of_op.device = device;
    of_op.fault = fault;
    return {std::make_shared<MultiplyImpl>(of_op)};
  };
  return check_operation(make, formula(), {{{2, 3, 8}}, {{5, 8}}}, options);
}

TEST_F(TestingOperation, LetsARightOnePass) {
  const Report report = check({});
  EXPECT_TRUE(report) << report.text();
  EXPECT_GT(report.runs, 40U);
}

TEST_F(TestingOperation, WrongOutputAndGradients) {
  Fault output;
  output.compute = [](MultiplyImpl&, const Value&, const OpArgs&, OpForwardResult& out) {
    out.output = out.output.tensor() + 0.25;
  };
  expect_failures(check(output),
                  "Multiply, float64 [2, 3, 8], nothing needs gradients: output is "
                  "off by 0.25");
  Fault input;
  input.backward = [](MultiplyImpl&, OperationContext&, const Value&, OpBackwardResult& out) {
    if (out.grad_input.defined()) out.grad_input = out.grad_input.tensor() * 1.5;
  };
  expect_failures(check(input), "gradient of input is off by");
  Fault parameter;
  parameter.backward = [](MultiplyImpl&, OperationContext&, const Value& dy,
                          OpBackwardResult& out) {
    // Divides by the number of rows, only where one cannot see it well.
    if (out.grad_params[0].defined() && dy.dtype() == at::kBFloat16) out.grad_params[0] /= 4;
  };
  const Report report = check(parameter);
  expect_failures(report,
                  "bfloat16 [5, 8], Multiply.w needs a gradient: gradient of Multiply.w is "
                  "off by");
  for (const auto& failure : report.failures) {
    EXPECT_NE(failure.find("bfloat16"), std::string::npos) << failure;
  }
}

TEST_F(TestingOperation, WrongFormulaAndBackwardAreFoundByDifferences) {
  // The formula agrees with a backward that does not belong to the forward.
  struct Detached {
    static std::vector<Tensor> run(const Tensor& x, const std::vector<Tensor>& params,
                                   const std::vector<Tensor>&) {
      return {x * params[0] + 3 * (x - x.detach())};
    }
  };
  Fault fault;
  fault.backward = [](MultiplyImpl&, OperationContext&, const Value& dy, OpBackwardResult& out) {
    if (out.grad_input.defined()) out.grad_input = out.grad_input.tensor() + 3 * dy.tensor();
  };
  const auto make = [&](at::ScalarType dtype, at::Device device) -> OpList {
    MultiplyOptions of_op;
    of_op.dtype = dtype;
    of_op.device = device;
    of_op.fault = fault;
    return {std::make_shared<MultiplyImpl>(of_op)};
  };
  CheckOptions options;
  options.device = on_device().device();
  const Report report = check_operation(make, Reference(&Detached::run), {{{5, 8}}}, options);
  expect_failures(report, "Multiply, float64 [5, 8]: gradient of input is ");
  expect_failures(report, ", by differences it is ");
  EXPECT_EQ(report.failures.size(), 1U) << report.text();
  options.numeric = false;
  EXPECT_TRUE(check_operation(make, Reference(&Detached::run), {{{5, 8}}}, options));
}

TEST_F(TestingOperation, ForgottenAndStashed) {
  Fault forgets;
  forgets.save = [](MultiplyImpl&, OperationContext& ctx, const OpArgs&) {
    ctx.save_for_backward({});
  };
  expect_failures(check(forgets), "gradient of input is missing");
  Fault stashes;
  stashes.save = [](MultiplyImpl& self, OperationContext& ctx, const OpArgs&) {
    self.stash = ctx.saved();
    ctx.save_for_backward({});
  };
  stashes.backward = [](MultiplyImpl& self, OperationContext& ctx, const Value& dy,
                        OpBackwardResult& out) {
    if (ctx.requires_grad.input) out.grad_input = dy.tensor() * self.stash[1].tensor();
    if (ctx.requires_grad.param(0)) {
      out.grad_params[0] = (dy.tensor() * self.stash[0].tensor()).flatten(0, -2).sum(0);
    }
  };
  expect_failures(check(stashes), "backward of the first of two forwards");
  Fault reads;
  reads.save = [](MultiplyImpl&, OperationContext& ctx, const OpArgs&) {
    ctx.save_for_backward({ctx.saved_tensor(0)});
  };
  reads.backward = [](MultiplyImpl& self, OperationContext& ctx, const Value& dy,
                      OpBackwardResult& out) {
    if (ctx.requires_grad.input) out.grad_input = dy.tensor() * self.own_parameters()["w"];
    if (ctx.requires_grad.param(0)) {
      out.grad_params[0] = (dy.tensor() * ctx.saved_tensor(0)).flatten(0, -2).sum(0);
    }
  };
  expect_failures(check(reads),
                  "Multiply.w edited between forward and backward: gradient of input is off by");
}

TEST_F(TestingOperation, SharedAndChangedMemory) {
  Fault alias;
  alias.compute = [](MultiplyImpl&, const Value& x, const OpArgs&, OpForwardResult& out) {
    out.output = x;
  };
  CheckOptions options;
  options.randomize_parameters = false;  // w is 1
  expect_failures(check(alias, options), "output shares memory with input");
  options.may_alias = true;
  options.numeric = false;  // the output does not depend on w
  EXPECT_TRUE(check(alias, options));
  Fault kept;
  kept.compute = [](MultiplyImpl&, const Value& x, const OpArgs&, OpForwardResult& out) {
    out.to_save.tensors.emplace_back(x.tensor().view({-1}));
  };
  expect_failures(check(kept), "returned an argument (or a view of one) as to_save tensor 0");
  Fault changed;
  changed.compute = [](MultiplyImpl&, const Value& x, const OpArgs&, OpForwardResult&) {
    Tensor(x.tensor()).add_(1);
  };
  expect_failures(check(changed), "input was changed");
  Fault gradient;
  gradient.backward = [](MultiplyImpl&, OperationContext&, const Value& dy, OpBackwardResult&) {
    if (dy.tensor().is_non_overlapping_and_dense()) Tensor(dy.tensor()).mul_(2);
  };
  expect_failures(check(gradient), "the gradient given for the output was changed");
  options = {};
  options.may_change_gradients = true;
  EXPECT_TRUE(check(gradient, options));
  Fault spoils;
  spoils.backward = [](MultiplyImpl&, OperationContext& ctx, const Value&, OpBackwardResult&) {
    Tensor(ctx.saved_tensor(0)).mul_(2);
  };
  expect_failures(check(spoils), "backward changed saved tensor 0 of Multiply");
}

TEST_F(TestingOperation, KindsOfResults) {
  Fault dtype;
  dtype.compute = [](MultiplyImpl&, const Value&, const OpArgs&, OpForwardResult& out) {
    out.output = out.output.tensor().to(at::kFloat);
  };
  dtype.backward = [](MultiplyImpl&, OperationContext&, const Value&, OpBackwardResult& out) {
    if (out.grad_input.defined()) out.grad_input = out.grad_input.tensor().to(at::kBFloat16);
    if (out.grad_params[0].defined()) out.grad_params[0] = out.grad_params[0].to(at::kBFloat16);
  };
  CheckOptions options;
  options.dtypes = {at::kBFloat16};
  options.numeric = false;
  expect_failures(check(dtype, options), "output has dtype float32, wanted bfloat16");
  options.may_change_dtype = true;
  EXPECT_TRUE(check(dtype, options));
  Fault unneeded;
  unneeded.backward = [](MultiplyImpl&, OperationContext& ctx, const Value& dy,
                         OpBackwardResult& out) {
    out.grad_input = dy.tensor() * ctx.saved_tensor(1);
  };
  expect_failures(check(unneeded),
                  "Multiply.w needs a gradient: gradient of input is given, though "
                  "none is needed");
  options = {};
  options.may_give_unneeded = true;
  EXPECT_TRUE(check(unneeded, options));
}

// ---- the built-in operations with extra inputs and outputs

TEST_F(TestingOperation, ExtraInputsAndOutputs) {
  CheckOptions options;
  options.device = on_device().device();
  for (const bool in_place : {false, true}) {
    const auto join = [&](at::ScalarType, at::Device) -> OpList {
      return {AddExtraInput(AddExtraInputOptions(in_place)).ptr()};
    };
    const Report report = check_operation(
        join,
        [](const Tensor& x, const auto&, const auto& extras) -> std::vector<Tensor> {
          return {x + extras[0]};
        },
        {{{2, 3, 8}}, {{5, 8}, {{5, 8}}}}, options);
    EXPECT_TRUE(report) << report.text();
    const auto fork = [&](at::ScalarType, at::Device) -> OpList {
      return {MakeExtraOutput(MakeExtraOutputOptions(in_place)).ptr()};
    };
    const Reference twice = [](const Tensor& x, const auto&, const auto&) -> std::vector<Tensor> {
      return {x, x};
    };
    CheckOptions of_fork = options;
    of_fork.may_change_gradients = in_place;
    const Report forked = check_operation(fork, twice, {{{2, 3, 8}}}, of_fork);
    EXPECT_TRUE(forked) << forked.text();
    of_fork.may_change_gradients = false;
    EXPECT_EQ(static_cast<bool>(check_operation(fork, twice, {{{2, 3, 8}}}, of_fork)), !in_place);
  }
  const auto scaled = [](at::ScalarType, at::Device) -> OpList { return {ScaledSReLU().ptr()}; };
  const Report report = check_operation(
      scaled,
      [](const Tensor& x, const auto&, const auto& extras) -> std::vector<Tensor> {
        return {x.relu().square() * extras[0].unsqueeze(-1)};
      },
      {{{2, 3, 8}}}, options);
  EXPECT_TRUE(report) << report.text();
  expect_failures(check_operation(scaled, formula(), {{{2, 3, 8}, {{2, 3}, {2, 3}}}}, options),
                  "the operations [ScaledSReLU] take 1 extra inputs, got shapes of 2");
}

TEST_F(TestingOperation, ReferencesThatFail) {
  const auto make = [](at::ScalarType, at::Device) -> OpList { return {GELU().ptr()}; };
  expect_failures(check_operation(make,
                                  [](const Tensor& x, const auto&,
                                     const auto&) -> std::vector<Tensor> { return {x, x}; },
                                  {{{5, 8}}}),
                  "gives 2 outputs, wanted 1");
  expect_failures(check_operation(make,
                                  [](const Tensor& x, const auto&,
                                     const auto&) -> std::vector<Tensor> { return {x.view({3})}; },
                                  {{{5, 8}}}),
                  "the reference fails: shape '[3]' is invalid");
}

TEST_F(TestingOperation, RandomOnesAndOwnSamples) {
  const auto dropout = [](at::ScalarType, at::Device) -> OpList { return {Dropout(0.5).ptr()}; };
  CheckOptions options;
  options.device = on_device().device();
  options.dtypes = {at::kDouble};  // other dtypes drop other values on a GPU
  Report report = check_operation(
      dropout,
      [](const Tensor& x, const auto&, const auto&) -> std::vector<Tensor> {
        return {torch::dropout(x, 0.5, true)};
      },
      {{{20, 8}}}, options);
  EXPECT_TRUE(report) << report.text();
  size_t sampled = 0;
  options.sample = [&](at::IntArrayRef sizes) {
    ++sampled;
    return at::rand(sizes, at::kDouble) + 1;
  };
  report = check_operation(
      [](at::ScalarType, at::Device) -> OpList { return {ReLU().ptr()}; },
      [](const Tensor& x, const auto&, const auto&) -> std::vector<Tensor> { return {x * 1}; },
      {{{5, 8}}}, options);
  EXPECT_TRUE(report) << report.text();
  EXPECT_GT(sampled, 0U);
}

}  // namespace
