// Who sees a run of a plan, step by step: explain() and the checks of ligature::testing.
#pragma once

#include <memory>

#include "ligature/fuser/plan.h"
#include "ligature/kernels/log.h"

namespace ligature {

struct Call;

/// Its functions are called in the order of the steps, in the thread that runs them; backward may
/// run in another thread than forward. Steps are numbered as in the plan.
class RunObserver {
 public:
  virtual ~RunObserver() = default;

  virtual void begin_forward(const Plan& /*plan*/, const Call& /*call*/) {}
  /// Gives the log in which the step's kernels are noted; null: nobody asks for them.
  virtual const kernels::KernelLog* before_forward(size_t /*step*/, const Value& /*input*/,
                                                   ArgsList /*args*/) {
    return nullptr;
  }
  virtual void after_forward(size_t /*step*/, const Value& /*input*/,
                             const FuserForwardResult& /*result*/, const Contexts& /*contexts*/) {}

  virtual const kernels::KernelLog* before_backward(size_t /*step*/, const Value& /*grad_output*/,
                                                    GradList /*grad_extra_outputs*/) {
    return nullptr;
  }
  virtual void after_backward(const PlanStep& /*step*/, size_t /*index*/,
                              const FuserBackwardResult& /*result*/) {}

  /// Instead of the function after a step, where the step threw.
  virtual void step_failed() {}
};
using RunObserverPtr = std::shared_ptr<RunObserver>;

/// Tells the observer, which may be null, of a step that throws.
class ObservedStep {
 public:
  explicit ObservedStep(RunObserver* observer) : observer_(observer) {}
  ~ObservedStep() {
    if (observer_ != nullptr) observer_->step_failed();
  }
  ObservedStep(const ObservedStep&) = delete;
  ObservedStep& operator=(const ObservedStep&) = delete;
  void ran() { observer_ = nullptr; }

 private:
  RunObserver* observer_;
};

/// Makes what sees the runs of plans with Python operations, which cannot be asked beforehand.
using MakeObserver = RunObserverPtr (*)(const Plan& plan, at::DeviceType device);
bool set_observer_of_calls(MakeObserver make);

}  // namespace ligature
