// Dispatch, Combine, TopKRouter and the functions around experts, against formulas in float64.
#include <gtest/gtest.h>

#include "ligature/testing/testing.h"
#include "testing_support.h"

using namespace ligature;
using namespace ligature::testing;

namespace {

class OpsRouting : public OneThread {};

constexpr int64_t kExperts = 4, kTopK = 2;

/// Expert indices that depend on the number of tokens alone: some below 0, some above.
Tensor chosen_experts(int64_t tokens, at::Device device) {
  const Tensor slots = at::arange(tokens * kTopK, at::kLong);
  return (slots * 7 % (kExperts + 2) - 1).view({tokens, kTopK}).to(device);
}

struct ChoiceOptions {
  template <class F>
  void fields(F&&) {}
};

/// Its input, and the indices as an extra output.
class ChoiceImpl : public Operation<ChoiceImpl> {
 public:
  using Options = ChoiceOptions;
  explicit ChoiceImpl(Options given = {}) : Operation("Choice"), options(given) {}
  size_t num_extra_outputs() const override { return 1; }
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList) override {
    FuserForwardResult out;
    out.output = input.tensor().clone();
    const int64_t tokens = input.tensor().numel() / input.sizes().back();
    out.extra_outputs = {{chosen_experts(tokens, input.device())}};
    out.to_save.resize(1);
    return out;
  }
  void fuser_forward_save_ctx(CtxList, const Value&, FuserForwardResult&, ArgsList) override {}
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& dy, GradList) override {
    FuserBackwardResult out;
    if (ctxs[0]->requires_grad.input) out.grad_input = dy;
    out.grad_params.resize(1);
    out.grad_extra_inputs.resize(1);
    return out;
  }
  Options options;
  static void check_options(const Options&) {}
};
TORCH_MODULE(Choice);

OpList there_and_back(bool weighted) {
  Choice choice;
  Dispatch dispatch(kExperts);
  ConstantScale half(0.5);
  Combine combine(CombineOptions{weighted});
  choice->set_extra_output_channel(0, "experts", false);
  dispatch->set_extra_input_channel(DispatchImpl::kExperts, "experts");
  dispatch->set_extra_output_channel(DispatchImpl::kSplits, "splits", false);
  dispatch->set_extra_output_channel(DispatchImpl::kMap, "map", false);
  combine->set_extra_input_channel(CombineImpl::kMap, "map");
  return {choice.ptr(), dispatch.ptr(), half.ptr(), combine.ptr()};
}

std::vector<Tensor> formula_there_and_back(const Tensor& x, const std::vector<Tensor>& extras) {
  const Tensor flat = x.reshape({-1, x.size(-1)});
  const int64_t tokens = flat.size(0);
  const Tensor experts = chosen_experts(tokens, x.device());
  const Tensor there = experts.ge(0).logical_and(experts.lt(kExperts)).to(x.scalar_type());
  const Tensor by = extras.size() > 1 ? there * extras[1] : there;
  // Rows by expert: a stable sort of the slots.
  const Tensor key = at::where(there.to(at::kBool), experts, kExperts).flatten();
  const Tensor order = std::get<1>(at::sort(key, /*stable=*/true, 0, false));
  const Tensor row_probs = (there * extras[0]).flatten().index_select(0, order);
  return {(0.5 * flat * by.sum(1, true)).view(x.sizes()), row_probs};
}

TEST_F(OpsRouting, DispatchAndCombine) {
  for (const bool weighted : {false, true}) {
    const std::vector<std::vector<int64_t>> slots(weighted ? 2 : 1, {6, kTopK});
    CheckOptions options;
    options.device = on_device().device();
    const Report report =
        check_operation([&](at::ScalarType, at::Device) { return there_and_back(weighted); },
                        [](const Tensor& x, const auto&, const std::vector<Tensor>& extras) {
                          return formula_there_and_back(x, extras);
                        },
                        {{{6, 5}, slots}, {{2, 3, 4}, slots}}, options);
    EXPECT_TRUE(report) << report.text();
  }
}

TEST_F(OpsRouting, TopKRouter) {
  std::vector<TopKRouterOptions> all(4, TopKRouterOptions(6, 8, 3));
  all[1].use_pre_softmax = true;
  all[1].normalize = true;
  all[1].aux_loss_coeff = 0.5;
  all[2].score_function = ScoreFunction::Sigmoid;
  all[2].scaling_factor = 2.5;
  all[2].aux_loss_coeff = 0.5;
  all[3].z_loss_coeff = 0.3;
  for (const TopKRouterOptions& given : all) {
    const bool sigmoid = given.score_function == ScoreFunction::Sigmoid;
    const auto formula = [&](const Tensor& x, const std::vector<Tensor>& params, const auto&) {
      const Tensor logits = at::linear(x.reshape({-1, 6}), params[0]);
      const double tokens = static_cast<double>(logits.size(0));
      const Tensor scores = sigmoid ? logits.sigmoid() : logits.softmax(-1);
      const Tensor experts = std::get<1>(logits.detach().topk(3));
      Tensor p = given.use_pre_softmax || sigmoid ? scores.gather(1, experts)
                                                  : logits.gather(1, experts).softmax(-1);
      if (sigmoid || given.normalize.value_or(false)) p = p / p.sum(-1, true);
      const Tensor counts = at::one_hot(experts.flatten(), 8).sum(0);
      const Tensor shares = scores / scores.sum(-1, true);
      const Tensor loss =
          given.aux_loss_coeff * 8 / (3 * tokens * tokens) * (counts * shares.sum(0)).sum() +
          given.z_loss_coeff * logits.logsumexp(-1).square().mean();
      return std::vector<Tensor>{x, experts, p * given.scaling_factor.value_or(1.0), loss, counts};
    };
    CheckOptions options;
    options.device = on_device().device();
    options.may_change_dtype = true;
    options.tolerance = 4;
    const Report report = check_operation(
        [&](at::ScalarType dtype, at::Device device) -> OpList {
          TopKRouterOptions made = given;
          made.dtype = dtype;
          made.device = device;
          return {TopKRouter(made).ptr()};
        },
        formula, {{{5, 6}}, {{2, 4, 6}}}, options);
    EXPECT_TRUE(report) << report.text();
  }
}

TEST_F(OpsRouting, ABlockOfExperts) {
  for (const bool bias : {false, true}) {
    MixtureOptions options{TopKRouterOptions(6, 4, 2), 5};
    options.router.dtype = at::kDouble;
    options.bias = bias;
    const OpList ops = mixture_of_experts(options);
    for (const Tensor& p : parameters_of(ops)) p.detach().normal_();
    OperationFuser fuser(ops);
    Tensor x = leaf({3, 2, 6}).requires_grad_();
    const Tolerance allowed{1e-6, 1e-6};  // the scales of biases are floats
    const std::vector<Tensor> outputs = fuser(x);
    ASSERT_EQ(outputs.size(), 1U);

    // Every expert sees every token; only those chosen count.
    const Tensor flat = x.detach().view({-1, 6}).requires_grad_();
    const auto params = [&](size_t op) {
      std::vector<Tensor> own;
      ops[op]->basic_ops()[0]->collect_parameters(own);
      return own;
    };
    const auto first = params(2), second = params(4);
    const Tensor logits = at::linear(flat, params(0)[0]);
    const auto [best, experts] = logits.topk(2);
    const Tensor probs = best.softmax(-1);
    Tensor wanted = at::zeros_like(flat);
    for (int64_t e = 0; e < 4; ++e) {
      const auto z = at::linear(flat, first[e], bias ? first[4 + e] : Tensor()).chunk(2, -1);
      const Tensor y =
          at::linear(at::silu(z[0]) * z[1], second[e], bias ? second[4 + e] : Tensor());
      wanted = wanted + y * (probs * experts.eq(e)).sum(-1, true);
    }
    expect_close(outputs[0].flatten(0, 1), wanted, at::kDouble, "output", allowed);
    const Tensor dy = at::randn_like(wanted);
    Tensors leaves;
    for (size_t op : {0, 2, 4}) {
      for (const Tensor& p : params(op)) leaves.push_back(p);
    }
    Tensors own_leaves = leaves, formula_leaves = leaves;
    own_leaves.push_back(x);
    formula_leaves.push_back(flat);
    const auto own = torch::autograd::grad({outputs[0]}, own_leaves, {dy.view(x.sizes())});
    const auto of_formula = torch::autograd::grad({wanted}, formula_leaves, {dy});
    for (size_t i = 0; i < own.size(); ++i) {
      expect_close(own[i].view(of_formula[i].sizes()), of_formula[i], at::kDouble,
                   "gradient " + std::to_string(i), allowed);
    }
  }
}

TEST_F(OpsRouting, PermuteAndBack) {
  const Tensor mask = at::rand({9, 5}, on_device()).lt(0.4);
  const Tensor x = leaf({9, 3}).requires_grad_(), probs = leaf({9, 5}).requires_grad_();
  const Permuted there = moe_permute(x, probs, mask);
  EXPECT_EQ(there.rows.size(0), mask.sum().item<int64_t>());
  const Tensor y = moe_unpermute(there.rows * there.probs.unsqueeze(1), there.row_id_map, probs);
  const Tensor wanted = x * (probs.square() * mask).sum(1, true);
  expect_close(y, wanted, at::kDouble, "there and back");
  const Tensor dy = at::randn_like(y);
  const auto own = torch::autograd::grad({y}, {x, probs}, {dy});
  const auto of_formula = torch::autograd::grad({wanted}, {x, probs}, {dy});
  expect_close(own[0], of_formula[0], at::kDouble, "gradient of x");
  expect_close(own[1], of_formula[1], at::kDouble, "gradient of probs");
}

TEST_F(OpsRouting, SortChunks) {
  const Tensor x = leaf({6, 2}).requires_grad_();
  const auto longs = on_device(at::kLong);
  const auto [y, none] = moe_sort_chunks_by_index(x, {}, at::tensor({1, 0, 3, 2}, longs),
                                                  at::tensor({3, 2, 1, 0}, longs));
  EXPECT_FALSE(none.defined());
  const Tensor order = at::tensor({4, 5, 1, 2, 3, 0}, longs);
  expect_same_bits(y, x.index_select(0, order), "chunks");
  const Tensor dy = at::randn_like(y);
  const auto own = torch::autograd::grad({y}, {x}, {dy});
  expect_same_bits(own[0], at::zeros_like(dy).index_copy(0, order, dy), "gradient");
}

TEST_F(OpsRouting, OptionsAreChecked) {
  EXPECT_MESSAGE(Dispatch(0), "num_experts must be positive, got 0");
  EXPECT_MESSAGE(TopKRouter(8, 4, 5), "top_k must be at most num_experts=4, got 5");
  MixtureOptions options{TopKRouterOptions(6, 4, 2), 5};
  options.activation = SiLU().ptr();
  EXPECT_MESSAGE(mixture_of_experts(options), "activation must be one that takes scales");
}

}  // namespace
