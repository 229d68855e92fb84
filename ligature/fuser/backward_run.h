// One backward run of a plan, whoever asked for it: autograd's node or a compiled graph. It walks
// the steps; where saved values come from, and when they may go, is the caller's business.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <vector>

#include "ligature/fuser/plan.h"
#include "ligature/fuser/trace.h"

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

/// Who holds what forward saved.
class SavedValues {
 public:
  /// Puts what an operation saved into its context.
  virtual void unpack(size_t op) = 0;
  /// The operations from `first` to `end` (not included) have run.
  virtual void used(size_t first, size_t end) = 0;

 protected:
  ~SavedValues() = default;
};

struct BackwardCall {
  const Plan& plan;
  Contexts& contexts;  ///< their flags are narrowed while it runs
  const std::vector<size_t>& param_offsets;
  const ForwardShapes& shapes;
  SavedValues& saved;
  SavedOwner* owner;  ///< from whom steps may take saved tensors; null: from nobody
  TracePtr trace;
};

/// `dy`: of the output. `caller_grads`: of the extra outputs returned, undefined ones are zero.
/// Gives the gradients of the input, the parameters and the caller's extra inputs.
std::vector<Tensor> run_backward(const BackwardCall& call, const BackwardNeed& need, Value dy,
                                 std::vector<Tensor> caller_grads);

}  // namespace ligature
