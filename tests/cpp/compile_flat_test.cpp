// The functions that compiled graphs call give what an eager call gives, bit by bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ligature/compile/flat.h"
#include "ligature/ligature.h"

namespace ligature {
namespace {

using compile::Arguments;
using compile::FlatCall;
using compile::TracedCall;

ValueMeta meta_of(const Tensor& t) { return ValueMeta::of(t); }

struct Traced {
  std::shared_ptr<OperationFuser> fuser;
  Call own;
  int64_t number = 0;
  std::shared_ptr<FlatCall> call;

  Traced(const OpList& ops, const Tensor& x, const std::vector<Tensor>& extras,
         const AutocastState& autocast = {})
      : fuser(std::make_shared<OperationFuser>(ops)), own(fuser->collect()) {
    TracedCall traced;
    traced.param_offsets = own.param_offsets;
    traced.training = own.training;
    traced.input = meta_of(x);
    traced.autocast = autocast;
    traced.requires_grad.push_back(x.requires_grad());
    for (const Tensor& p : own.params) {
      traced.params.push_back(meta_of(p));
      traced.requires_grad.push_back(p.requires_grad());
    }
    for (const Tensor& e : extras) {
      traced.extra_inputs.push_back(meta_of(e));
      traced.requires_grad.push_back(e.requires_grad());
    }
    number = compile::register_fuser(fuser);
    call = compile::find_call(number, compile::trace_call(number, std::move(traced)));
  }
};

std::vector<int64_t> sizes_of(const Tensor& x, const std::vector<Tensor>& extras) {
  std::vector<int64_t> sizes = x.sizes().vec();
  for (const Tensor& e : extras) sizes.insert(sizes.end(), e.sizes().begin(), e.sizes().end());
  return sizes;
}

void expect_like_eager(const OpList& ops, const Tensor& x, const std::vector<Tensor>& extras = {},
                       const AutocastOptions* options = nullptr) {
  std::optional<Autocast> autocast;
  if (options != nullptr) autocast.emplace(*options);
  Traced traced(ops, x, extras, autocast_state());
  const std::vector<int64_t> sizes = sizes_of(x, extras);
  const auto layout = traced.call->layout(sizes);
  const Arguments arguments{x, traced.own.params, extras};

  const std::vector<Tensor> wanted = (*traced.fuser)(x, extras);
  const std::vector<Tensor> results = traced.call->forward(arguments, {}, layout->structure);
  ASSERT_EQ(layout->outputs.size(), wanted.size());
  std::vector<Tensor> dys;
  for (size_t k = 0; k < wanted.size(); ++k) {
    const compile::Source& source = layout->outputs[k];
    const Tensor y = source.kind == compile::Source::Kind::Result ? results[source.index] : x;
    EXPECT_TRUE(torch::equal(y, wanted[k])) << "output " << k;
    dys.push_back(torch::randn_like(wanted[k]));
  }
  std::vector<Tensor> kept;
  for (const compile::Source& source : layout->kept) {
    using Kind = compile::Source::Kind;
    kept.push_back(source.kind == Kind::Input   ? x
                   : source.kind == Kind::Param ? arguments.params[source.index]
                   : source.kind == Kind::Extra ? extras[source.index]
                                                : results[source.index]);
  }
  std::vector<Tensor> leaves{x};
  for (const Tensor& p : traced.own.params) leaves.push_back(p);
  for (const Tensor& e : extras) leaves.push_back(e);
  const std::vector<Tensor> grads = torch::autograd::grad(wanted, leaves, dys);
  const std::vector<Tensor> got = traced.call->backward(dys, kept, sizes, layout->structure);
  ASSERT_EQ(got.size(), grads.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::equal(got[i], grads[i])) << "gradient " << i;
  }
}

Tensor input(at::IntArrayRef sizes) { return torch::randn(sizes).requires_grad_(true); }

OpList mlp() {
  return {LayerNorm(32).ptr(), Linear(32, 64).ptr(), SwiGLU().ptr(), Linear(32, 32).ptr()};
}

TEST(CompileFlat, EqualsEager) {
  torch::manual_seed(1);
  expect_like_eager(mlp(), input({6, 32}));
  expect_like_eager({Identity().ptr()}, input({6, 32}));
  expect_like_eager(
      {Reshape(ReshapeOptions({-1, 2, 32})).ptr(), Linear(32, 16).ptr(), GELU().ptr()},
      input({6, 32}));
  expect_like_eager({Linear(32, 32).ptr(), AddExtraInput().ptr()}, input({6, 32}),
                    {input({6, 32})});
  expect_like_eager({MakeExtraOutput().ptr(), RMSNorm(32).ptr(), Linear(32, 32).ptr()},
                    input({6, 32}));
}

TEST(CompileFlat, EqualsEagerInLowPrecision) {
  torch::manual_seed(1);
  for (const RecipePtr& recipe : std::vector<RecipePtr>{std::make_shared<Float8CurrentScaling>(),
                                                        std::make_shared<Float8BlockScaling>(),
                                                        std::make_shared<MXFP8BlockScaling>()}) {
    const AutocastOptions options{.recipe = recipe};
    expect_like_eager(mlp(), input({64, 32}), {}, &options);
  }
}

TEST(CompileFlat, ResultsAreFresh) {
  const Tensor x = input({6, 32});
  Traced traced({MakeExtraOutput().ptr(), LayerNorm(32).ptr(), Linear(32, 32).ptr()}, x, {});
  const auto layout = traced.call->layout(x.sizes());
  const auto results = traced.call->forward({x, traced.own.params, {}}, {}, layout->structure);
  ASSERT_EQ(results.size(), layout->results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_FALSE(results[i].is_alias_of(x));
    for (const Tensor& p : traced.own.params) EXPECT_FALSE(results[i].is_alias_of(p));
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(results[i].is_alias_of(results[j]));
    EXPECT_EQ(results[i].sizes(), at::IntArrayRef(layout->results[i].sizes));
  }
}

TEST(CompileFlat, RefusesWhatItDoesNotKnow) {
  const Tensor x = input({6, 32});
  int64_t number = 0;
  int64_t id = 0;
  {
    Traced traced(mlp(), x, {});
    number = traced.number;
    id = traced.call->id();
    EXPECT_THROW(compile::find_call(number, id + 1), c10::Error);
    EXPECT_THROW(traced.call->forward({x, traced.own.params, {}}, {}, 1), c10::Error);
    Autocast autocast({.recipe = std::make_shared<Float8CurrentScaling>()});
    const auto structure = traced.call->layout(x.sizes())->structure;
    EXPECT_THROW(traced.call->forward({x, traced.own.params, {}}, {}, structure), c10::Error);
  }
  EXPECT_THROW(compile::find_call(number, id), c10::Error);
}

}  // namespace
}  // namespace ligature
