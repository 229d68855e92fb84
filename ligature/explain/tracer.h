// Writes a trace while a plan runs, forward and backward.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ligature/explain/trace.h"
#include "ligature/fuser/execute.h"

namespace ligature {

/// Knows every tensor of forward by where it came from, so that it can tell what a saved one is.
class Tracer final : public RunObserver {
 public:
  Tracer(const Plan& plan, at::DeviceType device);

  /// What it has seen so far.
  Trace trace() const;

  void begin_forward(const Plan& plan, const Call& call) override;
  const kernels::KernelLog* before_forward(size_t step, const Value& input, ArgsList args) override;
  void after_forward(size_t step, const Value& input, const FuserForwardResult& result,
                     const Contexts& contexts) override;
  const kernels::KernelLog* before_backward(size_t step, const Value& grad_output,
                                            GradList grad_extra_outputs) override;
  void after_backward(const PlanStep& step, size_t index,
                      const FuserBackwardResult& result) override;
  void step_failed() override { log_.reset(); }

 private:
  struct Known {
    Tensor tensor;
    std::string what;
    bool ours;  // made by a step: its memory is there for backward alone
    bool counted = false;
  };

  void know(const Tensor& tensor, std::string what, bool ours);
  TracedSave saved(size_t op, const Value& value);
  TracedStep take_log(const FusibleOperation& op);

  at::DeviceType device_;
  mutable std::mutex mutex_;  // of the trace: backward may run in another thread
  Trace trace_;
  // While forward or backward runs.
  const Plan* plan_ = nullptr;
  std::unique_ptr<kernels::KernelLog> log_;
  std::vector<Known> known_;
  TracedValue grad_output_;
};

}  // namespace ligature
