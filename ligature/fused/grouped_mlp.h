// The feed-forward block of a mixture of experts: grouped linear, activation, grouped linear, with
// or without the routing around it. It serves both passes, so that it saves its input and the
// output of the first linear only: the second one's input is made again in backward. With the
// routing around it there is no copy of the input in the experts' order at all.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/combine.h"
#include "ligature/ops/dispatch.h"
#include "ligature/ops/grouped_linear.h"
#include "ligature/ops/scaled_activation.h"

namespace ligature {

class GroupedMLP : public FusedOperation {
 public:
  LIGATURE_BUILTIN(GroupedMLP)
  explicit GroupedMLP(const OpList& ops);

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  // Places among the operations.
  size_t fc1_at() const { return dispatch_ != nullptr ? 1 : 0; }
  size_t activation_at() const { return fc1_at() + 1; }
  size_t fc2_at() const { return fc1_at() + 2; }
  size_t combine_at() const { return fc1_at() + 3; }

  bool routes() const { return dispatch_ != nullptr; }
  kernels::ActivationSpec spec() const {
    return scaled_ != nullptr ? scaled_->spec() : plain_->spec();
  }
  bool has_scales() const { return scaled_ != nullptr && !scaled_->has_unit_scale(); }
  /// Which of Dispatch's outputs this extra input is on a channel with; none: kNumOutputs.
  size_t dispatched(size_t op, size_t slot) const;

  struct CompleteArgs;
  struct Rows;
  Rows rows_of(CtxList ctxs, const Value& grad_output) const;
  /// Puts the gradients of FC2, and of what scales its input, into `out`, and gives that of FC1's
  /// output; undefined where nothing before FC2 needs a gradient.
  Tensor fc2_and_activation_backward(CtxList ctxs, const Tensor& dy, const Rows& rows,
                                     FuserBackwardResult& out);
  /// The same of FC1. Gives the gradient of its input's rows.
  Tensor fc1_backward(CtxList ctxs, Tensor dz, const Rows& rows, FuserBackwardResult& out);

  DispatchImpl* dispatch_ = nullptr;  // as combine_, or neither is there
  GroupedLinearImpl* fc1_ = nullptr;
  ActivationOperation* plain_ = nullptr;  // or
  ScaledActivationOperation* scaled_ = nullptr;
  GroupedLinearImpl* fc2_ = nullptr;
  CombineImpl* combine_ = nullptr;
};

/// Dispatch, grouped linear, activation, grouped linear, Combine, joined by channels.
FusionRule grouped_mlp_with_routing_rule();
FusionRule grouped_mlp_rule();

}  // namespace ligature
