// Calls that are recorded or watched: by torch.jit's tracer, by a profiler, by who counts GEMMs.
// And how long what a graph calls lives.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/compile/flat.h"
#include "ligature/compile/ops.h"
#include "ligature/ligature.h"

namespace ligature {
namespace {

using compile::FlatCall;
using compile::TracedCall;
using torch::jit::Stack;

Tensor input(at::IntArrayRef sizes) {
  return torch::randn(sizes, on_device()).requires_grad_(true);
}

Sequential mlp() {
  Sequential model(LayerNorm(32), Linear(32, 64), SwiGLU(), Linear(32, 32));
  model->to(on_device().device());
  return model;
}

std::shared_ptr<torch::jit::Graph> trace(const std::function<Tensor(const Tensor&)>& f,
                                         const Tensor& x) {
  const auto run = [&](Stack stack) { return Stack{f(stack[0].toTensor())}; };
  return torch::jit::tracer::trace({x}, run, [](const Tensor&) { return std::string(); })
      .first->graph;
}

TEST(Recorded, ATraceComputesWithWhatItIsGiven) {
  torch::manual_seed(1);
  Sequential model = mlp();
  for (Tensor& p : model->parameters()) p.requires_grad_(false);
  const auto call = [&](const Tensor& x) { return model->forward(x); };
  torch::jit::GraphExecutor graph(trace(call, input({6, 32})), "model");
  for (const int64_t rows : {6, 9}) {
    const Tensor x = input({rows, 32});
    Stack stack{x};
    graph.run(stack);
    const Tensor y = stack[0].toTensor(), wanted = model->forward(x);
    EXPECT_TRUE(torch::equal(y, wanted));
    const Tensor dy = torch::randn_like(y);
    EXPECT_TRUE(torch::equal(torch::autograd::grad({y}, {x}, {dy})[0],
                             torch::autograd::grad({wanted}, {x}, {dy})[0]));
  }
}

TEST(Recorded, ATraceOutlivesTheModel) {
  const Tensor x = input({6, 32});
  Tensor wanted;
  std::shared_ptr<torch::jit::Graph> graph;
  {
    Sequential model = mlp();
    for (Tensor& p : model->parameters()) p.requires_grad_(false);
    wanted = model->forward(x);
    graph = trace([&](const Tensor& t) { return model->forward(t); }, input({6, 32}));
  }
  mlp()->forward(x);
  torch::jit::GraphExecutor executor(graph, "model");
  Stack stack{x};
  executor.run(stack);
  EXPECT_TRUE(torch::equal(stack[0].toTensor(), wanted));
}

TEST(Recorded, RefusesWhatAGraphCannotHold) {
  const Tensor x = input({32, 32});
  OperationFuser fuser({LayerNorm(32).ptr()});
  fuser.basic_ops()[0]->to(on_device().device());
  EXPECT_THROW(trace([&](const Tensor& t) { return fuser(t)[0]; }, x), c10::Error);
  Sequential model = mlp();
  Autocast autocast({.recipe = std::make_shared<DelayedScaling>()});
  try {
    trace([&](const Tensor& t) { return model->forward(t); }, x);
    FAIL() << "delayed scaling was recorded";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("delayed scaling changes with every step"),
              std::string::npos);
  }
}

// Backward on a GPU runs in a thread of its own.
std::vector<std::string>* seen = nullptr;

/// The names of all ranges that a profiler would show.
std::vector<std::string> ranges(const std::function<void()>& run) {
  std::vector<std::string> names;
  seen = &names;
  const auto note = [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
    if (seen != nullptr) seen->emplace_back(range.name());
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}));
  run();
  at::removeCallback(handle);
  seen = nullptr;
  return names;
}

TEST(Watched, ARangePerStep) {
  Sequential model = mlp();
  const Tensor x = input({6, 32});
  const Tensor y = model->forward(x).sum();
  const auto plan = model->fusers()[0]->plan();
  std::vector<std::string> forward, backward;
  for (const PlanStep& step : plan->forward) forward.push_back(step.op->name());
  for (const PlanStep& step : plan->backward) backward.insert(backward.begin(), step.op->name());
  const auto only = [](std::vector<std::string> names, const std::vector<std::string>& wanted) {
    std::erase_if(names, [&](const std::string& name) {
      return std::find(wanted.begin(), wanted.end(), name) == wanted.end();
    });
    return names;
  };
  EXPECT_EQ(only(ranges([&] { model->forward(x); }), forward), forward);
  EXPECT_EQ(only(ranges([&] { torch::autograd::grad({y}, {x}); }), backward), backward);
}

struct Traced {
  std::shared_ptr<OperationFuser> fuser;
  Call own;
  int64_t number = 0, id = 0;

  explicit Traced(const Tensor& x) {
    const OpList ops{LayerNorm(32).ptr(), Linear(32, 64).ptr(), SwiGLU().ptr(),
                     Linear(32, 32).ptr()};
    for (const auto& op : ops) op->to(on_device().device());
    fuser = std::make_shared<OperationFuser>(ops);
    own = fuser->collect();
    TracedCall traced;
    traced.param_offsets = own.param_offsets;
    traced.training = own.training;
    traced.input = ValueMeta::of(x);
    traced.requires_grad.assign(1 + own.params.size(), true);
    for (const Tensor& p : own.params) traced.params.push_back(ValueMeta::of(p));
    number = compile::register_fuser(fuser);
    id = compile::trace_call(number, std::move(traced));
  }
};

TEST(Watched, CountsGemms) {
  const Tensor x = input({6, 32});
  const Traced traced(x);
  const auto call = compile::find_call(traced.number, traced.id);
  const int64_t forward = 2 * 6 * 32 * 64 + 2 * 6 * 32 * 32;
  EXPECT_EQ(call->forward_flops({6, 32}), forward);
  EXPECT_EQ(call->forward_flops({12, 32}), 2 * forward);
  EXPECT_EQ(call->backward_flops({6, 32}, {true}), 2 * forward);
  for (const RecipePtr& recipe : std::vector<RecipePtr>{
           std::make_shared<Float8CurrentScaling>(), std::make_shared<Float8BlockScaling>(),
           std::make_shared<MXFP8BlockScaling>(), std::make_shared<NVFP4BlockScaling>()}) {
    const Autocast autocast({.recipe = recipe});
    kernels::KernelLog log(on_device().device().type());
    const Tensor wide = input({64, 32});
    torch::autograd::grad({(*traced.fuser)(wide)[0].sum()}, {wide});
    EXPECT_GT(log.flops(), 0) << recipe->name();
  }
}

TEST(Watched, AnOwnerKeepsWhatIsCalled) {
  const Tensor x = input({6, 32});
  auto traced = std::make_unique<Traced>(x);
  const int64_t number = traced->number, id = traced->id;
  const std::vector<Tensor> params = traced->own.params;
  const auto call = compile::find_call(number, id);
  const int64_t structure = call->layout({6, 32})->structure;
  const Tensor wanted = (*traced->fuser)(x)[0];
  Tensor owner = compile::owner_of(number, x.device());
  // So many others that its plan is dropped, to be made again when it is called.
  for (int i = 0; i < 40; ++i) {
    TracedCall other = call->traced();
    for (size_t j = 0; j < other.requires_grad.size(); ++j) other.requires_grad[j] = (i >> j) % 2;
    compile::trace_call(number, std::move(other));
  }
  EXPECT_EQ(compile::traced_plans(*traced->fuser).size(), 32u);
  traced.reset();
  ASSERT_TRUE(compile::is_known(number));
  compile::register_fuser(std::make_shared<OperationFuser>(OpList{GELU().ptr()}));
  const auto run = [&] {
    return compile::forward_op(true).call(x, params, {}, {}, owner, number, id, structure)[0];
  };
  EXPECT_TRUE(torch::equal(run(), wanted));
  EXPECT_TRUE(torch::equal(torch::autograd::grad({run().sum()}, {x})[0],
                           torch::autograd::grad({wanted.sum()}, {x})[0]));
  owner = torch::empty({1});
  EXPECT_FALSE(compile::is_known(number));
  EXPECT_THROW(run(), c10::Error);
}

TEST(Watched, OnlyWhatWasRecordedHasGradients) {
  const Tensor x = input({6, 32});
  const Traced traced(x);
  TracedCall without = compile::find_call(traced.number, traced.id)->traced();
  without.requires_grad.assign(without.requires_grad.size(), false);
  const int64_t id = compile::trace_call(traced.number, without);
  const int64_t structure = compile::find_call(traced.number, id)->layout({6, 32})->structure;
  const Tensor owner = compile::owner_of(traced.number, x.device());
  const Tensor y = compile::forward_op(true).call(x, traced.own.params, {}, {}, owner,
                                                  traced.number, id, structure)[0];
  EXPECT_TRUE(y.requires_grad());
  EXPECT_THROW(torch::autograd::grad({y.sum()}, {x}), c10::Error);
}

}  // namespace
}  // namespace ligature
