// What every operation owes its neighbours, called by hand: the gradients of a step have the dtypes
// of what they belong to. At the ends of a fuser autograd would cast them and hide a mistake.
#include <gtest/gtest.h>

#include "fused_test_support.h"
#include "ligature/fused/dense_mlp.h"

using namespace ligature;

namespace {

struct Step {
  OpPtr op;
  Tensor x;
  Tensors extras;
  std::optional<at::ScalarType> autocast;
};

void expect_gradient_dtypes(const Step& step) {
  const auto basic = step.op->basic_ops();
  std::vector<Tensors> params(basic.size()), extras(basic.size()), grad_extras(basic.size());
  std::vector<OpArgs> args(basic.size());
  std::vector<OperationContext> contexts(basic.size());
  std::vector<OperationContext*> ctxs;
  size_t next_extra = 0;
  for (size_t i = 0; i < basic.size(); ++i) {
    basic[i]->collect_parameters(params[i]);
    for (size_t j = 0; j < basic[i]->num_extra_inputs(); ++j) {
      extras[i].push_back(step.extras[next_extra++]);
    }
    args[i].params = params[i];
    args[i].extra_inputs = extras[i];
    args[i].autocast_dtype = step.autocast;
    args[i].requires_grad = {true, true, ~uint64_t{0}, ~uint64_t{0}};
    contexts[i].requires_grad = args[i].requires_grad;
    ctxs.push_back(&contexts[i]);
  }
  torch::NoGradGuard no_grad;
  FuserForwardResult forward = step.op->fuser_forward(ctxs, step.x, args);
  for (size_t i = 0; i < basic.size(); ++i) {
    for (const Tensor& y : forward.extra_outputs[i]) grad_extras[i].push_back(at::ones_like(y));
  }
  const std::string where = step.op->name() + " of " + c10::toString(step.x.scalar_type());
  const FuserBackwardResult grads =
      step.op->fuser_backward(ctxs, at::ones_like(forward.output.tensor()), grad_extras);
  EXPECT_EQ(grads.grad_input.dtype(), step.x.scalar_type()) << where;
  EXPECT_EQ(grads.grad_input.sizes(), step.x.sizes()) << where;
  for (size_t i = 0; i < basic.size(); ++i) {
    ASSERT_EQ(grads.grad_params[i].size(), params[i].size()) << where;
    for (size_t j = 0; j < params[i].size(); ++j) {
      EXPECT_EQ(grads.grad_params[i][j].scalar_type(), params[i][j].scalar_type())
          << where << ", parameter " << j;
    }
    for (size_t j = 0; j < extras[i].size(); ++j) {
      EXPECT_EQ(grads.grad_extra_inputs[i][j].scalar_type(), extras[i][j].scalar_type())
          << where << ", extra input " << j;
    }
  }
}

TEST(OpsContract, GradientsHaveTheDtypesOfWhatTheyBelongTo) {
  const auto layer_norm = [](at::ScalarType weight, at::ScalarType bias) {
    OpPtr op = make_norm<LayerNorm>(8, weight);
    op->named_parameters()["bias"].set_data(at::zeros({8}, bias));
    return op;
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::optional<at::ScalarType> autocast :
         {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
      const Tensor x = leaf({4, 8}, dtype);
      for (const Step& step :
           std::vector<Step>{{make_linear(8, 6, at::kFloat), x, {}, autocast},
                             {make_bias(8, at::kFloat), x, {}, autocast},
                             {layer_norm(at::kFloat, at::kDouble), x, {}, autocast},
                             {make_norm<RMSNorm>(8, at::kFloat), x, {}, autocast},
                             {L2Normalization().ptr(), x, {}, autocast},
                             {GELU().ptr(), x, {}, autocast},
                             {SwiGLU().ptr(), x, {}, autocast},
                             {ScaledSwiGLU().ptr(), x, {leaf({4}, at::kFloat)}, autocast},
                             {ConstantScale(2.0).ptr(), x, {}, autocast},
                             {Dropout(0.5).ptr(), x, {}, autocast},
                             {Identity().ptr(), x, {}, autocast},
                             {Reshape(ReshapeOptions({-1})).ptr(), x, {}, autocast},
                             {make_join(), x, {leaf({4, 8}, at::kFloat)}, autocast},
                             {make_join(true), x, {leaf({4, 8}, at::kFloat)}, autocast},
                             {make_fork(), x, {}, autocast}}) {
        expect_gradient_dtypes(step);
      }
    }
  }
}

TEST(OpsContract, FusedGradientsHaveTheDtypesOfWhatTheyBelongTo) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::optional<at::ScalarType> autocast :
         {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
      OpList ops{make_norm<LayerNorm>(8, at::kFloat),
                 make_linear(8, 6, at::kFloat),
                 make_bias(6, at::kFloat),
                 SwiGLU().ptr(),
                 make_linear(3, 8, at::kFloat),
                 make_bias(8, at::kDouble)};
      expect_gradient_dtypes({std::make_shared<DenseMLP>(ops), leaf({4, 8}, dtype), {}, autocast});
    }
  }
}

TEST(OpsContract, OperationsAreMadeByName) {
  for (const std::string& name : operation_names()) {
    PlainState options;
    if (name == "BasicLinear") {
      options.set("in_features", int64_t{4});
      options.set("out_features", int64_t{4});
    } else if (name == "Bias") {
      options.set("size", int64_t{4});
    } else if (name == "LayerNorm" || name == "RMSNorm") {
      options.set("normalized_shape", std::vector<int64_t>{4});
    }
    BasicOpPtr op = make_operation(name, options);
    EXPECT_EQ(op->name(), name);
    BasicOpPtr again = make_operation(name, op->options_state());
    EXPECT_EQ(c10::str(*op), c10::str(*again));
    EXPECT_NE(c10::str(*op).find(name), std::string::npos);
    for (const auto& item : op->own_parameters()) EXPECT_TRUE(item.value().is_meta()) << name;
    auto copy = std::dynamic_pointer_cast<BasicOperation>(op->clone());
    ASSERT_NE(copy, nullptr) << name;
    EXPECT_EQ(c10::str(*op), c10::str(*copy));
    EXPECT_MESSAGE(op->set_option("no such option", true), "has no option 'no such option'");
  }
}

}  // namespace
