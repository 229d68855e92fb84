// The dense MLP: against its formula, in every shape it takes, with every choice of frozen leaves.
#include <gtest/gtest.h>

#include "fused_test_support.h"

using namespace ligature;

namespace {

FuserOptions cheap() {
  FuserOptions options;
  options.recompute = Recompute::Cheap;
  return options;
}

enum class Residual { None, BeforeNorm, AfterNorm };

struct Shape {
  bool rms = true;
  bool biases = false;
  bool gated = true;
  Residual residual = Residual::None;
  bool to_caller = false;
};

constexpr int64_t kModel = 6, kHidden = 8;

OpList make_block(const Shape& shape, at::ScalarType dtype) {
  OpList ops{shape.rms ? make_norm<RMSNorm>(kModel, dtype) : make_norm<LayerNorm>(kModel, dtype),
             make_linear(kModel, kHidden, dtype)};
  if (shape.biases) ops.push_back(make_bias(kHidden, dtype));
  ops.push_back(shape.gated ? OpPtr(SwiGLU().ptr()) : OpPtr(GELU().ptr()));
  ops.push_back(make_linear(shape.gated ? kHidden / 2 : kHidden, kModel, dtype));
  if (shape.biases) ops.push_back(make_bias(kModel, dtype));
  randomize_parameters(ops);
  if (shape.residual == Residual::None) return ops;
  MakeExtraOutput fork;
  AddExtraInput join;
  fork->set_extra_output_channel(0, "residual", shape.to_caller);
  join->set_extra_input_channel(0, "residual");
  ops.insert(ops.begin() + (shape.residual == Residual::AfterNorm ? 1 : 0), fork.ptr());
  ops.push_back(join.ptr());
  return ops;
}

Formula formula_of(const Shape& shape) {
  return [=](const Tensor& x, const Tensors&, const Tensors& params) -> Tensors {
    auto param = params.begin();
    const Tensor centered = shape.rms ? x : x - x.mean(-1, true);
    Tensor h = centered * (centered.square().mean(-1, true) + 1e-5).rsqrt() * *param++;
    if (!shape.rms) h = h + *param++;
    Tensor z = h.matmul((*param++).t());
    if (shape.biases) z = z + *param++;
    Tensor a;
    if (shape.gated) {
      const auto halves = z.chunk(2, -1);
      a = at::silu(halves[0]) * halves[1];
    } else {
      a = at::gelu(z, "tanh");
    }
    Tensor y = a.matmul((*param++).t());
    if (shape.biases) y = y + *param++;
    const Tensor residual = shape.residual == Residual::AfterNorm ? h : x * 1;
    if (shape.residual != Residual::None) y = y + residual;
    return shape.to_caller ? Tensors{y, residual} : Tensors{y};
  };
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool rms : {true, false}) {
    for (const bool biases : {false, true}) {
      for (const bool gated : {true, false}) {
        for (const Residual residual :
             {Residual::None, Residual::BeforeNorm, Residual::AfterNorm}) {
          all.push_back({rms, biases, gated, residual, false});
          if (residual != Residual::None) all.push_back({rms, biases, gated, residual, true});
        }
      }
    }
  }
  return all;
}

std::string describe_shape(const Shape& s) {
  return std::string(s.rms ? "RMSNorm" : "LayerNorm") + (s.biases ? ", biases" : "") +
         (s.gated ? ", gated" : "") +
         (s.residual == Residual::None         ? ""
          : s.residual == Residual::BeforeNorm ? ", residual before the norm"
                                               : ", residual after the norm") +
         (s.to_caller ? ", returned" : "");
}

TEST(FusedDenseMLP, Fires) {
  for (const Shape& shape : shapes()) {
    OperationFuser fuser(make_block(shape, at::kDouble), cheap());
    fuser(leaf({3, kModel}).requires_grad_());
    expect_only_step(fuser.plan()->forward, "DenseMLP");
    expect_only_step(fuser.plan()->backward, "DenseMLP");
    EXPECT_EQ(fuser.plan()->forward[0].op, fuser.plan()->backward[0].op);
  }
}

TEST(FusedDenseMLP, EqualsItsFormulaWithAnyLeafFrozen) {
  for (const Shape& shape : shapes()) {
    const Tensor x = strided_leaf({2, 3, kModel});
    expect_formula(make_block(shape, at::kDouble), formula_of(shape), {x, {}},
                   describe_shape(shape), cheap());
  }
}

TEST(FusedDenseMLP, TakesEveryBatch) {
  for (const Shape& shape : shapes()) {
    if (shape.to_caller) continue;
    const OpList ops = make_block(shape, at::kDouble);
    OperationFuser fuser(ops, cheap());
    for (const auto& sizes : op_shapes({kModel})) {
      const Inputs inputs{leaf(sizes).requires_grad_(), {}};
      const Tensors params = parameters_of(ops);
      expect_same_run(run_fuser(fuser, inputs, params),
                      run_formula(formula_of(shape), inputs, params), leaves_of(inputs, params),
                      describe_shape(shape), tolerance(at::kDouble));
    }
  }
}

TEST(FusedDenseMLP, EqualsItsBasicOperationsInLowPrecision) {
  for (const bool autocast : {false, true}) {
    for (const Shape& shape : shapes()) {
      const OpList ops = make_block(shape, autocast ? at::kFloat : at::kBFloat16);
      const Tensors params = parameters_of(ops);
      const Inputs inputs{leaf({5, kModel}, autocast ? at::kFloat : at::kBFloat16), {}};
      const Tensors leaves = leaves_of(inputs, params);
      freeze(leaves, ~uint64_t{0});
      RunResult runs[2];
      for (const bool fuse : {false, true}) {
        FuserOptions options = cheap();
        options.fuse = fuse;
        OperationFuser fuser(ops, options);
        {
          WithAutocast mode(autocast);
          runs[fuse].outputs = fuser(inputs.x);
        }
        runs[fuse].grads = gradients(runs[fuse].outputs, leaves);
        EXPECT_EQ(runs[fuse].outputs[0].scalar_type(), at::kBFloat16);
      }
      expect_same_run(runs[1], runs[0], leaves, describe_shape(shape), {3e-2, 6e-2});
    }
  }
}

TEST(FusedDenseMLP, TakesParametersOfAnotherDtype) {
  for (const Shape& shape : shapes()) {
    const OpList ops = make_block(shape, at::kFloat);
    const Tensors params = parameters_of(ops);
    const Inputs inputs{leaf({5, kModel}, at::kDouble), {}};
    const Tensors leaves = leaves_of(inputs, params);
    freeze(leaves, ~uint64_t{0});
    OperationFuser fuser(ops, cheap());
    const RunResult run = run_fuser(fuser, inputs, params);
    EXPECT_EQ(run.outputs[0].scalar_type(), at::kFloat);
    expect_same_run(run, run_formula(formula_of(shape), inputs, params), leaves,
                    describe_shape(shape), tolerance(at::kFloat));
  }
}

TEST(FusedDenseMLP, NeedsLeaveToRecompute) {
  OperationFuser fuser(make_block({}, at::kDouble));
  fuser(leaf({3, kModel}).requires_grad_());
  EXPECT_FALSE(fires(fuser.plan()->forward, "DenseMLP"));
  bool told = false;
  for (const auto& report : fuser.plan()->reports) {
    for (const auto& considered : report.considered) {
      told = told ||
             (considered.fusion == "DenseMLP" && considered.reason == "recompute is not 'cheap'");
    }
  }
  EXPECT_TRUE(told);
}

TEST(FusedDenseMLP, LeavesForeignBranchesAlone) {
  // The residual of another channel ends here: only the block inside is taken.
  MakeExtraOutput fork;
  AddExtraInput join;
  fork->set_extra_output_channel(0, "outer", false);
  join->set_extra_input_channel(0, "outer");
  OpList ops = make_block({}, at::kDouble);
  ops.insert(ops.begin(), {fork.ptr(), Identity().ptr()});
  ops.push_back(join.ptr());
  OperationFuser fuser(ops, cheap());
  fuser(leaf({3, kModel}).requires_grad_());
  EXPECT_EQ(step_names(fuser.plan()->forward),
            (std::vector<std::string>{"MakeExtraOutput", "Identity", "DenseMLP", "AddExtraInput"}));
}

TEST(FusedDenseMLP, TakesOnlyTheForkOfItsOwnChannel) {
  // Two branches begin: one before the norm, one after it, and both end after the block. The first
  // end must be that of the branch that the block takes.
  for (const bool inner_first : {true, false}) {
    MakeExtraOutput fork;
    AddExtraInput join;
    fork->set_extra_output_channel(0, "outer", false);
    join->set_extra_input_channel(0, "outer");
    const Shape shape{.rms = false, .residual = Residual::AfterNorm};
    OpList ops = make_block(shape, at::kDouble);
    ops.insert(ops.begin(), fork.ptr());
    ops.insert(inner_first ? ops.end() : ops.end() - 1, join.ptr());
    OperationFuser fuser(ops, cheap());
    const Tensors params = parameters_of(ops);
    const Inputs inputs{leaf({3, kModel}).requires_grad_(), {}};
    const Formula formula = [&](const Tensor& x, const Tensors& none, const Tensors& p) -> Tensors {
      return {formula_of(shape)(x, none, p)[0] + x};
    };
    expect_same_run(run_fuser(fuser, inputs, params), run_formula(formula, inputs, params),
                    leaves_of(inputs, params), "two branches", tolerance(at::kDouble));
    EXPECT_EQ(fires(fuser.plan()->forward, "DenseMLP"), inner_first);
  }
}

TEST(FusedDenseMLP, LeavesTheEndOfAnotherBranch) {
  MakeExtraOutput outer, inner;
  AddExtraInput outer_end, inner_end;
  outer->set_extra_output_channel(0, "outer", false);
  outer_end->set_extra_input_channel(0, "outer");
  inner->set_extra_output_channel(0, "inner", false);
  inner_end->set_extra_input_channel(0, "inner");
  OpList ops{outer.ptr(), Identity().ptr(), inner.ptr()};
  for (const auto& op : make_block({}, at::kDouble)) ops.push_back(op);
  ops.push_back(outer_end.ptr());
  ops.push_back(inner_end.ptr());
  OperationFuser fuser(ops, cheap());
  const Tensors params = parameters_of(ops);
  const Inputs inputs{leaf({3, kModel}).requires_grad_(), {}};
  const Formula formula = [](const Tensor& x, const Tensors& none, const Tensors& p) -> Tensors {
    return {formula_of({})(x, none, p)[0] + 2 * x};
  };
  expect_same_run(run_fuser(fuser, inputs, params), run_formula(formula, inputs, params),
                  leaves_of(inputs, params), "two branches", tolerance(at::kDouble));
  EXPECT_EQ(step_names(fuser.plan()->forward),
            (std::vector<std::string>{"MakeExtraOutput", "Identity", "MakeExtraOutput", "DenseMLP",
                                      "AddExtraInput", "AddExtraInput"}));
}

TEST(FusedDenseMLP, FeedsLaterConsumersOfItsChannel) {
  AddExtraInput again;
  again->set_extra_input_channel(0, "residual");
  Shape shape;
  shape.residual = Residual::BeforeNorm;
  OpList ops = make_block(shape, at::kDouble);
  ops.push_back(again.ptr());
  OperationFuser fuser(ops, cheap());
  const Tensors params = parameters_of(ops);
  const Inputs inputs{leaf({3, kModel}).requires_grad_(), {}};
  const Formula formula = [&](const Tensor& x, const Tensors& extras, const Tensors& p) -> Tensors {
    return {formula_of(shape)(x, extras, p)[0] + x};
  };
  expect_same_run(run_fuser(fuser, inputs, params), run_formula(formula, inputs, params),
                  leaves_of(inputs, params), "fan-out", tolerance(at::kDouble));
  EXPECT_EQ(step_names(fuser.plan()->forward),
            (std::vector<std::string>{"DenseMLP", "AddExtraInput"}));
}

TEST(FusedDenseMLP, SavesOnlyWhatItCannotRecompute) {
  const OpList ops = make_block({}, at::kDouble);
  const Tensor x = leaf({64, kModel}).requires_grad_();
  const auto saved_elements = [&](FuserOptions options) {
    int64_t elements = 0;
    OperationFuser fuser(ops, options);
    const auto plan_before = fuser(x);
    const auto count = [&](const Tensor& t) { elements += t.size(0) == 64 ? t.numel() : 0; };
    (void)plan_before;
    // Run the steps by hand: contexts show what autograd is going to hold.
    const Plan& plan = *fuser.plan();
    std::vector<OperationContext> contexts(plan.basic_ops.size());
    Value value = x.detach();
    std::vector<Tensors> params(plan.basic_ops.size());
    std::vector<OpArgs> args(plan.basic_ops.size());
    for (size_t i = 0; i < args.size(); ++i) {
      plan.basic_ops[i]->collect_parameters(params[i]);
      args[i].params = params[i];
      args[i].requires_grad = {true, true, {}, {}};
      for (size_t j = 0; j < params[i].size(); ++j) args[i].requires_grad.params.set(j);
    }
    torch::NoGradGuard no_grad;
    for (const PlanStep& step : plan.forward) {
      std::vector<OperationContext*> ctxs;
      for (size_t i = step.first; i < step.first + step.count; ++i) ctxs.push_back(&contexts[i]);
      value =
          step.op
              ->fuser_forward(ctxs, value, at::ArrayRef<OpArgs>(args).slice(step.first, step.count))
              .output;
    }
    for (const auto& ctx : contexts) {
      for (const Value& saved : ctx.saved()) {
        if (saved.defined()) count(saved.tensor());
      }
    }
    return elements;
  };
  // x, rstd and the first GEMM's output; without it also the outputs of the norm and the
  // activation.
  EXPECT_EQ(saved_elements(cheap()), 64 * (kModel + 1 + kHidden));
  EXPECT_EQ(saved_elements({}), 64 * (kModel + 1 + kModel + kHidden + kHidden / 2));
}

TEST(FusedDenseMLP, RunsBackwardTwice) {
  const OpList ops = make_block({.residual = Residual::BeforeNorm}, at::kDouble);
  OperationFuser fuser(ops, cheap());
  const Tensor x = leaf({3, kModel}).requires_grad_();
  const Tensor y = fuser(x)[0];
  const Tensor first = torch::autograd::grad({y}, {x}, {at::ones_like(y)}, true)[0];
  const Tensor second = torch::autograd::grad({y}, {x}, {at::ones_like(y)}, true)[0];
  expect_same_bits(second, first, "second backward");
  const Tensor w = parameters_of(ops)[1];
  EXPECT_TRUE(torch::autograd::grad({y}, {w}, {at::ones_like(y)})[0].defined());
}

}  // namespace
