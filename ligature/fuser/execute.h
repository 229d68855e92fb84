// Runs a plan: forward over flat lists of tensors, and backward as one autograd node.
#pragma once

#include <memory>
#include <vector>

#include "ligature/fuser/observer.h"
#include "ligature/fuser/plan.h"
#include "ligature/recipes/autocast.h"

namespace ligature {

/// Everything one call computes with.
struct Call {
  Value input;
  std::vector<Tensor> params;         ///< of all basic operations, in order
  std::vector<size_t> param_offsets;  ///< where each operation's begin; one more than operations
  std::vector<Tensor> extra_inputs;   ///< the caller's
  std::vector<OpKwargs> kwargs;       ///< one per basic operation, or none at all
  std::vector<bool> training;         ///< one per basic operation; empty: all of them are
  std::optional<at::ScalarType> autocast_dtype;
  AutocastState autocast;            ///< the low-precision context; disabled by default
  std::shared_ptr<void> keep_alive;  ///< what must live as long as backward may run
  const Bound* planner = nullptr;    ///< what a binding tells its own fusions of who plans
  RunObserverPtr observer;           ///< sees each step; null: nobody does
  bool dry = false;                  ///< tensors without memory: nothing may change its state
  bool keep_weights = true;          ///< as in OpArgs
  bool no_sync = false;              ///< the host may not wait for a device

  bool is_training(size_t op) const { return training.empty() || training[op]; }
};

/// Which operations take part in backward, and in what.
struct GradPlan {
  size_t first_backward_op = 0;
  GradFlagList flags;
};

GradPlan plan_gradients(const Call& call, const Wiring& wiring, size_t num_ops);

/// The output, then the extra outputs.
std::vector<Tensor> execute(const std::shared_ptr<const Plan>& plan, Call&& call,
                            const GradPlan& grads);

}  // namespace ligature
