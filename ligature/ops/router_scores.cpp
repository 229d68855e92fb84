#include "ligature/ops/router_scores.h"

#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "ligature/options.h"

namespace ligature {

const char* score_function_name(ScoreFunction function) {
  return function == ScoreFunction::Softmax ? "softmax" : "sigmoid";
}

PlainValue to_plain(ScoreFunction function) { return std::string(score_function_name(function)); }

void from_plain(const std::string& what, const PlainValue& plain, ScoreFunction& function) {
  std::string name;
  detail::from_plain(what, plain, name);
  for (const auto known : {ScoreFunction::Softmax, ScoreFunction::Sigmoid}) {
    if (name != score_function_name(known)) continue;
    function = known;
    return;
  }
  LIGATURE_CHECK(false, what, " must be 'softmax' or 'sigmoid', got '", name, "'");
}

namespace {

// Sums of scores that may all be zero.
constexpr double kTiny = 1e-20;

Tensor row_sum(const Tensor& t) { return at::sum(t, at::IntArrayRef{-1}, /*keepdim=*/true); }

Tensor scores_of(const Tensor& logits, const RouterSpec& spec) {
  return spec.score_function == ScoreFunction::Softmax ? at::_softmax(logits, -1, false)
                                                       : at::sigmoid(logits);
}

/// The gradient of the logits for that of their scores.
Tensor through_scores(const Tensor& ds, const Tensor& scores, const RouterSpec& spec) {
  if (spec.score_function == ScoreFunction::Softmax) {
    return at::_softmax_backward_data(ds, scores, -1, scores.scalar_type());
  }
  return at::mul(at::mul(ds, scores), at::rsub(scores, 1));
}

/// The indices of the k largest of each row, the lowest first among equals.
Tensor best(const Tensor& scores, int64_t k) {
  const Tensor order = std::get<1>(at::sort(scores, /*stable=*/true, -1, /*descending=*/true));
  return order.narrow(-1, 0, k).contiguous();
}

/// 1 where an expert was chosen: int32 [tokens, experts].
Tensor chosen_mask(const Tensor& experts, int64_t num_experts) {
  const at::TensorOptions ints = experts.options().dtype(at::kInt);
  Tensor mask = at::zeros({experts.size(0), num_experts}, ints);
  return mask.scatter_(1, experts, 1);
}

Tensor counts_of(const Tensor& experts, int64_t num_experts) {
  return at::sum(chosen_mask(experts, num_experts), at::IntArrayRef{0}, false, at::kLong);
}

/// Experts outside of the best groups are worth less than any other.
Tensor within_groups(const Tensor& scores, const RouterSpec& spec) {
  const int64_t tokens = scores.size(0), size = scores.size(1) / spec.num_groups;
  const Tensor grouped = scores.view({tokens, spec.num_groups, size});
  const int64_t judged = std::clamp<int64_t>(spec.top_k / spec.group_topk, 1, size);
  const Tensor of_group = at::sum(std::get<0>(at::topk(grouped, judged, -1)), at::IntArrayRef{-1});
  const Tensor in_group = chosen_mask(best(of_group, spec.group_topk), spec.num_groups);
  return grouped
      .masked_fill(in_group.logical_not().unsqueeze(-1), -std::numeric_limits<double>::infinity())
      .view({tokens, spec.num_groups * size});
}

double balance_factor(const Tensor& logits, const RouterSpec& spec) {
  const double tokens = std::max<int64_t>(logits.size(0), 1);
  return spec.aux_loss_coeff * static_cast<double>(logits.size(1)) /
         (static_cast<double>(spec.top_k) * tokens * tokens);
}

double z_factor(const Tensor& logits, const RouterSpec& spec) {
  return spec.z_loss_coeff / static_cast<double>(std::max<int64_t>(logits.size(0), 1));
}

/// Scores as the load-balancing loss sees them: each token's add up to one.
Tensor shares_of(const Tensor& scores, const RouterSpec& spec) {
  if (spec.score_function == ScoreFunction::Softmax) return scores;
  return at::div(scores, row_sum(scores).add_(kTiny));
}

Tensor loss_of(const Tensor& logits, const Tensor& scores, const Tensor& counts,
               const RouterSpec& spec) {
  Tensor loss = at::zeros({}, logits.options());
  if (spec.aux_loss_coeff != 0) {
    const Tensor shares = at::sum(shares_of(scores, spec), at::IntArrayRef{0});
    loss.add_(at::sum(at::mul(shares, counts)), balance_factor(logits, spec));
  }
  if (spec.z_loss_coeff != 0) {
    const Tensor z = at::logsumexp(logits, at::IntArrayRef{-1});
    loss.add_(at::sum(at::mul(z, z)), z_factor(logits, spec));
  }
  return loss;
}

}  // namespace

RoutedScores route_scores(const Tensor& logits, const Tensor& expert_bias, const RouterSpec& spec) {
  const int64_t num_experts = logits.size(1);
  const bool balances = spec.aux_loss_coeff != 0;
  const bool needs_scores = !spec.softmax_of_chosen() || balances;
  const Tensor scores = needs_scores ? scores_of(logits, spec) : Tensor();
  const Tensor& values = spec.softmax_of_chosen() ? logits : scores;
  const bool grouped = spec.num_groups > 1;
  Tensor worth = expert_bias.defined()
                     ? at::add(values, at::_to_copy(expert_bias, values.scalar_type()))
                     : values;
  if (grouped) worth = within_groups(worth, spec);

  RoutedScores out;
  out.experts = best(worth, spec.top_k);
  out.counts = counts_of(out.experts, num_experts);
  if (balances) {
    const bool same = !grouped && !expert_bias.defined();
    out.loss_counts = same ? out.counts : counts_of(best(values, spec.top_k), num_experts);
  }
  Tensor p = at::gather(values, 1, out.experts);
  if (spec.softmax_of_chosen()) {
    p = at::_softmax(p, -1, false);
  } else if (spec.normalize) {
    p = at::div(p, row_sum(p).add_(kTiny));
  }
  out.probabilities = spec.scaling_factor == 1.0 ? p : at::mul(p, spec.scaling_factor);
  out.loss = loss_of(logits, scores, out.loss_counts, spec);
  return out;
}

Tensor logits_grad(const Tensor& logits, const Tensor& experts, const Tensor& loss_counts,
                   const Tensor& dprobabilities, const Tensor& dloss, const RouterSpec& spec) {
  const bool balances = dloss.defined() && spec.aux_loss_coeff != 0;
  const bool by_scores = dprobabilities.defined() && !spec.softmax_of_chosen();
  Tensor dlogits = at::zeros_like(logits);
  Tensor g = dprobabilities.defined() ? at::mul(dprobabilities, spec.scaling_factor) : Tensor();
  if (g.defined() && spec.softmax_of_chosen()) {
    const Tensor p = at::_softmax(at::gather(logits, 1, experts), -1, false);
    dlogits.scatter_(1, experts, at::_softmax_backward_data(g, p, -1, p.scalar_type()));
  }
  if (by_scores || balances) {
    const Tensor scores = scores_of(logits, spec);
    Tensor ds = at::zeros_like(logits);
    if (by_scores) {
      if (spec.normalize) {
        const Tensor chosen = at::gather(scores, 1, experts);
        const Tensor sum = row_sum(chosen).add_(kTiny);
        g = at::div(at::sub(g, row_sum(at::mul(g, at::div(chosen, sum)))), sum);
      }
      ds.scatter_(1, experts, g);
    }
    if (balances) {
      const Tensor dshares =
          at::mul(at::mul(at::_to_copy(loss_counts, logits.scalar_type()), dloss),
                  balance_factor(logits, spec));
      if (spec.score_function == ScoreFunction::Softmax) {
        ds.add_(dshares);
      } else {
        const Tensor sum = row_sum(scores).add_(kTiny);
        const Tensor shares = at::div(scores, sum);
        ds.add_(at::div(at::sub(dshares, row_sum(at::mul(dshares, shares))), sum));
      }
    }
    dlogits.add_(through_scores(ds, scores, spec));
  }
  if (dloss.defined() && spec.z_loss_coeff != 0) {
    const Tensor z = at::logsumexp(logits, at::IntArrayRef{-1}, /*keepdim=*/true);
    dlogits.add_(at::mul(at::mul(z, dloss), at::_softmax(logits, -1, false)),
                 2 * z_factor(logits, spec));
  }
  return dlogits;
}

}  // namespace ligature
