// What every operation owes its neighbours, called by hand: the gradients of a step have the dtypes
// of what they belong to. At the ends of a fuser autograd would cast them and hide a mistake.
#include <gtest/gtest.h>

#include "fused_test_support.h"
#include "ligature/fused/dense_mlp.h"

using namespace ligature;

namespace {

struct Given {
  Tensor x;
  Tensors extras;
  std::optional<at::ScalarType> autocast;
};

/// Runs operations step by step, without a fuser.
class ByHand {
 public:
  ByHand(const OpList& ops, const Given& given) : given_(given) {
    for (const auto& op : ops) {
      for (auto& basic : op->basic_ops()) basic_.push_back(std::move(basic));
    }
    const size_t n = basic_.size();
    params.resize(n);
    extras.resize(n);
    contexts.resize(n);
    args_.resize(n);
    size_t next_extra = 0;
    for (size_t i = 0; i < n; ++i) {
      basic_[i]->collect_parameters(params[i]);
      for (size_t j = 0; j < basic_[i]->num_extra_inputs(); ++j) {
        extras[i].push_back(given.extras[next_extra++]);
      }
      args_[i].params = params[i];
      args_[i].extra_inputs = extras[i];
      args_[i].autocast_dtype = given.autocast;
      GradFlags all{true, true, {}, {}};
      for (size_t j = 0; j < params[i].size(); ++j) all.params.set(j);
      for (size_t j = 0; j < extras[i].size(); ++j) all.extra_inputs.set(j);
      need(i, all);
    }
  }

  void need(size_t i, const GradFlags& flags) {
    args_[i].requires_grad = flags;
    contexts[i].requires_grad = flags;
  }

  Value forward(const OpList& steps) {
    torch::NoGradGuard no_grad;
    Value value = given_.x;
    grad_extras_.assign(basic_.size(), {});
    input_dtypes.clear();
    size_t first = 0;
    for (const auto& step : steps) {
      input_dtypes.push_back(value.dtype());
      const size_t count = step->basic_ops().size();
      std::vector<OperationContext*> ctxs = contexts_of(first, count);
      auto result = step->fuser_forward(ctxs, value, at::ArrayRef(args_).slice(first, count));
      for (size_t k = 0; k < count; ++k) {
        for (const Tensor& y : result.extra_outputs[k]) {
          grad_extras_[first + k].push_back(at::ones_like(y));
        }
      }
      value = std::move(result.output);
      first += count;
    }
    return value;
  }

  /// `dtypes`: of the input of each basic operation.
  void expect_gradient_dtypes(const OpList& steps, const Value& y,
                              const std::vector<at::ScalarType>& dtypes) {
    torch::NoGradGuard no_grad;
    Value dy = at::ones_like(y.tensor());
    size_t end = basic_.size();
    for (size_t s = steps.size(); s-- > 0;) {
      const size_t count = steps[s]->basic_ops().size();
      const size_t first = end - count;
      std::vector<OperationContext*> ctxs = contexts_of(first, count);
      const auto grads = steps[s]->fuser_backward(
          ctxs, dy, at::ArrayRef<Tensors>(grad_extras_).slice(first, count));
      const std::string where = steps[s]->name() + " of " + c10::toString(given_.x.scalar_type());
      EXPECT_EQ(grads.grad_input.dtype(), dtypes[first]) << where;
      for (size_t i = first; i < end; ++i) {
        ASSERT_EQ(grads.grad_params[i - first].size(), params[i].size()) << where;
        for (size_t j = 0; j < params[i].size(); ++j) {
          EXPECT_EQ(grads.grad_params[i - first][j].scalar_type(), params[i][j].scalar_type())
              << where << ", parameter " << j << " of " << basic_[i]->name();
        }
        for (size_t j = 0; j < extras[i].size(); ++j) {
          EXPECT_EQ(grads.grad_extra_inputs[i - first][j].scalar_type(), extras[i][j].scalar_type())
              << where << ", extra input " << j;
        }
      }
      dy = grads.grad_input;
      end = first;
    }
    EXPECT_EQ(dy.sizes(), given_.x.sizes());
  }

  std::vector<Tensors> params, extras;
  std::vector<OperationContext> contexts;
  std::vector<at::ScalarType> input_dtypes;  // of each step of the last forward

 private:
  std::vector<OperationContext*> contexts_of(size_t first, size_t count) {
    std::vector<OperationContext*> ctxs;
    for (size_t i = first; i < first + count; ++i) ctxs.push_back(&contexts[i]);
    return ctxs;
  }

  Given given_;
  std::vector<BasicOpPtr> basic_;
  std::vector<OpArgs> args_;
  std::vector<Tensors> grad_extras_;
};

/// The basic operations, and the same with the fusions of one pass.
OpList fuse(const OpList& ops, Pass pass) {
  OpList result = ops;
  for (const FusionRule& rule : builtin_fusions(pass)) {
    result = apply_rule(rule, result, {}, nullptr);
  }
  return result;
}

TEST(OpsContract, GradientsHaveTheDtypesOfWhatTheyBelongTo) {
  const auto layer_norm = [](at::ScalarType weight, at::ScalarType bias) {
    OpPtr op = make_norm<LayerNorm>(8, weight);
    op->named_parameters()["bias"].set_data(at::zeros({8}, on_device(bias)));
    return op;
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::optional<at::ScalarType> autocast :
         {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
      const Tensor x = leaf({4, 8}, dtype);
      struct Step {
        OpPtr op;
        Tensors extras;
      };
      for (const Step& step : std::vector<Step>{{make_linear(8, 6, at::kFloat), {}},
                                                {make_bias(8, at::kFloat), {}},
                                                {layer_norm(at::kFloat, at::kDouble), {}},
                                                {make_norm<RMSNorm>(8, at::kFloat), {}},
                                                {L2Normalization().ptr(), {}},
                                                {GELU().ptr(), {}},
                                                {SwiGLU().ptr(), {}},
                                                {ScaledSwiGLU().ptr(), {leaf({4}, at::kFloat)}},
                                                {ConstantScale(2.0).ptr(), {}},
                                                {Dropout(0.5).ptr(), {}},
                                                {Identity().ptr(), {}},
                                                {Reshape(ReshapeOptions({-1})).ptr(), {}},
                                                {make_join(), {leaf({4, 8}, at::kFloat)}},
                                                {make_join(true), {leaf({4, 8}, at::kFloat)}},
                                                {make_fork(), {}}}) {
        ByHand run({step.op}, {x, step.extras, autocast});
        const Value y = run.forward({step.op});
        run.expect_gradient_dtypes({step.op}, y, run.input_dtypes);
      }
    }
  }
}

TEST(OpsContract, FusedGradientsHaveTheDtypesOfWhatTheyBelongTo) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::optional<at::ScalarType> autocast :
         {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
      for (const Chain& chain : one_direction_chains(at::kFloat)) {
        for (const auto& basic : chain.ops) {
          if (auto* bias = basic->as<BiasImpl>()) {
            bias->named_parameters()["bias"].set_data(bias->parameters()[0].to(at::kDouble));
          }
        }
        const Given given{leaf(chain.inputs.x.sizes(), dtype), chain.inputs.extras, autocast};
        ByHand plain(chain.ops, given);
        const Value y = plain.forward(chain.ops);
        plain.expect_gradient_dtypes(fuse(chain.ops, Pass::Backward), y, plain.input_dtypes);
        ByHand fused(chain.ops, given);
        fused.forward(fuse(chain.ops, Pass::Forward));
        fused.expect_gradient_dtypes(chain.ops, y, plain.input_dtypes);
      }
      OpList ops{make_norm<LayerNorm>(8, at::kFloat),
                 make_linear(8, 6, at::kFloat),
                 make_bias(6, at::kFloat),
                 SwiGLU().ptr(),
                 make_linear(3, 8, at::kFloat),
                 make_bias(8, at::kDouble)};
      const OpList joint{std::make_shared<DenseMLP>(ops)};
      ByHand run(ops, {leaf({4, 8}, dtype), {}, autocast});
      const Value y = run.forward(joint);
      run.expect_gradient_dtypes(joint, y, {dtype});
    }
  }
}

TEST(OpsContract, FusedForwardsSaveNothingForFrozenOperations) {
  for (const Chain& chain : one_direction_chains(at::kFloat)) {
    if (chain.pass != Pass::Forward) continue;
    ByHand run(chain.ops, {chain.inputs.x, chain.inputs.extras, std::nullopt});
    run.need(0, {});
    run.forward(fuse(chain.ops, Pass::Forward));
    EXPECT_EQ(run.contexts[0].num_saved(), 0U) << describe_chain(chain);
    EXPECT_TRUE(run.contexts[0].state.empty()) << describe_chain(chain);
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
    } else if (name == "GroupedLinear") {
      options.set("num_groups", int64_t{2});
      options.set("in_features", int64_t{4});
      options.set("out_features", int64_t{4});
    } else if (name == "Dispatch") {
      options.set("num_experts", int64_t{3});
    } else if (name == "TopKRouter") {
      options.set("hidden_size", int64_t{4});
      options.set("num_experts", int64_t{3});
      options.set("top_k", int64_t{2});
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
