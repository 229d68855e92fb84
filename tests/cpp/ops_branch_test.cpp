// The operations without arithmetic of their own: branches, shapes, factors, dropout.
#include <gtest/gtest.h>

#include "ops_test_support.h"

using namespace ligature;

namespace {

AddExtraInput join(bool in_place = false) { return AddExtraInput(AddExtraInputOptions(in_place)); }
MakeExtraOutput fork(bool in_place = false) {
  return MakeExtraOutput(MakeExtraOutputOptions(in_place));
}

TEST(OpsBranch, AddExtraInputEqualsItsFormula) {
  const Formula formula = [](const Tensor& x, const Tensors& extras, const Tensors&) -> Tensors {
    return {x + extras[0]};
  };
  for (const auto& shape : op_shapes({3})) {
    expect_formula({join().ptr()}, formula, {leaf(shape), {strided_leaf(shape)}}, "AddExtraInput");
  }
}

TEST(OpsBranch, AddExtraInputKeepsTheInputsDtype) {
  OperationFuser fuser({join().ptr()});
  Tensor x = leaf({3}, at::kBFloat16).requires_grad_();
  Tensor extra = leaf({3}, at::kFloat).requires_grad_();
  const Tensor y = fuser(x, {extra})[0];
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(extra.grad().scalar_type(), at::kFloat);
}

TEST(OpsBranch, AddExtraInputInPlace) {
  OperationFuser fuser({join(true).ptr()});
  Tensor x = leaf({4}).requires_grad_();
  Tensor source = leaf({4}).requires_grad_();
  Tensor extra = source * 1;
  const Tensor wanted = (x + extra).detach();
  const auto version = extra._version();
  const Tensor y = fuser(x, {extra})[0];
  EXPECT_TRUE(y.is_alias_of(extra));
  EXPECT_TRUE(at::equal(y, wanted));
  EXPECT_TRUE(at::equal(extra, wanted));
  EXPECT_EQ(extra._version(), version + 1);
  y.backward(at::ones_like(y));
  EXPECT_TRUE(at::equal(x.grad(), at::ones_like(x)));
  EXPECT_TRUE(at::equal(source.grad(), at::ones_like(x)));

  const Tensor of_leaf = fuser(x, {source})[0];
  EXPECT_TRUE(source.is_leaf());
  EXPECT_TRUE(of_leaf.is_alias_of(source));
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(fuser(x, {source})[0].is_alias_of(source));
  const Tensor inference_tensor = [] {
    c10::InferenceMode inference;
    return leaf({4});
  }();
  EXPECT_TRUE(fuser(leaf({4}), {inference_tensor})[0].is_alias_of(inference_tensor));
}

TEST(OpsBranch, AddExtraInputInPlaceIntoAView) {
  OperationFuser fuser({fork().ptr(), ConstantScale(2.0).ptr(), join(true).ptr()});
  for (const bool history : {true, false}) {
    for (const bool by_base : {true, false}) {
      Tensor x = leaf({2}).requires_grad_();
      Tensor source = leaf({4}).requires_grad_(history);
      const Tensor base = source * 3;
      const Tensor y = fuser(x, {base.slice(0, 0, 4, 2)})[0];
      (by_base ? base : y).sum().backward();
      EXPECT_TRUE(at::equal(x.grad(), at::full_like(x, 2)));
      if (!history) continue;
      const double rest = by_base ? 3 : 0;
      EXPECT_TRUE(at::equal(source.grad(), torch::tensor({3.0, rest, 3.0, rest}).to(source)));
    }
  }
}

TEST(OpsBranch, InPlaceChangesAreCaught) {
  OperationFuser fuser({join(true).ptr()});
  Tensor source = leaf({4}).requires_grad_();
  const Tensor extra = source.exp();
  const Tensor y = fuser(leaf({4}).requires_grad_(), {extra})[0];
  EXPECT_MESSAGE(extra.sum().backward(), "modified by an inplace operation");
}

TEST(OpsBranch, AddExtraInputSaysWhatIsWrong) {
  EXPECT_MESSAGE(OperationFuser({join().ptr()})(leaf({2, 3}), {leaf({3})}),
                 "[AddExtraInput] extra input must have the input's shape [2, 3], got [3]");
}

TEST(OpsBranch, MakeExtraOutputEqualsItsFormula) {
  const Formula formula = [](const Tensor& x, const Tensors&, const Tensors&) -> Tensors {
    return {x * 1, x * 1};
  };
  for (const bool in_place : {false, true}) {
    for (const auto& shape : op_shapes({3})) {
      expect_formula({fork(in_place).ptr()}, formula, {strided_leaf(shape), {}}, "MakeExtraOutput");
    }
  }
}

TEST(OpsBranch, MakeExtraOutputTakesMissingGradientsAsZero) {
  for (const size_t used : {0, 1}) {
    OperationFuser fuser({fork().ptr()});
    Tensor x = leaf({4}).requires_grad_();
    const Tensors outputs = fuser(x);
    (outputs[used] * 3).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full_like(x, 3)));
  }
}

TEST(OpsBranch, MakeExtraOutputInPlaceAddsIntoTheGradient) {
  for (const bool in_place : {false, true}) {
    OperationFuser fuser({fork(in_place).ptr()});
    Tensor x = leaf({4}).requires_grad_();
    const Tensors outputs = fuser(x);
    const Tensor dy = leaf({4}), dextra = leaf({4});
    const Tensor before = dextra.clone();
    torch::autograd::backward({outputs[0], outputs[1]}, {dy, dextra});
    EXPECT_TRUE(at::equal(x.grad(), dy + before));
    EXPECT_EQ(at::equal(dextra, before), !in_place);
  }
}

TEST(OpsBranch, ChannelsKeepTheCallersGradient) {
  MakeExtraOutput begin = fork(true);
  AddExtraInput end = join();
  begin->set_extra_output_channel(0, "residual", false);
  end->set_extra_input_channel(0, "residual");
  OperationFuser fuser({begin.ptr(), ConstantScale(2.0).ptr(), end.ptr()});
  Tensor x = leaf({4}).requires_grad_();
  const Tensor dy = leaf({4});
  const Tensor before = dy.clone();
  fuser(x)[0].backward(dy);
  EXPECT_TRUE(at::equal(dy, before));
  expect_close(x.grad(), 3 * dy, "residual");
}

TEST(OpsReshape, EqualsItsFormula) {
  const auto formula = [](std::vector<int64_t> shape) -> Formula {
    return [=](const Tensor& x, const Tensors&, const Tensors&) -> Tensors {
      return {x.reshape(shape) * 1};
    };
  };
  struct Case {
    std::vector<int64_t> from, to, result;
  };
  for (const Case& c : std::vector<Case>{{{2, 3, 4}, {6, 4}, {6, 4}},
                                         {{2, 3, 4}, {-1}, {24}},
                                         {{2, 3, 4}, {4, -1, 2}, {4, 3, 2}},
                                         {{0, 4}, {-1, 2, 2}, {0, 2, 2}},
                                         {{0, 4}, {2, 0}, {2, 0}},
                                         {{1}, {}, {}}}) {
    Reshape op{ReshapeOptions(c.to)};
    for (const Tensor& x : {leaf(c.from), strided_leaf(c.from)}) {
      expect_formula({op.ptr()}, formula(c.result), {x, {}}, "Reshape");
    }
  }
}

TEST(OpsReshape, SaysWhatIsWrong) {
  EXPECT_MESSAGE(Reshape(ReshapeOptions({-1, -1})), "at most one is -1, got [-1, -1]");
  EXPECT_MESSAGE(Reshape(ReshapeOptions({-2})), "at most one is -1, got [-2]");
  EXPECT_MESSAGE(OperationFuser({Reshape(ReshapeOptions({-1, 5})).ptr()})(leaf({4, 3})),
                 "[Reshape] input must have as many elements as shape=[-1, 5], got [4, 3]");
  EXPECT_MESSAGE(OperationFuser({Reshape(ReshapeOptions({0, -1})).ptr()})(leaf({0, 3})),
                 "[Reshape] input must have as many elements as shape=[0, -1], got [0, 3]");
}

TEST(OpsConstantScale, EqualsItsFormula) {
  const Formula formula = [](const Tensor& x, const Tensors&, const Tensors&) -> Tensors {
    return {x * -0.25};
  };
  for (const auto& shape : op_shapes({3})) {
    expect_formula({ConstantScale(-0.25).ptr()}, formula, {strided_leaf(shape), {}},
                   "ConstantScale");
  }
  expect_formula({ConstantScale(-0.25).ptr()}, formula, {leaf({5}, at::kBFloat16), {}}, "bfloat16");
}

TEST(OpsIdentity, EqualsItsFormula) {
  const Formula formula = [](const Tensor& x, const Tensors&, const Tensors&) -> Tensors {
    return {x * 1};
  };
  expect_formula({Identity().ptr()}, formula, {strided_leaf({2, 3}), {}}, "Identity");
  const Tensor integers = at::arange(3);
  EXPECT_TRUE(at::equal(OperationFuser({Identity().ptr()})(integers)[0], integers));
}

TEST(OpsDropout, DropsAndScales) {
  Dropout op(0.25);
  OperationFuser fuser({op.ptr()});
  Tensor x = (leaf({1000}).abs() + 1).requires_grad_();
  torch::manual_seed(5);
  const Tensor y = fuser(x)[0];
  const Tensor kept = (y != 0).to(at::kDouble);
  EXPECT_NEAR(kept.mean().item<double>(), 0.75, 0.05);
  expect_close(y, x * kept / 0.75, "dropout");
  const Tensor dy = leaf({1000});
  y.backward(dy);
  expect_close(x.grad(), dy * kept / 0.75, "dropout's gradient");
  torch::manual_seed(5);
  EXPECT_TRUE(at::equal(fuser(x)[0], y));
}

TEST(OpsDropout, DoesNothingInEvalMode) {
  Dropout op(0.5);
  op->eval();
  OperationFuser fuser({op.ptr()});
  Tensor x = leaf({100}).requires_grad_();
  const Tensor y = fuser(x)[0];
  EXPECT_TRUE(at::equal(y, x));
  EXPECT_TRUE(y.is_alias_of(x));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones_like(x)));
}

TEST(OpsDropout, TakesTheEnds) {
  Tensor x = leaf({100}).requires_grad_();
  const Tensor none = OperationFuser({Dropout(1.0).ptr()})(x)[0];
  EXPECT_TRUE((none == 0).all().item<bool>());
  none.sum().backward();
  EXPECT_TRUE((x.grad() == 0).all().item<bool>());
  EXPECT_TRUE(at::equal(OperationFuser({Dropout(0.0).ptr()})(x)[0], x));
  EXPECT_MESSAGE(Dropout(1.5), "[Dropout] p must be in [0, 1], got 1.5");
  EXPECT_MESSAGE(Dropout(std::nan("")), "[Dropout] p must be in [0, 1]");
}

}  // namespace
