// Chains of operations that the built-in fusions take, and runs of a plan whose two directions come
// from different plans.
#pragma once

#include "ligature/fuser/registry.h"
#include "ops_test_support.h"

struct Chain {
  std::string fusion;   ///< the step that must appear ...
  ligature::Pass pass;  ///< ... in this pass
  ligature::OpList ops;
  Inputs inputs;
};

inline ligature::OpPtr make_linear(int64_t in, int64_t out, at::ScalarType dtype) {
  ligature::BasicLinearOptions options(in, out);
  options.dtype = dtype;
  return ligature::BasicLinear(options).ptr();
}

inline ligature::OpPtr make_bias(int64_t size, at::ScalarType dtype) {
  ligature::BiasOptions options(size);
  options.dtype = dtype;
  return ligature::Bias(options).ptr();
}

template <class Norm>
ligature::OpPtr make_norm(int64_t size, at::ScalarType dtype) {
  ligature::NormOptions options(size);
  options.dtype = dtype;
  return Norm(options).ptr();
}

inline ligature::OpPtr make_fork(bool in_place = false) {
  return ligature::MakeExtraOutput(ligature::MakeExtraOutputOptions(in_place)).ptr();
}

inline ligature::OpPtr make_join(bool in_place = false) {
  return ligature::AddExtraInput(ligature::AddExtraInputOptions(in_place)).ptr();
}

inline void randomize_parameters(const ligature::OpList& ops) {
  torch::NoGradGuard no_grad;
  for (Tensor& parameter : parameters_of(ops)) parameter.uniform_(-0.5, 0.5);
}

/// Every built-in fusion of one direction, at least once.
inline std::vector<Chain> one_direction_chains(at::ScalarType dtype) {
  using namespace ligature;
  using Pass = ligature::Pass;
  const int64_t n = 8, m = 6;
  const auto x = [&] { return strided_leaf({2, 3, n}, dtype); };
  const auto skip = [&] { return leaf({2, 3, m}, dtype); };
  const auto linear = [&] { return make_linear(n, m, dtype); };
  const auto bias = [&] { return make_bias(m, dtype); };
  const OpPtr scale = ConstantScale(-1.5).ptr();
  std::vector<Chain> chains{
      {"ForwardLinearBiasActivation", Pass::Forward, {linear(), bias()}, {x(), {}}},
      {"ForwardLinearBiasActivation", Pass::Forward, {linear(), GELU().ptr()}, {x(), {}}},
      {"ForwardLinearBiasActivation", Pass::Forward, {linear(), bias(), SReLU().ptr()}, {x(), {}}},
      {"ForwardLinearBiasActivation", Pass::Forward, {linear(), bias(), SwiGLU().ptr()}, {x(), {}}},
      {"ForwardLinearBiasAdd", Pass::Forward, {linear(), make_join()}, {x(), {skip()}}},
      {"ForwardLinearBiasAdd", Pass::Forward, {linear(), bias(), make_join()}, {x(), {skip()}}},
      {"ForwardLinearScaleAdd", Pass::Forward, {linear(), scale, make_join()}, {x(), {skip()}}},
      {"BackwardActivationBias", Pass::Backward, {make_bias(n, dtype), SiLU().ptr()}, {x(), {}}},
      {"BackwardActivationBias", Pass::Backward, {linear(), bias(), GEGLU().ptr()}, {x(), {}}},
      {"BackwardLinearAdd", Pass::Backward, {make_fork(), linear()}, {x(), {}}},
      {"BackwardLinearAdd", Pass::Backward, {make_fork(true), linear()}, {x(), {}}},
      {"BackwardLinearScale", Pass::Backward, {linear(), scale}, {x(), {}}},
      {"BackwardAddLayerNorm",
       Pass::Backward,
       {make_fork(), make_norm<LayerNorm>(n, dtype)},
       {x(), {}}},
      {"BackwardAddRMSNorm",
       Pass::Backward,
       {make_fork(true), make_norm<RMSNorm>(n, dtype)},
       {x(), {}}}};
  if (on_device().device().is_cpu()) {  // elsewhere it does not pay
    for (const OpPtr& activation : std::initializer_list<OpPtr>{GELU().ptr(), SwiGLU().ptr()}) {
      chains.push_back(
          {"ForwardBiasActivation", Pass::Forward, {make_bias(n, dtype), activation}, {x(), {}}});
    }
  }
  for (const Chain& chain : chains) randomize_parameters(chain.ops);
  return chains;
}

inline std::string describe_chain(const Chain& chain) {
  return chain.fusion + " in " + ligature::describe(chain.ops) + " " +
         c10::toString(chain.inputs.x.scalar_type());
}

/// Runs operations with a forward fused or not and a backward fused or not.
inline RunResult run_mixed(const ligature::OpList& ops, const Inputs& inputs, bool fuse_forward,
                           bool fuse_backward) {
  using namespace ligature;
  OperationFuser source(ops);
  Call call;
  call.input = inputs.x;
  call.extra_inputs = inputs.extras;
  call.param_offsets.push_back(0);
  for (const auto& op : source.basic_ops()) {
    op->collect_parameters(call.params);
    call.param_offsets.push_back(call.params.size());
    call.training.push_back(true);
  }
  const Tensors leaves = leaves_of(inputs, call.params);
  const GradPlan grads = plan_gradients(call, source.wiring(), source.num_basic_ops());
  PlanOptions options;
  options.dtype = inputs.x.scalar_type();
  const auto wiring = std::make_shared<const Wiring>(source.wiring());
  const auto plan = [&](bool fuse) {
    return make_plan(source.basic_ops(), wiring, options, grads.first_backward_op, fuse);
  };
  auto mixed = std::make_shared<Plan>(*plan(fuse_forward));
  mixed->backward = plan(fuse_backward)->backward;
  RunResult result;
  result.outputs = execute(mixed, std::move(call), grads);
  result.grads = gradients(result.outputs, leaves);
  return result;
}

/// Are the steps the ones of a plan that joins everything into `name`?
inline void expect_only_step(const std::vector<ligature::PlanStep>& steps,
                             const std::string& name) {
  EXPECT_EQ(step_names(steps), std::vector<std::string>{name});
}
