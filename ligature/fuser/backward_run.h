// One backward run of a plan, whoever asked for it: autograd's node or a compiled graph. It walks
// the steps; where saved values come from, and when they may go, is the caller's business
// (SavedValues).
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <vector>

#include "ligature/fuser/observer.h"
#include "ligature/fuser/plan.h"

namespace ligature {

/// Which gradients one backward run has to give.
struct BackwardNeed {
  size_t lowest_op = 0;  ///< nothing before it is asked for
  GradFlagList flags;

  /// What forward foresaw, narrowed to the results that are `wanted` now. Results are numbered: the
  /// input, then the parameters, then the caller's extra inputs.
  static BackwardNeed of(const Plan& plan, const Contexts& contexts,
                         const std::vector<size_t>& param_offsets,
                         c10::function_ref<bool(size_t)> wanted);
};

/// What forward's steps gave, for gradients that are missing; by operation. Nothing for a plan
/// without extra inputs and outputs or without operations of users.
struct ForwardShapes {
  std::vector<std::vector<std::optional<ValueMeta>>> extra_outputs;  ///< none where one was omitted
  std::vector<std::optional<ValueMeta>> outputs;                     ///< none where it is unknown
};

/// The name in a context's state under which its operation's backward finds that it cannot use it,
/// and why.
inline constexpr const char* kUnusableContext = "unusable context";
/// Throws what is found there.
void check_usable(const OperationContext& ctx);

// What comes from outside of our own kernels, as those can read it. An operation of a host language
// is given it as it is.
void read_saved(OperationContext& ctx, const BasicOperation& op);
void read_extra_gradients(std::vector<Tensor>& grads, const BasicOperation& op);

struct BackwardCall {
  const Plan& plan;
  Contexts& contexts;  ///< their flags are narrowed while it runs
  const std::vector<size_t>& param_offsets;
  const ForwardShapes& shapes;
  SavedValues& saved;
  RunObserver* observer = nullptr;  ///< sees each step; null: nobody does
  SmallBytes* bytes = nullptr;      ///< as ForwardRun::run has it
};

class BackwardRun {
 public:
  BackwardRun(const BackwardCall& call, const BackwardNeed& need);
  /// The contexts serve every backward of this graph: what this one narrowed is put back.
  ~BackwardRun();
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;

  /// `dy`: of the output. `caller_grads`: of the extra outputs returned, undefined ones are zero.
  /// Gives the gradients of the input, the parameters and the caller's extra inputs.
  std::vector<Tensor> run(Value dy, std::vector<Tensor> caller_grads);

 private:
  Value run_step(size_t index, Value dy);
  /// Contexts and gradients of extra outputs, as the step's operations read them.
  void prepare(const PlanStep& step);
  void take_gradients(const PlanStep& step, FuserBackwardResult& result);
  bool has_gradient(const PlanStep& step, Value& dy) const;
  void fill_in_zeros(const PlanStep& step);

  const BackwardCall call_;
  const Plan& plan_;
  const BackwardNeed& need_;
  Contexts& contexts_;
  const size_t first_extra_;  // of the caller's extra inputs among the results
  GradFlagList flags_of_forward_;
  std::vector<Tensor> results_;
  c10::SmallVector<std::vector<Tensor>, 6> grad_extra_outputs_;
  c10::SmallVector<OperationContext*, 8> ctxs_;  // of the step
  const bool watched_;                           // by modes of torch
  bool from_outside_ = true;                     // the gradient comes from no kernel of ours
};

}  // namespace ligature
