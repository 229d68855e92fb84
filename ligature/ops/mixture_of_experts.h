// A block of experts, joined by channels.
#pragma once

#include <string>

#include "ligature/ops/topk_router.h"

namespace ligature {

struct MixtureOptions {
  MixtureOptions(TopKRouterOptions router_, int64_t ffn_hidden_size_)
      : router(std::move(router_)), ffn_hidden_size(ffn_hidden_size_) {}

  TopKRouterOptions router;
  int64_t ffn_hidden_size = 0;  ///< of what the activation gives
  bool bias = false;            ///< of the experts' linear layers
  BasicOpPtr activation;        ///< a scaled one; by default ScaledSwiGLU
  std::string name = "experts";
};

/// TopKRouter, Dispatch, GroupedLinear, ScaledSwiGLU, GroupedLinear, Combine. The output has the
/// input's shape; behind it come the auxiliary loss, where one of its coefficients is not zero, and
/// the tokens per expert, with `expert_bias`. Channels are named `name.splits` and so on. Example:
/// ```
/// OperationFuser fuser(mixture_of_experts({TopKRouterOptions(512, 8, 2), 1024}));
/// Tensor y = fuser(x)[0];
/// ```
OpList mixture_of_experts(const MixtureOptions& options);

}  // namespace ligature
