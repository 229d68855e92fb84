// From the logits of a router to the experts of each token, their probabilities and the auxiliary
// loss; and the gradient of the logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ligature/plain_state.h"

namespace ligature {

using at::Tensor;

/// What makes a score s[t, e] of a logit.
enum class ScoreFunction : uint8_t {
  Softmax,  ///< over all experts
  Sigmoid,
};

const char* score_function_name(ScoreFunction function);
PlainValue to_plain(ScoreFunction function);
/// `what`: the field, for errors.
void from_plain(const std::string& what, const PlainValue& plain, ScoreFunction& function);

struct RouterSpec {
  ScoreFunction score_function = ScoreFunction::Softmax;
  int64_t top_k = 1;
  bool pre_softmax = false;  ///< probabilities are scores, not the softmax of the chosen logits
  bool normalize = false;    ///< probabilities are divided by their sum
  int64_t num_groups = 1;
  int64_t group_topk = 1;
  double scaling_factor = 1.0;
  double aux_loss_coeff = 0.0;
  double z_loss_coeff = 0.0;

  /// Are the chosen logits what softmax is applied to?
  bool softmax_of_chosen() const {
    return score_function == ScoreFunction::Softmax && !pre_softmax;
  }
};

struct RoutedScores {
  Tensor experts;        ///< int64 [tokens, top_k], the best first, the lowest index among equals
  Tensor probabilities;  ///< [tokens, top_k]
  Tensor loss;           ///< a scalar
  Tensor counts;         ///< int64 [experts]: to how many tokens each was given
  /// Of the load-balancing loss, which knows neither groups nor a bias; undefined without it.
  Tensor loss_counts;
};

/// `logits`: float or double [tokens, experts]. `expert_bias`: [experts], or undefined.
RoutedScores route_scores(const Tensor& logits, const Tensor& expert_bias, const RouterSpec& spec);

/// The gradient of the logits. `dprobabilities` and `dloss` may be undefined, not both.
Tensor logits_grad(const Tensor& logits, const Tensor& experts, const Tensor& loss_counts,
                   const Tensor& dprobabilities, const Tensor& dloss, const RouterSpec& spec);

}  // namespace ligature
