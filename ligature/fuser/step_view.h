// How a step shows itself to torch's tools: as a range in profiles, under the name it has in the
// plan, and its GEMMs to modes that count them. Without such tools it costs two looks at
// thread-local flags.
#pragma once

#include <ATen/record_function.h>

#include <optional>

#include "ligature/base/modes.h"
#include "ligature/fuser/plan.h"
#include "ligature/kernels/log.h"

namespace ligature {

/// Tells the modes that are active, with a call of `ligature::gemms`, what GEMMs a step made.
void show_gemms(int64_t flops);

class StepView {
 public:
  /// `watched`: modes are active. `log`: where the kernels of the step are noted anyway, or null.
  StepView(const PlanStep& step, bool watched, const kernels::KernelLog* log, at::DeviceType device)
      : watched_(watched), log_(log) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
      range_.emplace(std::move(*callbacks));
      range_->before(step.op->name());
    }
    if (!watched) return;
    if (log == nullptr) log_ = &own_log_.emplace(device);
    // What operations in Python call is theirs to show.
    if (step.kind.ours) hidden_.emplace();
  }

  /// After the step ran.
  void finish() {
    if (watched_) {
      hidden_.reset();
      const int64_t flops = log_->flops();
      own_log_.reset();
      if (flops > 0) show_gemms(flops);
    }
    range_.reset();
  }

 private:
  bool watched_;
  const kernels::KernelLog* log_;
  std::optional<at::RecordFunction> range_;
  std::optional<kernels::KernelLog> own_log_;
  std::optional<ModesHidden> hidden_;
};

}  // namespace ligature
