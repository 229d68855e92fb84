// Fusions of one direction: each fires, equals its basic operations, and leaves or takes contexts
// that the basic operations of the other direction understand.
#include <gtest/gtest.h>

#include <set>

#include "fused_test_support.h"

using namespace ligature;

namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

/// What may differ between fused and not: roundings of a value between two operations.
Tolerance fused_tolerance(at::ScalarType dtype) {
  Tolerance allowed = tolerance(dtype);
  if (dtype == at::kBFloat16) allowed.atol = 6e-2;
  return allowed;
}

const std::vector<PlanStep>& steps_of(const Plan& plan, Pass pass) {
  return pass == Pass::Forward ? plan.forward : plan.backward;
}

TEST(FusedOneDirection, EveryBuiltinFusionIsTakenBySomeChain) {
  std::set<std::string> taken;
  for (const Chain& chain : one_direction_chains(at::kDouble)) {
    OperationFuser fuser(chain.ops);
    fuser(chain.inputs.x.detach().requires_grad_(), chain.inputs.extras);
    for (const auto& report : fuser.plan()->reports) {
      for (const Consideration& considered : report.considered) {
        if (considered.reason.empty()) taken.insert(considered.fusion);
      }
    }
  }
  // For one kind of device; TestingWalk checks them everywhere.
  if (!on_device().device().is_cpu()) taken.insert("ForwardBiasActivation");
  for (const char* name : {"BackwardLinearActivation", "BackwardLinearBias"}) {
    taken.insert(name);
  }
  for (const Pass pass : {Pass::Forward, Pass::Backward}) {
    for (const FusionRule& rule : builtin_fusions(pass)) {
      if (rule.needs_ranks) continue;  // distributed_test has them
      EXPECT_TRUE(taken.count(rule.name)) << rule.name << " is taken by no chain";
    }
  }
}

TEST(FusedOneDirection, Fire) {
  for (const Chain& chain : one_direction_chains(at::kFloat)) {
    OperationFuser fuser(chain.ops);
    chain.inputs.x.requires_grad_();
    fuser(chain.inputs.x, chain.inputs.extras);
    EXPECT_TRUE(fires(steps_of(*fuser.plan(), chain.pass), chain.fusion)) << describe_chain(chain);
    OperationFuser plain(chain.ops, unfused());
    plain(chain.inputs.x, chain.inputs.extras);
    EXPECT_EQ(plain.plan()->forward.size(), chain.ops.size());
    EXPECT_EQ(plain.plan()->backward.size(), chain.ops.size());
  }
}

TEST(FusedOneDirection, EqualTheirBasicOperations) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const Chain& chain : one_direction_chains(dtype)) {
      const Tensors leaves = leaves_of(chain.inputs, parameters_of(chain.ops));
      for_each_frozen_pattern(leaves, [&](const std::string& pattern) {
        const RunResult wanted = run_mixed(chain.ops, chain.inputs, false, false);
        for (const auto& [forward, backward] :
             {std::pair{true, true}, {true, false}, {false, true}}) {
          const RunResult got = run_mixed(chain.ops, chain.inputs, forward, backward);
          const std::string where = describe_chain(chain) + ", " + pattern +
                                    (forward ? ", fused forward" : "") +
                                    (backward ? ", fused backward" : "");
          expect_same_run(got, wanted, leaves, where, fused_tolerance(dtype));
          for (size_t i = 0; i < got.outputs.size(); ++i) {
            EXPECT_EQ(got.outputs[i].scalar_type(), wanted.outputs[i].scalar_type()) << where;
          }
        }
      });
    }
  }
}

TEST(FusedOneDirection, TakeEmptyBatchesAndOneDimension) {
  for (const Chain& chain : one_direction_chains(at::kDouble)) {
    for (const std::vector<int64_t>& batch :
         std::vector<std::vector<int64_t>>{{}, {0}, {2, 0}, {1, 2, 1}}) {
      const auto with_batch = [&](const Tensor& like) {
        std::vector<int64_t> shape = batch;
        shape.push_back(like.size(-1));
        return leaf(shape).requires_grad_();
      };
      Inputs inputs{with_batch(chain.inputs.x), {}};
      for (const Tensor& extra : chain.inputs.extras) inputs.extras.push_back(with_batch(extra));
      const Tensors leaves = leaves_of(inputs, parameters_of(chain.ops));
      expect_same_run(run_mixed(chain.ops, inputs, true, true),
                      run_mixed(chain.ops, inputs, false, false), leaves, describe_chain(chain),
                      tolerance(at::kDouble));
    }
  }
}

TEST(FusedOneDirection, MixDtypesAsTheBasicOperations) {
  for (const bool autocast : {false, true}) {
    for (Chain& chain : one_direction_chains(at::kFloat)) {
      if (!autocast) {  // the input, and the branch, in another dtype than the weights
        chain.inputs.x = leaf(chain.inputs.x.sizes(), at::kDouble);
      }
      const Tensors leaves = leaves_of(chain.inputs, parameters_of(chain.ops));
      freeze(leaves, ~uint64_t{0});
      RunResult wanted, got;
      {
        WithAutocast mode(autocast);
        wanted = run_mixed(chain.ops, chain.inputs, false, false);
        got = run_mixed(chain.ops, chain.inputs, true, true);
      }
      for (size_t i = 0; i < got.outputs.size(); ++i) {
        EXPECT_EQ(got.outputs[i].scalar_type(), wanted.outputs[i].scalar_type())
            << describe_chain(chain);
      }
      expect_same_run(got, wanted, leaves, describe_chain(chain),
                      fused_tolerance(autocast ? at::kBFloat16 : at::kFloat));
    }
  }
}

TEST(FusedOneDirection, LinearIsItsParts) {
  LinearOptions options(8, 8);
  options.dtype = at::kDouble;
  Linear linear(options);
  OperationFuser fuser({linear.ptr(), GELU().ptr()});
  fuser(leaf({3, 8}).requires_grad_());
  expect_only_step(fuser.plan()->forward, "ForwardLinearBiasActivation");
  EXPECT_EQ(step_names(fuser.plan()->backward),
            (std::vector<std::string>{"BasicLinear", "BackwardActivationBias"}));
}

TEST(FusedOneDirection, ScaledActivationsAreNotFused) {
  OperationFuser fuser({make_linear(8, 8, at::kDouble), ScaledSwiGLU().ptr()});
  fuser(leaf({3, 8}), {leaf({3})});
  EXPECT_EQ(fuser.plan()->forward.size(), 2U);
}

TEST(FusedForwardAdd, WorksInPlace) {
  for (const bool scaled : {false, true}) {
    const OpPtr middle = scaled ? ConstantScale(2.0).ptr() : make_bias(6, at::kDouble);
    const OpList ops{make_linear(8, 6, at::kDouble), middle, make_join(true)};
    randomize_parameters(ops);
    for (const bool contiguous : {true, false}) {
      Tensor x = leaf({3, 8}).requires_grad_();
      Tensor source = (contiguous ? leaf({3, 6}) : strided_leaf({3, 6})).requires_grad_();
      Tensors grads;
      Tensor wanted;
      for (const bool fuse : {false, true}) {
        OperationFuser fuser(ops, fused_if(fuse));
        Tensor extra = source * 1;
        const auto version = extra._version();
        const Tensor y = fuser(x, {extra})[0];
        EXPECT_EQ(fuser.plan()->forward.size(), fuse ? 1U : 3U);
        EXPECT_TRUE(y.is_alias_of(extra));
        EXPECT_EQ(extra._version(), version + 1);
        const Tensors found = torch::autograd::grad({y}, {x, source}, {at::ones_like(y)});
        if (fuse) {
          expect_close(y.contiguous(), wanted, "in place");
          for (size_t i = 0; i < found.size(); ++i) {
            expect_close(found[i].contiguous(), grads[i].contiguous(), "in place, gradient");
          }
        }
        grads = found;
        wanted = y.detach().contiguous();
      }
    }
  }
}

TEST(FusedForwardAdd, ChecksWhatItWritesTo) {
  const OpList ops{make_linear(8, 8, at::kDouble), make_join(true)};
  OperationFuser fuser(ops);
  // The input itself as the branch: backward needs it, so it must not be overwritten.
  const Tensor x = leaf({3, 8});
  const Tensor before = x.clone();
  EXPECT_MESSAGE(fuser(x, {x}), "modified by an inplace operation");
  EXPECT_TRUE(at::equal(x, before));
  torch::NoGradGuard no_grad;
  const Tensor wanted = OperationFuser(ops, unfused())(x.clone(), {x.clone()})[0];
  expect_close(fuser(x, {x})[0], wanted, "the input as the branch");
}

TEST(FusedForwardActivation, ReusesTheGemmsOutputWithoutGradients) {
  const OpList ops{make_linear(8, 8, at::kDouble), GELU().ptr()};
  torch::NoGradGuard no_grad;
  const Tensor x = leaf({3, 8});
  const Tensor before = x.clone();
  expect_close(OperationFuser(ops)(x)[0], OperationFuser(ops, unfused())(x)[0], "no grad");
  EXPECT_TRUE(at::equal(x, before));
}

TEST(FusedBackwardLinearAdd, AddsIntoTheGradientInPlace) {
  for (const bool in_place : {false, true}) {
    OperationFuser fuser({make_fork(in_place), make_linear(8, 8, at::kDouble)});
    Tensor x = leaf({3, 8}).requires_grad_();
    const Tensors outputs = fuser(x);
    expect_only_step(fuser.plan()->backward, "BackwardLinearAdd");
    const Tensor dy = leaf({3, 8}), dextra = leaf({3, 8});
    const Tensor before = dextra.clone();
    const Tensor w = parameters_of({fuser.basic_ops()[1]})[0];
    torch::autograd::backward({outputs[0], outputs[1]}, {dy, dextra});
    expect_close(x.grad(), dy.matmul(w) + before, "dx");
    expect_close(w.grad(), dy.t().matmul(x), "dw");
    EXPECT_EQ(at::equal(dextra, before), !in_place);
  }
}

TEST(FusedBackwardLinearAdd, SparesAGradientThatIsUsedTwice) {
  OperationFuser fuser({make_fork(true), make_linear(8, 8, at::kDouble)});
  Tensor x = leaf({3, 8}).requires_grad_();
  const Tensors outputs = fuser(x);
  const Tensor dy = leaf({3, 8});
  const Tensor w = parameters_of({fuser.basic_ops()[1]})[0];
  torch::autograd::backward({outputs[0], outputs[1]}, {dy, dy});
  expect_close(x.grad(), dy.matmul(w) + dy, "dx");
}

TEST(FusedBackward, TakesMissingGradientsAsZero) {
  for (const Chain& chain : one_direction_chains(at::kDouble)) {
    if (chain.pass != Pass::Backward) continue;
    const Tensors params = parameters_of(chain.ops);
    const Tensors leaves = leaves_of(chain.inputs, params);
    freeze(leaves, ~uint64_t{0});
    for (const bool first : {true, false}) {
      RunResult runs[2];
      for (const bool fuse : {false, true}) {
        OperationFuser fuser(chain.ops, fused_if(fuse));
        const Tensors all = fuser(chain.inputs.x, chain.inputs.extras);
        runs[fuse].outputs = {first ? all.front() : all.back()};
        runs[fuse].grads = gradients(runs[fuse].outputs, leaves);
      }
      expect_same_run(runs[1], runs[0], leaves, describe_chain(chain), tolerance(at::kDouble));
    }
  }
}

}  // namespace
