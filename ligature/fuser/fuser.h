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
};

/// Example:
/// ```
/// OperationFuser fuser({norm.ptr(), fc1.ptr(), act.ptr(), fc2.ptr()});
/// Tensor y = fuser(x)[0];
/// ```
class OperationFuser {
 public:
  explicit OperationFuser(const OpList& ops, FuserOptions options = {});

  /// Runs with the operations' own parameters. Returns the output, then the extra outputs.
  std::vector<Tensor> operator()(const Tensor& input, std::vector<Tensor> extra_inputs = {},
                                 std::vector<OpKwargs> kwargs = {});
  /// Before the first call: operations may still change their parameters.
  void prepare();
  /// Runs with everything given.
  std::vector<Tensor> run(Call&& call);

  size_t num_basic_ops() const { return basic_ops_.size(); }
  const std::vector<BasicOpPtr>& basic_ops() const { return basic_ops_; }
  size_t num_extra_inputs() const { return wiring_->caller_inputs.size(); }
  size_t num_extra_outputs() const { return wiring_->caller_outputs.size(); }
  const Wiring& wiring() const { return *wiring_; }

  /// The plan of the last call; null before the first.
  std::shared_ptr<const Plan> plan() const;
  void set_recompute(Recompute recompute);
  Recompute recompute() const { return options_.recompute; }

 private:
  struct PlanKey {
    uint64_t registry = 0;
    size_t first_backward_op = 0;
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    std::string recipe;
    bool operator==(const PlanKey&) const = default;
  };

  std::shared_ptr<const Plan> plan_for(const PlanKey& key,
                                       const std::shared_ptr<const Recipe>& recipe);
  void check_call(const Call& call) const;

  OpList ops_;  // as given: keeps composites alive
  std::vector<BasicOpPtr> basic_ops_;
  std::shared_ptr<const Wiring> wiring_;
  FuserOptions options_;
  mutable std::recursive_mutex mutex_;  // a fusion may look at the fuser that is being planned
  std::vector<std::pair<PlanKey, std::shared_ptr<const Plan>>> plans_;
  std::shared_ptr<const Plan> last_plan_;
  std::atomic<bool> prepared_{false};
};

}  // namespace ligature
