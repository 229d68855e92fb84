// The one table of built-in fusions.
#include "ligature/fused/backward_activation_bias.h"
#include "ligature/fused/backward_add_norm.h"
#include "ligature/fused/backward_linear_activation.h"
#include "ligature/fused/backward_linear_add.h"
#include "ligature/fused/backward_linear_bias.h"
#include "ligature/fused/backward_linear_scale.h"
#include "ligature/fused/dense_mlp.h"
#include "ligature/fused/forward_bias_activation.h"
#include "ligature/fused/forward_linear_bias_activation.h"
#include "ligature/fused/forward_linear_bias_add.h"
#include "ligature/fused/forward_linear_scale_add.h"
#include "ligature/fused/grouped_mlp.h"
#include "ligature/fused/overlap_linear.h"
#include "ligature/fused/overlap_weight_grads.h"
#include "ligature/fuser/registry.h"

namespace ligature {
namespace {

using Where = std::function<bool(const Match&, const PlanOptions&)>;

/// A rule of which te.ops has a counterpart, and for which matches.
FusionRule in_te_ops(FusionRule rule, Where where) {
  rule.in_te_ops = std::move(where);
  return rule;
}

bool always(const Match&, const PlanOptions&) { return true; }

bool adds_in_place(const Match& match, const PlanOptions&) {
  return static_cast<const AddExtraInputImpl&>(*match.ops.back()).options.in_place;
}

bool forks_in_place(const Match& match, const PlanOptions&) {
  return static_cast<const MakeExtraOutputImpl&>(*match.ops.front()).options.in_place;
}

bool forks_apart(const Match& match, const PlanOptions& options) {
  return !forks_in_place(match, options);
}

bool quantizes_gelu_or_relu(const Match& match, const PlanOptions& options) {
  const auto kind = static_cast<const ActivationOperation&>(*match.ops.back()).spec().kind;
  return options.recipe != nullptr && !options.calibrating &&
         (kind == kernels::ActivationKind::GELU || kind == kernels::ActivationKind::ReLU);
}

std::vector<FusionRule> table(Pass pass) {
  switch (pass) {
    case Pass::Joint:
      return {dense_mlp_with_residual_rule(), dense_mlp_rule(), grouped_mlp_with_routing_rule(),
              grouped_mlp_rule()};
    case Pass::Forward:
      return {in_te_ops(overlap_forward_linear_rule(), always),
              in_te_ops(overlap_forward_row_linear_rule(), always),
              in_te_ops(forward_linear_scale_add_rule(), adds_in_place),
              in_te_ops(forward_linear_bias_add_rule(), adds_in_place),
              forward_linear_bias_activation_rule(),
              forward_bias_activation_rule(),
              forward_linear_bias_rule()};
    case Pass::Backward:
      return {in_te_ops(overlap_backward_linear_rule(), always),
              in_te_ops(backward_linear_add_rule(), forks_in_place),
              in_te_ops(backward_linear_scale_rule(), always),
              in_te_ops(backward_activation_bias_rule(), quantizes_gelu_or_relu),
              backward_linear_activation_rule(),
              backward_add_layer_norm_rule(),
              in_te_ops(backward_add_rms_norm_rule(), forks_apart),
              backward_linear_bias_rule(),
              overlap_weight_grads_rule()};
  }
  return {};
}

[[maybe_unused]] const bool registered = set_builtin_fusions(table);

}  // namespace
}  // namespace ligature
