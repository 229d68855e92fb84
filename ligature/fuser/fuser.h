// OperationFuser: a run of operations, planned once per situation and executed as one autograd
// node.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ligature/fuser/execute.h"

namespace ligature {

struct FuserOptions {
  Recompute recompute = Recompute::None;
  bool fuse = true;                        ///< false: run the basic operations one by one
  bool use_channels = true;                ///< false: every extra input and output is the caller's
  std::vector<std::string> open_channels;  ///< channels that continue in another fuser
  std::vector<std::string> strict;         ///< fusions that must fire; planning fails otherwise
};

/// What a call looks like: enough to plan it and to trace it without computing.
struct Situation {
  struct Input {
    ValueMeta meta;
    at::DimVector strides;
    bool requires_grad = false;
    Tensor example;  ///< values to run operations of a host language on; else zeros

    /// `device`: what a tensor without memory stands for.
    static Input of(const Tensor& tensor, at::Device device);
  };
  Input input;
  std::vector<Input> extra_inputs;
  std::optional<at::ScalarType> autocast_dtype;
  std::string why_high_precision;  ///< inside an autocast that allows it
  bool gradients = true;
  /// Of a call that was made: what it ran, and what needed gradients then.
  std::shared_ptr<const Plan> plan;
  GradPlan grads;

  static Situation of(const Tensor& input, const std::vector<Tensor>& extra_inputs,
                      at::Device device);
};

// What explain() gives (explain/explain.h).
struct Explanation;
struct ExplainedCall;
struct ExplainedPart;

/// Example:
/// ```
/// OperationFuser fuser({norm.ptr(), fc1.ptr(), act.ptr(), fc2.ptr()});
/// Tensor y = fuser(x)[0];
/// ```
class OperationFuser : public std::enable_shared_from_this<OperationFuser> {
 public:
  explicit OperationFuser(const OpList& ops, FuserOptions options = {});
  ~OperationFuser();
  OperationFuser(const OperationFuser&) = delete;
  OperationFuser& operator=(const OperationFuser&) = delete;

  /// Runs with the operations' own parameters. Returns the output, then the extra outputs.
  std::vector<Tensor> operator()(const Tensor& input, std::vector<Tensor> extra_inputs = {},
                                 std::vector<OpKwargs> kwargs = {});
  /// Before the first call: operations may still change their parameters.
  void prepare();
  /// Runs with everything given.
  std::vector<Tensor> run(Call&& call);
  /// For a call that is made as a function of graphs (compile/) and not by run(): checks it,
  /// remembers it for explain(), and says why it is in high precision inside an autocast.
  std::string prepare_flat(Call& call);

  size_t num_basic_ops() const { return basic_ops_.size(); }
  const std::vector<BasicOpPtr>& basic_ops() const { return basic_ops_; }
  size_t num_extra_inputs() const { return wiring_->caller_inputs.size(); }
  size_t num_extra_outputs() const { return wiring_->caller_outputs.size(); }
  const Wiring& wiring() const { return *wiring_; }

  /// The plan of the last call; null before the first.
  std::shared_ptr<const Plan> plan() const;
  /// All plans that it keeps: those of the situations called last, and that of the last call.
  std::vector<std::shared_ptr<const Plan>> plans() const;
  /// How many plans it has dropped so far.
  uint64_t dropped_plans() const { return dropped_plans_.load(std::memory_order_relaxed); }
  /// Gives away the plans made with other fusions than there are now. That of the last call is
  /// still explained, without the fused operations of users.
  void drop_stale_plans(std::vector<std::shared_ptr<const Plan>>& dropped);
  void set_recompute(Recompute recompute);
  Recompute recompute() const { return options_.recompute; }

  /// What the last call did; throws before the first.
  Explanation explain();
  /// What a call with these arguments would do. Nothing is computed, so tensors without memory (on
  /// the meta device) do as well; only operations of a host language run.
  Explanation explain(const Tensor& input, const std::vector<Tensor>& extra_inputs = {});

  /// The same for a binding or a container: `call` has everything but the inputs. Without a
  /// situation it is that of the last call.
  ExplainedCall explain_call(Call&& call, const std::optional<Situation>& situation);
  /// Where an input without memory would be: with the parameters.
  at::Device device_of(const Call& call) const;
  /// A call with the operations' own parameters and no inputs yet.
  Call collect() const;
  /// The plan of a call that is traced, not made: with such an input, in this low-precision
  /// context.
  std::shared_ptr<const Plan> plan_traced(const ValueMeta& input, const AutocastState& autocast,
                                          const GradPlan& grads);

 private:
  struct PlanKey {
    uint64_t registry = 0;
    size_t first_backward_op = 0;
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    RecipePtr recipe;  // null in high precision
    bool calibrating = false;
    bool operator==(const PlanKey& other) const;
  };
  struct CachedPlan {
    PlanKey key;
    std::shared_ptr<const Plan> plan;
    bool checked = false;  // for what is strictly wanted
  };

  PlanKey key_for(at::ScalarType dtype, at::Device device, const AutocastState& autocast,
                  const GradPlan& grads) const;
  PlanKey key_for(const Call& call, const GradPlan& grads) const {
    return key_for(call.input.dtype(), call.input.device(), call.autocast, grads);
  }
  /// `to_run`: it must hold what is strictly wanted, and becomes the last plan.
  std::shared_ptr<const Plan> plan_for(const PlanKey& key, bool to_run, const Bound* planner);
  CachedPlan& find_plan(const PlanKey& key, const Bound* planner);
  std::shared_ptr<const Plan> drop_plan(size_t index);
  bool trace_last_call();
  void check_call(const Call& call) const;
  bool may_be_elsewhere(size_t k) const;
  /// Refuses sparse and nested tensors: operations compute with dense memory.
  void check_layouts(const Call& call) const;
  /// The context of this thread, and why it is not followed: empty when it is.
  std::string enter_context(Call& call, at::Device device) const;
  void remember(const Call& call, const std::shared_ptr<const Plan>& plan, const GradPlan& grads,
                const std::string& why_high_precision);
  std::vector<Tensor> trace_call(Call call, const std::shared_ptr<const Plan>& plan,
                                 const GradPlan& grads) const;

  OpList ops_;  // as given: keeps composites alive
  std::vector<BasicOpPtr> basic_ops_;
  std::shared_ptr<const Wiring> wiring_;
  FuserOptions options_;
  mutable std::recursive_mutex mutex_;  // a fusion may look at the fuser that is being planned
  std::vector<CachedPlan> plans_;       // the last used one at the end
  std::atomic<uint64_t> dropped_plans_{0};
  std::shared_ptr<const Plan> last_plan_;
  std::optional<Situation> last_situation_;
  RunObserverPtr last_seen_;  // of plans with operations of a host language
  std::atomic<bool> prepared_{false};
};

/// How a call is made while torch.jit.trace records.
using RecordedRun = std::vector<Tensor> (*)(OperationFuser& fuser, Call&& call);
void set_recorded_run(RecordedRun run);

}  // namespace ligature
