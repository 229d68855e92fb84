#include "ligature/fused/builtin_fusions.h"

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

namespace ligature {

std::vector<FusionRule> builtin_fusions(Pass pass) {
  switch (pass) {
    case Pass::Joint:
      return {dense_mlp_with_residual_rule(), dense_mlp_rule()};
    case Pass::Forward:
      return {forward_linear_scale_add_rule(), forward_linear_bias_add_rule(),
              forward_linear_bias_activation_rule(), forward_bias_activation_rule(),
              forward_linear_bias_rule()};
    case Pass::Backward:
      return {backward_linear_add_rule(),
              backward_linear_scale_rule(),
              backward_linear_activation_bias_rule(),
              backward_activation_bias_rule(),
              backward_linear_activation_rule(),
              backward_add_layer_norm_rule(),
              backward_add_rms_norm_rule(),
              backward_linear_bias_rule()};
  }
  return {};
}

}  // namespace ligature
