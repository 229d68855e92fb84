// A linear layer and the collective beside it, computed piece by piece: a piece travels while the
// next one is computed. Both have the bits of their operations one after the other.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"
#include "ligature/ops/collective.h"

namespace ligature {

/// What both directions cover: a linear, a bias (if any) and a ReduceScatter (if any). A linear
/// that is spread over ranks by rows scatters its result itself.
class OverlapLinear : public FusedOperation {
 protected:
  OverlapLinear(const char* name, const OpList& ops);
  bool scatters() const { return scatter_ != nullptr || linear_.scatters_output(); }
  std::string scatter_label() const;
  distributed::GroupPtr group() const;
  /// How many pieces of a result with so many rows on each rank.
  distributed::OverlapModel::Choice choose(const Value& x, int64_t rows, int64_t in, int64_t out);

  BasicLinearImpl& linear_;
  BiasImpl* bias_;
  ReduceScatterImpl* scatter_;
  distributed::OverlapModel model_;
};

class OverlapForwardLinear : public OverlapLinear {
 public:
  LIGATURE_BUILTIN(OverlapForwardLinear)
  explicit OverlapForwardLinear(const OpList& ops) : OverlapLinear("OverlapForwardLinear", ops) {}
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;

 private:
  Tensor scatter(const LinearFwdArgs& fwd);
};

class OverlapBackwardLinear : public OverlapLinear {
 public:
  LIGATURE_BUILTIN(OverlapBackwardLinear)
  explicit OverlapBackwardLinear(const OpList& ops) : OverlapLinear("OverlapBackwardLinear", ops) {}
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  Tensor input_grad_in_pieces(const LinearBwdArgs& args, const Tensor& own, int64_t pieces,
                              Tensor& dy);
};

FusionRule overlap_forward_linear_rule();
FusionRule overlap_forward_row_linear_rule();
FusionRule overlap_backward_linear_rule();

}  // namespace ligature
