// A plan: which operations run in forward and in backward, decided once.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ligature/base/small_bytes.h"
#include "ligature/fuser/agreement.h"
#include "ligature/fuser/match.h"
#include "ligature/fuser/registry.h"
#include "ligature/fuser/wiring.h"

namespace ligature {

/// Flags of every basic operation. Lists that a call makes of its operations have room for those of
/// a usual pipeline in themselves.
using GradFlagList = c10::SmallVector<GradFlags, 6>;

/// What running a step depends on besides its operation, looked up once.
struct StepKind {
  bool python = false;
  bool ours = false;  ///< all its kernels are Ligature's own or ATen's; a user's may launch others

  StepKind() = default;
  explicit StepKind(const FusibleOperation& op);
};

/// One call in a plan: an operation and the run of basic operations it covers.
struct PlanStep {
  OpPtr op;
  size_t first = 0;
  size_t count = 0;
  StepKind kind{};
};

struct Plan {
  std::vector<BasicOpPtr> basic_ops;
  std::shared_ptr<const Wiring> wiring;
  std::vector<PlanStep> forward;
  std::vector<PlanStep>
      backward;  ///< in forward order; backward runs them from the last to the first
  /// Operations before this one save nothing and do not run in backward.
  size_t first_backward_op = 0;
  PlanOptions options;
  uint64_t registry = 0;  ///< version of the fusions that it was made with
  /// What each basic operation has of the recipe; null in high precision.
  std::vector<OpQuantizationPtr> quantizations;
  /// Neighbours' quantizers, one entry per basic operation.
  std::vector<QuantizerPtr> input_quantizers;
  std::vector<QuantizerPtr> grad_output_quantizers;
  struct PassReport {
    Pass pass;
    std::vector<Consideration> considered;
  };
  std::vector<PassReport> reports;
  bool has_python_ops = false;  ///< an operation of a host language takes part
  bool ours = true;             ///< no step is a user's
  bool has_extras = false;      ///< there are extra inputs or outputs, the caller's or on channels
  /// By basic operation: does a user's fusion fill its context, and another backward read it?
  /// Empty: for none.
  std::vector<bool> filled_by_user;
  bool fuse = true;  ///< false: fusing was switched off
  /// Over which it communicates with other ranks.
  std::vector<std::optional<std::string>> groups;
  std::vector<PartialGradients> partial_gradients;
  mutable Agreed agreed;
  /// What the small buffers of a run take.
  mutable SmallBytes forward_bytes, backward_bytes;
};

/// Checks the steps of a plan and looks up what running them depends on.
void finish_plan(Plan& plan);

/// Before a call with this plan: its operations know that they compute with this recipe, whose plan
/// key is that of the plan's, and on which device. False where one has forgotten what the plan has
/// of it.
bool use_recipe(const Plan& plan, const RecipePtr& recipe, at::Device device);

/// Adds what the plan's next basic operation has of the recipe; `own` is null in high precision.
void add_quantizers(Plan& plan, BasicOperation& op, OpQuantizationPtr own);

/// What basic operation `i` is given of the recipe: its own quantizers and its neighbours'.
void give_quantizers(const Plan& plan, const GradFlagList& flags, size_t i, OpArgs& args,
                     OperationContext& ctx);

/// Runs the three passes. Each registered fusion is applied once per pass; after each pass the
/// result must stand for the same basic operations in the same order.
std::shared_ptr<const Plan> make_plan(std::vector<BasicOpPtr> ops,
                                      std::shared_ptr<const Wiring> wiring, PlanOptions options,
                                      size_t first_backward_op, bool fuse = true);

}  // namespace ligature
