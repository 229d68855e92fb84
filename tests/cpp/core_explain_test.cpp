// Explanations and strictness in C++. What they tell is compared with what really runs in the
// Python tests; here it is the interface.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"

using namespace ligature;

namespace {

Tensor shape(at::IntArrayRef sizes) {
  return torch::empty(sizes, at::TensorOptions().device(at::kMeta)).requires_grad_();
}

Sequential make_mlp() { return Sequential(LayerNorm(8), Linear(8, 32), SwiGLU(), Linear(16, 8)); }

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(Explain, TellsTheSameBeforeAndAfterACall) {
  Sequential mlp = make_mlp();
  EXPECT_TRUE(contains(error_of([&] { mlp->explain(); }), "have not been called yet"));
  const Explanation before = mlp->explain(shape({4, 8}));
  mlp->forward(torch::randn({4, 8}, on_device()).requires_grad_()).sum().backward();
  const Explanation after = mlp->explain();
  EXPECT_EQ(before.text(), after.text());
  EXPECT_EQ(before.json(), after.json());
  EXPECT_FALSE(diff(before, after).differs());

  const ExplainedPart& part = after.parts.at(0);
  ASSERT_EQ(part.ops.size(), 6);
  ASSERT_EQ(part.forward.size(), 3);
  EXPECT_EQ(part.forward[1].op, "ForwardLinearBiasActivation");
  EXPECT_EQ(part.forward[1].first, 1);
  EXPECT_EQ(part.forward[1].count, 3);
  EXPECT_EQ(to_string(part.forward[1].trace.output), "float32 [4, 16]");
  ASSERT_EQ(part.forward[1].trace.kernels.size(), 2);
  EXPECT_EQ(part.forward[1].trace.kernels[0].name, "linear_forward");
  EXPECT_EQ(part.forward[1].trace.kernels[1].name, "activation_forward");
  // Two statistics per row, the norm's output, the activation's input and output.
  EXPECT_EQ(after.saved_bytes(), 4 * 4 * (2 + 8 + 32 + 16));
  EXPECT_EQ(part.held_input_bytes(), 4 * 4 * 8);
  EXPECT_EQ(after.fusions(),
            (std::vector<std::string>{"ForwardLinearBiasActivation", "BackwardActivationBias"}));
}

TEST(Explain, DescribesOtherModulesAndNesting) {
  Sequential model(make_mlp(), torch::nn::Linear(8, 4), ReLU());
  model->to(on_device().device());
  const Explanation before = model->explain(shape({4, 8}));
  ASSERT_EQ(before.parts.size(), 3);
  EXPECT_EQ(before.parts[0].name, "0");
  EXPECT_FALSE(before.parts[1].is_fuser());
  EXPECT_EQ(to_string(before.parts[2].input.value), "float32 [4, 4]");
  model->forward(torch::randn({4, 8}, on_device()).requires_grad_());
  EXPECT_EQ(model->explain().text(), before.text());

  struct Model : torch::nn::Module {
    Model() {
      inner = register_module("inner", make_mlp());
      register_module("head", torch::nn::Linear(8, 2));
    }
    Sequential inner;
  } whole;
  whole.inner->forward(torch::randn({4, 8}, on_device()));
  const Explanation all = explain(whole);
  ASSERT_EQ(all.parts.size(), 1);
  EXPECT_EQ(all.parts[0].name, "inner");
}

TEST(Explain, TracesEveryOperationWithoutMemory) {
  const OpList ops{GELU{}.ptr(),
                   QGELU{}.ptr(),
                   ReLU{}.ptr(),
                   SReLU{}.ptr(),
                   SiLU{}.ptr(),
                   GLU{}.ptr(),
                   GEGLU{}.ptr(),
                   QGEGLU{}.ptr(),
                   ReGLU{}.ptr(),
                   SReGLU{}.ptr(),
                   SwiGLU{}.ptr(),
                   ClampedSwiGLU{}.ptr(),
                   SiTUGLU{}.ptr(),
                   LayerNorm(8).ptr(),
                   RMSNorm(8).ptr(),
                   L2Normalization{}.ptr(),
                   Linear(8, 4).ptr(),
                   Bias(8).ptr(),
                   Dropout(0.5).ptr(),
                   Identity{}.ptr(),
                   ConstantScale(2.0).ptr(),
                   Reshape(ReshapeOptions({-1, 4})).ptr(),
                   MakeExtraOutput{}.ptr()};
  for (const auto& op : ops) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      op->to(dtype);
      const Tensor x = torch::randn({2, 3, 8}, on_device(dtype)).requires_grad_();
      OperationFuser fuser({op});
      const Explanation before = fuser.explain(x);
      const auto outputs = fuser(x);
      outputs[0].sum().backward();
      EXPECT_EQ(fuser.explain().text(), before.text()) << op->name();
      const TracedValue& traced = before.parts[0].forward.back().trace.output;
      EXPECT_EQ(traced.sizes, outputs[0].sizes().vec()) << op->name();
      EXPECT_EQ(traced.format, dtype_name(outputs[0].scalar_type())) << op->name();
      EXPECT_EQ(before.parts[0].backward.front().trace.output.sizes, x.sizes().vec());
    }
  }
}

TEST(Explain, TakesExtraInputs) {
  OperationFuser fuser({Linear(8, 8).ptr(), AddExtraInput{}.ptr()});
  EXPECT_TRUE(contains(error_of([&] { fuser.explain(shape({2, 8})); }), "take 1 extra inputs"));
  const Explanation explanation = fuser.explain(shape({2, 8}), {shape({2, 8})});
  EXPECT_EQ(explanation.parts[0].forward[0].op, "ForwardLinearBiasAdd");
  EXPECT_EQ(fuser.plan(), nullptr);  // it was not called
  EXPECT_TRUE(
      contains(error_of([&] { fuser.explain(shape({2, 7}), {shape({2, 8})}); }), "last dimension"));
}

TEST(Explain, ShowsWhatDiffers) {
  Sequential mlp = make_mlp();
  const Explanation saved = mlp->explain(shape({4, 8}));
  mlp->set_recompute(Recompute::Cheap);
  const PlanDiff changes = diff(saved, mlp->explain(shape({4, 8})));
  EXPECT_TRUE(changes.differs());
  EXPECT_TRUE(contains(changes.text(), "+ recompute cheap"));
  EXPECT_TRUE(contains(changes.text(), "DenseMLP at 0 is not in the first plan: recompute is not"));
  EXPECT_TRUE(contains(changes.json(), "\"differs\":true"));
}

TEST(Explain, DrawsAPicture) {
  const std::string svg = make_mlp()->explain(shape({4, 8})).svg();
  EXPECT_EQ(svg.rfind("<svg ", 0), 0);
  EXPECT_TRUE(contains(svg, "BackwardActivationBias"));
  EXPECT_TRUE(contains(svg, "float32 [4, 16]"));
  EXPECT_EQ(bytes_string(1023), "1023 B");
  EXPECT_EQ(bytes_string(1536), "1.5 KiB");
  EXPECT_EQ(bytes_string(int64_t{3} << 40), "3.0 TiB");
}

TEST(Strict, FailsWhereAFusionDoesNotFire) {
  Sequential mlp = make_mlp();
  const Tensor x = torch::randn({4, 8}, on_device());
  mlp->set_strict({"ForwardLinearBiasActivation"});
  mlp->forward(x);
  mlp->set_strict({"DenseMLP"});
  EXPECT_TRUE(contains(error_of([&] { mlp->forward(x); }), "recompute is not 'cheap'"));
  mlp->set_recompute(Recompute::Cheap);
  mlp->forward(x);

  FuserOptions options;
  options.strict = {"ForwardLinearBiasAdd"};
  OperationFuser fuser({Linear(8, 8).ptr(), GELU{}.ptr()}, options);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(contains(error_of([&] { fuser(x); }),
                         "'ForwardLinearBiasAdd' did not fire for [BasicLinear, Bias, GELU]: at 0 "
                         "BasicLinear: wanted AddExtraInput, found GELU"));
  }
}

TEST(Strict, AsAScope) {
  OperationFuser fuser({Linear(8, 8).ptr(), GELU{}.ptr()});
  const Tensor x = torch::randn({4, 8}, on_device());
  {
    const StrictScope strict({"ForwardLinearBiasActivation"});
    fuser(x);
    const StrictScope inner({"DenseMLP"}, StrictScope::Where::Any);
    fuser(x);
    EXPECT_TRUE(contains(error_of([&] { inner.finish(); }), "'DenseMLP' fired nowhere"));
    const StrictScope wrong({"ForwardLinearScaleAdd"});
    EXPECT_TRUE(contains(error_of([&] { fuser(x); }), "wanted ConstantScale, found Bias"));
  }
  EXPECT_FALSE(StrictScope::active());
  fuser(x);
}
