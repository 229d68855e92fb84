// The feed-forward block of a transformer: norm, linear, activation, linear, with or without its
// residual connection. It serves both passes, so that it need not save what is cheap to compute:
// the norm's output and the activation's output are made again in backward.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"
#include "ligature/ops/norm.h"

namespace ligature {

class DenseMLP : public FusedOperation {
 public:
  LIGATURE_BUILTIN(DenseMLP)
  explicit DenseMLP(const OpList& ops);

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  /// One of the operations and its place among them.
  template <class Op>
  struct Part {
    Op* op = nullptr;
    size_t at = 0;
    explicit operator bool() const { return op != nullptr; }
    Op* operator->() const { return op; }
  };

  bool forks_before_norm() const { return has_residual() && fork_ < norm_.at; }
  bool forks_after_norm() const { return has_residual() && fork_ > norm_.at; }
  bool has_residual() const { return static_cast<bool>(join_); }
  /// Of forward alone: the input's orientation for backward is made again there.
  LinearFwdArgs linear_args(const Part<BasicLinearImpl>& linear, const Part<BiasImpl>& bias,
                            const Value& x, ArgsList args) const;
  /// Puts the second weight's gradient into `out` and gives the gradient of the first linear's
  /// output, and in `dbias` that of its bias where it is needed.
  Value linear2_and_activation_backward(CtxList ctxs, const Value& dy, FuserBackwardResult& out,
                                        Tensor& dbias);
  /// The format of the gradient of the first linear's output.
  Target grad_target(const OperationContext& ctx) const;

  Part<NormOperation> norm_;
  Part<BasicLinearImpl> fc1_;
  Part<BiasImpl> bias1_;
  Part<ActivationOperation> activation_;
  Part<BasicLinearImpl> fc2_;
  Part<BiasImpl> bias2_;
  Part<AddExtraInputImpl> join_;
  size_t fork_ = 0;  // of the residual, where there is one
};

/// The residual begins before or after the norm and ends after the block, on one channel.
FusionRule dense_mlp_with_residual_rule();
FusionRule dense_mlp_rule();

}  // namespace ligature
