#include "ligature/recipes/graphed_segment.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"

namespace ligature {
namespace {

struct Recorded {
  std::mutex mutex;
  std::shared_ptr<CapturedPart> part;
  std::atomic<bool> any{false};
};

Recorded& recorded_part() {
  static auto* now = new Recorded;  // outlives every thread
  return *now;
}

}  // namespace

QuantizedPtr CapturedWeights::get(const std::shared_ptr<const WeightCache>& of,
                                  const std::function<QuantizedPtr()>& make) {
  std::lock_guard<std::mutex> lock(mutex_);
  QuantizedPtr& kept = made_[of];
  if (kept == nullptr) kept = make();
  return kept;
}

std::shared_ptr<CapturedPart> CapturedPart::recorded() {
  Recorded& now = recorded_part();
  if (!now.any.load(std::memory_order_relaxed)) return nullptr;
  std::lock_guard<std::mutex> lock(now.mutex);
  return now.part;
}

void CapturedPart::begin() {
  LIGATURE_CHECK_STATE(autocast_depth() == 0,
                       "graphs of a part of a step are captured outside of autocast");
  Recorded& now = recorded_part();
  std::lock_guard<std::mutex> lock(now.mutex);
  LIGATURE_CHECK_STATE(now.part == nullptr, "graphs of another part of a step are being captured");
  now.part = shared_from_this();
  now.any = true;
}

void CapturedPart::end() {
  Recorded& now = recorded_part();
  std::lock_guard<std::mutex> lock(now.mutex);
  now.part = nullptr;
  now.any = false;
}

void CapturedPart::meet(const DelayedScalePtr& delayed) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto same = [&](const Met& met) { return met.delayed == delayed; };
  if (std::any_of(met_.begin(), met_.end(), same)) return;
  met_.push_back(
      {delayed, kernels::is_captured(delayed->amax) ? at::Tensor() : delayed->amax.clone()});
}

void CapturedPart::leave_update(const AmaxReduction& reduce) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!reduce_) reduce_ = reduce;
}

QuantizedPtr CapturedPart::weight(const std::shared_ptr<const WeightCache>& of,
                                  const std::function<QuantizedPtr()>& make) const {
  return weights != nullptr ? weights->get(of, make) : make();
}

void CapturedPart::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  for (const Met& met : met_) {
    if (met.amax.defined()) met.delayed->amax.copy_(met.amax);
  }
  met_.clear();
}

void CapturedPart::ran_forward() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (met_.empty()) return;
  LIGATURE_CHECK_STATE(!is_recomputing() && torch::autograd::get_current_graph_task_id() < 0,
                       "a graph cannot be run again with the factors that delayed scaling had "
                       "before; use checkpoint inside what is captured, not around it");
  std::shared_ptr<DelayedSession> session = autocast_state().session;
  const bool alone = session == nullptr;
  if (alone) session = std::make_shared<DelayedSession>();
  if (reduce_ && !session->reduction()) session->set_reduction(reduce_);
  for (const Met& met : met_) session->meet(met.delayed);
  if (alone) session->update();
}

void CapturedPart::ran_backward() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (met_.empty()) return;
  const std::shared_ptr<DelayedSession> session = backward_session(reduce_);
  LIGATURE_CHECK_STATE(session != nullptr,
                       "the graph of a backward ran outside of a backward pass");
  for (const Met& met : met_) session->meet(met.delayed);
}

}  // namespace ligature
