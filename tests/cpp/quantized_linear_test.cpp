// Linears, norms and activations under every recipe: results and gradients against float64 products
// of the dequantized operands, fused against unfused, and what is kept for backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "ligature/ligature.h"
#include "tolerance.h"

namespace ligature {
namespace {

struct NamedRecipe {
  const char* name;
  std::function<RecipePtr()> make;
};

std::vector<NamedRecipe> recipes() {
  return {
      {"delayed", [] { return std::make_shared<DelayedScaling>(); }},
      {"current", [] { return std::make_shared<Float8CurrentScaling>(); }},
      {"current e4m3 2^n",
       [] {
         return std::make_shared<Float8CurrentScaling>(
             Float8CurrentScalingOptions{Fp8Format::E4M3, true, 0});
       }},
      {"block", [] { return std::make_shared<Float8BlockScaling>(); }},
      {"block f32",
       [] {
         Float8BlockScalingOptions options;
         options.use_f32_scales = true;
         return std::make_shared<Float8BlockScaling>(options);
       }},
      {"mxfp8", [] { return std::make_shared<MXFP8BlockScaling>(); }},
      {"mxfp8 2d",
       [] {
         return std::make_shared<MXFP8BlockScaling>(
             MXFP8BlockScalingOptions{Fp8Format::Hybrid, true});
       }},
      {"nvfp4", [] { return std::make_shared<NVFP4BlockScaling>(); }},
      {"nvfp4 plain",
       [] {
         NVFP4BlockScalingOptions options;
         options.disable_rht = true;
         options.disable_stochastic_rounding = true;
         options.disable_2d_quantization = true;
         return std::make_shared<NVFP4BlockScaling>(options);
       }},
      {"nvfp4 by row, 4/6",
       [] {
         NVFP4BlockScalingOptions options;
         options.row_scaled_activation = true;
         options.nvfp4_4over6 = "all";
         return std::make_shared<NVFP4BlockScaling>(options);
       }},
  };
}

Tensor wide(const QuantizedPtr& q, bool columnwise) {
  const bool narrow = columnwise && q->columnwise().defined();
  return (narrow ? q->only(false, true) : q)->dequantize(at::kFloat).to(at::kDouble);
}

/// The operand of a product over rows: the transpose, transformed where the format says so.
Tensor wide_transposed(const QuantizedPtr& q) {
  if (!q->format_tag().hadamard) return wide(q, true).t();
  const int64_t filled = (q->rows() + 15) / 16 * 16;
  return kernels::dequantize(q->columnwise(), q->format_tag(), filled, at::kFloat).to(at::kDouble);
}

QuantizedPtr quantized(const std::shared_ptr<Quantizer>& q, const Tensor& x) {
  return q->quantize(x, {true, true});
}

/// Two products of one recipe: `after` follows the linear and scales its output by `scale`.
void expect_products_of_dequantized(const RecipePtr& recipe, at::ScalarType dtype,
                                    std::tuple<int, int, int> sizes, const OpList& after,
                                    double scale, const std::vector<std::string>& backward) {
  const auto [t, k, n] = sizes;
  SCOPED_TRACE(std::string(c10::toString(dtype)) + " " + std::to_string(k));
  torch::manual_seed(1);
  BasicLinearOptions options(k, n);
  options.device = at::kCPU;
  options.dtype = dtype;
  BasicLinear linear(options);
  Tensor x = torch::randn({2, t, k}).to(dtype).requires_grad_();
  const Tensor dy = torch::randn({2, t, n}).to(dtype);
  const Tensor extra = torch::randn({2, t, n}).to(dtype);
  const bool adds = after.size() > 1;
  OpList ops{linear.ptr()};
  ops.insert(ops.end(), after.begin(), after.end());
  OperationFuser fuser(ops);
  Tensor y;
  {
    Autocast autocast({.recipe = recipe});
    y = fuser(x, adds ? std::vector<Tensor>{extra} : std::vector<Tensor>())[0];
  }
  std::vector<std::string> names;
  for (const PlanStep& step : fuser.plan()->backward) names.push_back(step.op->name());
  EXPECT_EQ(names, backward);
  EXPECT_EQ(y.scalar_type(), dtype);
  torch::manual_seed(2);
  y.backward(dy);

  const OpQuantizationPtr state = linear->quantization();
  ASSERT_NE(state, nullptr);
  for (auto& q : state->forward) {
    if (q->delayed) q->delayed->scale.fill_(1.0F);
  }
  if (const auto& delayed = state->backward[0]->delayed) {
    // What was quantized is remembered: the gradient as it came.
    EXPECT_EQ(delayed->history.max().item<float>(), dy.abs().max().item<float>());
  }
  const auto q_dy = recipe->make_quantizer({"linear", "grad_output", ""}, at::kCPU);
  const auto q_x = recipe->make_quantizer({"linear", "input", ""}, at::kCPU);
  const auto q_w = recipe->make_quantizer({"linear", "weight", ""}, at::kCPU);
  const QuantizedPtr xq = quantized(q_x, x.detach().view({2 * t, k}));
  const QuantizedPtr wq = quantized(q_w, linear->weight().detach());
  torch::manual_seed(2);
  const QuantizedPtr dyq = quantized(q_dy, dy.view({2 * t, n}));
  Tensor wanted = wide(xq, false).mm(wide(wq, false).t()) * scale;
  if (adds) wanted += extra.view({2 * t, n});
  expect_close(y.detach().view({2 * t, n}), wanted, dtype, "y");
  expect_close(x.grad().view({2 * t, k}), scale * wide(dyq, false).mm(wide(wq, true)), dtype, "dx");
  expect_close(linear->weight().grad(), scale * wide_transposed(dyq).mm(wide_transposed(xq).t()),
               dtype, "dw");
}

TEST(QuantizedLinear, BackwardIsOverridden) {
  for (const BackwardOverride given :
       {BackwardOverride::HighPrecision, BackwardOverride::Dequantized}) {
    const std::vector<RecipePtr> recipes{
        std::make_shared<Float8CurrentScaling>(
            Float8CurrentScalingOptions{.backward_override = given}),
        std::make_shared<Float8BlockScaling>(Float8BlockScalingOptions{.backward_override = given}),
        std::make_shared<MXFP8BlockScaling>(MXFP8BlockScalingOptions{.backward_override = given}),
        std::make_shared<NVFP4BlockScaling>(NVFP4BlockScalingOptions{.backward_override = given}),
    };
    for (const RecipePtr& recipe : recipes) {
      SCOPED_TRACE(recipe->key());
      torch::manual_seed(1);
      BasicLinearOptions options(160, 48);
      options.device = at::kCPU;
      BasicLinear linear(options);
      const Tensor x = torch::randn({64, 160}).requires_grad_();
      const Tensor dy = torch::randn({64, 48});
      OperationFuser fuser({linear.ptr()});
      Tensor y;
      {
        Autocast autocast({.recipe = recipe});
        y = fuser(x)[0];
      }
      y.backward(dy);
      const auto q_x = recipe->make_quantizer({"linear", "input", ""}, at::kCPU);
      const auto q_w = recipe->make_quantizer({"linear", "weight", ""}, at::kCPU);
      const Tensor xq = wide(quantized(q_x, x.detach()), false);
      const Tensor wq = wide(quantized(q_w, linear->weight().detach()), false);
      expect_close(y.detach(), xq.mm(wq.t()), at::kFloat, "y");
      const bool high = given == BackwardOverride::HighPrecision;
      const Tensor wide_dy = dy.to(at::kDouble);
      expect_close(x.grad(), wide_dy.mm(high ? linear->weight().detach().to(at::kDouble) : wq),
                   at::kFloat, "dx");
      expect_close(linear->weight().grad(), wide_dy.t().mm(high ? x.detach().to(at::kDouble) : xq),
                   at::kFloat, "dw");
      EXPECT_EQ(linear->quantization()->backward_quantizer(0), nullptr);
    }
  }
}

TEST(QuantizedLinear, ProductsOfTheDequantizedOperands) {
  for (const auto& [name, make] : recipes()) {
    SCOPED_TRACE(name);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const std::tuple<int, int, int>& sizes : {std::tuple(48, 160, 272), {7, 33, 19}}) {
        expect_products_of_dequantized(make(), dtype, sizes, {}, 1.0, {"BasicLinear"});
      }
    }
  }
}

TEST(QuantizedLinear, AScaleIsTheAlphaOfTheProducts) {
  for (const auto& [name, make] : recipes()) {
    SCOPED_TRACE(name);
    for (const double scale : {3.0, -0.7, 0.0}) {
      const OpPtr by = ConstantScale(scale).ptr();
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        expect_products_of_dequantized(make(), dtype, {7, 33, 19}, {by}, scale,
                                       {"BackwardLinearScale"});
        expect_products_of_dequantized(make(), dtype, {7, 33, 19}, {by, AddExtraInput().ptr()},
                                       scale, {"BackwardLinearScale", "AddExtraInput"});
      }
    }
  }
}

struct Block {
  LayerNorm norm{nullptr};
  Linear fc1{nullptr};
  Linear fc2{nullptr};
  std::vector<OpPtr> ops;

  explicit Block(at::ScalarType dtype, bool residual) {
    torch::manual_seed(3);
    NormOptions norm_options({96});
    norm_options.device = at::kCPU;
    norm_options.dtype = dtype;
    norm = LayerNorm(norm_options);
    LinearOptions up(96, 320);
    up.device = at::kCPU;
    up.dtype = dtype;
    fc1 = Linear(up);
    LinearOptions down(160, 96);
    down.device = at::kCPU;
    down.dtype = dtype;
    fc2 = Linear(down);
    MakeExtraOutput fork;
    AddExtraInput join;
    if (residual) {
      fork->set_extra_output_channel(0, "residual", false);
      join->set_extra_input_channel(0, "residual");
      ops.push_back(fork.ptr());
    }
    for (const OpPtr& op :
         {OpPtr(norm.ptr()), OpPtr(fc1.ptr()), OpPtr(SwiGLU().ptr()), OpPtr(fc2.ptr())}) {
      ops.push_back(op);
    }
    if (residual) ops.push_back(join.ptr());
  }
};

struct Result {
  Tensor y;
  std::vector<Tensor> grads;
};

Result run(const RecipePtr& recipe, at::ScalarType dtype, bool residual, bool fuse,
           Recompute recompute) {
  Block block(dtype, residual);
  FuserOptions options;
  options.fuse = fuse;
  options.recompute = recompute;
  OperationFuser fuser(block.ops, options);
  torch::manual_seed(4);
  Tensor x = torch::randn({80, 96}).to(dtype).requires_grad_();
  const Tensor dy = torch::randn({80, 96}).to(dtype);
  Result out;
  // Twice, so that delayed scaling has other factors in the second step.
  for (int step = 0; step < 2; ++step) {
    x.mutable_grad() = Tensor();
    for (const Tensor& p : {block.norm->own_parameters()["weight"], block.fc1->weight(),
                            block.fc1->bias(), block.fc2->weight(), block.fc2->bias()}) {
      p.mutable_grad() = Tensor();
    }
    {
      Autocast autocast({.recipe = recipe});
      out.y = fuser(x)[0];
    }
    torch::manual_seed(5);
    out.y.backward(dy);
  }
  out.y = out.y.detach();
  out.grads = {x.grad(),
               block.norm->own_parameters()["weight"].grad(),
               block.fc1->weight().grad(),
               block.fc1->bias().grad(),
               block.fc2->weight().grad(),
               block.fc2->bias().grad()};
  return out;
}

// A fused block does the same products of the same quantized operands: only the order of its
// roundings in high precision may differ.
TEST(QuantizedLinear, FusedIsUnfused) {
  for (const auto& [name, make] : recipes()) {
    for (const bool residual : {false, true}) {
      for (const Recompute recompute : {Recompute::None, Recompute::Cheap}) {
        SCOPED_TRACE(std::string(name) + (residual ? " residual" : "") +
                     (recompute == Recompute::Cheap ? " recompute" : ""));
        const RecipePtr recipe = make();
        const Result expected = run(recipe, at::kFloat, residual, false, Recompute::None);
        const Result actual = run(recipe, at::kFloat, residual, true, recompute);
        const auto close = [](const Tensor& a, const Tensor& b) {
          // A value at the border of two codes may fall to either side.
          const double scale = b.abs().max().item<double>();
          return ((a - b).abs() > 1e-5 * scale).to(at::kDouble).mean().item<double>();
        };
        EXPECT_LT(close(actual.y, expected.y), 0.02) << "y";
        for (size_t i = 0; i < expected.grads.size(); ++i) {
          EXPECT_LT(close(actual.grads[i], expected.grads[i]), 0.02) << "gradient " << i;
        }
      }
    }
  }
}

TEST(QuantizedLinear, TheWeightIsQuantizedOncePerVersion) {
  BasicLinearOptions options(64, 32);
  options.device = at::kCPU;
  BasicLinear linear(options);
  OperationFuser fuser({linear.ptr()});
  const auto recipe = std::make_shared<Float8CurrentScaling>();
  const Tensor x = torch::randn({16, 64});
  const auto cached = [&] {
    Autocast autocast({.recipe = recipe});
    fuser(x);
    const OpQuantizationPtr own = linear->quantization();
    const Tensor& weight = linear->weight();
    return (*own->weights)[0].get(weight, *own->forward_quantizer(1), {true, false}, weight);
  };
  const QuantizedPtr first = cached();
  EXPECT_EQ(first, cached());
  {
    torch::NoGradGuard no_grad;
    linear->weight().mul_(2);
  }
  const QuantizedPtr second = cached();
  EXPECT_NE(first, second);
  // A write that no version counter sees.
  linear->weight().data().mul_(3);
  EXPECT_NE(second, cached());
}

TEST(QuantizedLinear, DelayedScalingUpdatesOncePerContextAndAfterBackward) {
  BasicLinearOptions options(64, 32);
  options.device = at::kCPU;
  BasicLinear linear(options);
  OperationFuser fuser({linear.ptr()});
  DelayedScalingOptions recipe_options;
  recipe_options.amax_history_len = 3;
  const auto recipe = std::make_shared<DelayedScaling>(recipe_options);
  Tensor x = torch::full({4, 64}, 2.0F).requires_grad_();
  Tensor y;
  {
    Autocast outer({.recipe = recipe});
    fuser(torch::full({4, 64}, 8.0F));
    {
      Autocast inner({.recipe = recipe});
      y = fuser(x)[0];
    }
    EXPECT_EQ(linear->quantization()->forward[0]->delayed->scale.item<float>(), 1.0F);
  }
  const DelayedScale& input = *linear->quantization()->forward[0]->delayed;
  EXPECT_EQ(input.scale.item<float>(), 448.0F / 8.0F);
  EXPECT_EQ(input.history[0].item<float>(), 8.0F);
  const DelayedScale& grad = *linear->quantization()->backward[0]->delayed;
  EXPECT_EQ(grad.scale.item<float>(), 1.0F);
  y.backward(torch::full({4, 32}, 0.5F));
  EXPECT_EQ(grad.scale.item<float>(), 57344.0F / 0.5F);
  EXPECT_EQ(grad.amax.item<float>(), 0.0F);
}

TEST(QuantizedLinear, AQuantizedValueGoesFromFuserToFuser) {
  Block block(at::kBFloat16, false);
  Quantize quantize;
  OperationFuser head({block.norm.ptr(), quantize.ptr()});
  OperationFuser tail({block.fc1.ptr()});
  OperationFuser whole({block.norm.ptr(), block.fc1.ptr()});
  const auto recipe = std::make_shared<MXFP8BlockScaling>();
  Tensor x = torch::randn({32, 96}).to(at::kBFloat16).requires_grad_();
  Autocast autocast({.recipe = recipe});
  const Tensor between = head(x)[0];
  ASSERT_NE(quantized_of(between), nullptr);
  EXPECT_TRUE(between.requires_grad());
  const Tensor y = tail(between)[0];
  const Tensor expected = whole(x)[0];
  EXPECT_TRUE(torch::equal(y, expected));
  const auto grads = torch::autograd::grad({y.sum()}, {x, block.fc1->weight()});
  const auto wanted = torch::autograd::grad({expected.sum()}, {x, block.fc1->weight()});
  EXPECT_TRUE(torch::equal(grads[0], wanted[0]));
  EXPECT_TRUE(torch::equal(grads[1], wanted[1]));
}

TEST(QuantizedLinear, CalibrationNotesButDoesNotQuantize) {
  BasicLinearOptions options(64, 32);
  options.device = at::kCPU;
  BasicLinear linear(options);
  OperationFuser fuser({linear.ptr()});
  const Tensor x = torch::randn({16, 64});
  const Tensor plain = fuser(x)[0];
  {
    AutocastOptions calibrating;
    calibrating.enabled = false;
    calibrating.calibrating = true;
    Autocast autocast(calibrating);
    EXPECT_TRUE(torch::equal(fuser(x)[0], plain));
  }
  const DelayedScale& input = *linear->quantization()->forward[0]->delayed;
  EXPECT_EQ(input.history[0].item<float>(), x.abs().max().item<float>());
}

TEST(QuantizedLinear, RecipesOfDelayedScalingHaveOneState) {
  BasicLinearOptions options(64, 32);
  options.device = at::kCPU;
  BasicLinear linear(options);
  OperationFuser fuser({linear.ptr()});
  const auto run = [&](const RecipePtr& recipe, float value) {
    Autocast autocast({.recipe = recipe});
    fuser(torch::full({4, 64}, value));
    return linear->quantization()->forward[0]->delayed;
  };
  DelayedScalingOptions other;
  other.margin = 1;
  const auto a = std::make_shared<DelayedScaling>();
  const auto b = std::make_shared<DelayedScaling>(other);
  const DelayedScalePtr of_a = run(a, 2.0F);
  const DelayedScalePtr of_b = run(b, 4.0F);
  EXPECT_EQ(of_a, of_b);
  EXPECT_EQ(of_b->scale.item<float>(), 448.0F / 4.0F / 2.0F);
  EXPECT_EQ(run(std::make_shared<DelayedScaling>(), 1.0F), of_a);
  EXPECT_EQ(of_a->scale.item<float>(), 448.0F / 4.0F);
}

TEST(QuantizedLinear, ActivationsKeepTheirInputInFp8) {
  ActivationOptions options;
  options.cache_quantized_input = true;
  Block block(at::kBFloat16, false);
  OperationFuser fuser({block.fc1.ptr(), GELU(options).ptr()});
  OperationFuser plain({block.fc1.ptr(), GELU().ptr()});
  Tensor x = torch::randn({32, 96}).to(at::kBFloat16).requires_grad_();
  const Explanation small = fuser.explain(x);
  const Explanation large = plain.explain(x);
  EXPECT_LT(small.saved_bytes(), large.saved_bytes());
  const Tensor y = fuser(x)[0];
  EXPECT_TRUE(torch::equal(y, plain(x)[0]));
  const Tensor dx = torch::autograd::grad({y.sum()}, {x})[0];
  const Tensor reference = torch::autograd::grad({plain(x)[0].sum()}, {x})[0];
  EXPECT_LT((dx - reference).abs().max().item<float>(), 0.1 * reference.abs().max().item<float>());
}

TEST(QuantizedLinear, LeftOutWhereItIsSlower) {
  Block block(at::kBFloat16, false);
  OperationFuser fuser({block.fc1.ptr()});
  const Tensor x = torch::randn({32, 96}).to(at::kBFloat16);
  const Tensor plain = fuser(x)[0];
  AutocastOptions options{.recipe = std::make_shared<Float8CurrentScaling>()};
  Tensor low;
  {
    Autocast autocast(options);
    low = fuser(x)[0];
    EXPECT_EQ(fuser.explain().parts[0].recipe, "Float8CurrentScaling");
  }
  options.only_where_faster = true;
  Autocast autocast(options);
  EXPECT_TRUE(torch::equal(fuser(x)[0], plain));
  EXPECT_FALSE(torch::equal(low, plain));
  const ExplainedPart part = fuser.explain().parts[0];
  EXPECT_TRUE(part.recipe.empty());
  EXPECT_NE(part.note.find("Float8CurrentScaling not used"), std::string::npos) << part.note;
}

TEST(QuantizedLinear, RefusesFloat64) {
  BasicLinearOptions options(64, 32);
  options.device = at::kCPU;
  options.dtype = at::kDouble;
  BasicLinear linear(options);
  OperationFuser fuser({linear.ptr()});
  Autocast autocast;
  EXPECT_THROW(fuser(torch::randn({4, 64}, at::kDouble)), c10::TypeError);
}

}  // namespace
}  // namespace ligature
