// Backward of a run of operations with linear layers that are spread over ranks. Nobody waits for
// the gradients of weights: they are computed while collectives of the run are under way, those of
// other layers too. Gathers of saved inputs start before anything else.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/basic_linear.h"

namespace ligature {

class OverlapWeightGrads : public FusedOperation {
 public:
  LIGATURE_BUILTIN(OverlapWeightGrads)
  explicit OverlapWeightGrads(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override;

 private:
  struct Step {
    OpPtr op;
    size_t first;
    size_t count;
  };
  bool overlaps() const;
  Value run(CtxList ctxs, Value dy, GradList grad_extra_outputs, FuserBackwardResult& out) const;

  std::vector<Step> steps_;
  std::vector<std::pair<BasicLinearImpl*, size_t>> linears_;
};

FusionRule overlap_weight_grads_rule();

}  // namespace ligature
