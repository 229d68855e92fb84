// The plans that a fuser keeps: one per situation, those used last.
#include <algorithm>
#include <unordered_map>

#include "ligature/fuser/fuser.h"
#include "ligature/fuser/live_fusers.h"
#include "ligature/fuser/strict.h"

namespace ligature {

// Recipes with the same fields are the same to a plan.
bool OperationFuser::PlanKey::operator==(const PlanKey& other) const {
  const bool same_recipe =
      recipe == other.recipe || (recipe != nullptr && other.recipe != nullptr &&
                                 recipe->plan_key() == other.recipe->plan_key());
  return same_recipe && registry == other.registry &&
         first_backward_op == other.first_backward_op && dtype == other.dtype &&
         device == other.device && calibrating == other.calibrating;
}

namespace {

constexpr size_t kMostPlans = 16;

bool is_users(const PlanStep& step) { return !step.kind.ours && step.op->is_fused_op(); }

/// Stands for an operation of a fusion that is gone, where a plan is explained that had it.
class GoneOperation final : public FusedOperation {
 public:
  explicit GoneOperation(FusibleOperation& op)
      : FusedOperation(op.name(), parts(op)), is_python_op_(op.is_python_op()) {}
  bool is_python_op() const override { return is_python_op_; }

 private:
  static OpList parts(FusibleOperation& op) {
    const auto basic = op.basic_ops();
    return {basic.begin(), basic.end()};
  }
  bool is_python_op_;
};

}  // namespace

LiveFusers& LiveFusers::get() {
  static auto* all = new LiveFusers;  // fusers may outlive static objects
  return *all;
}

LiveFusers::LiveFusers() {
  at_unregister([this] { drop_stale_plans(); });
}

void LiveFusers::add(OperationFuser* fuser) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.emplace(fuser, 0);
}

void LiveFusers::remove(OperationFuser* fuser) {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return all_.at(fuser) == 0; });
  all_.erase(fuser);
}

// A fuser traces its last call before it drops the plan, which may run Python, and so its garbage
// collector, and that may end other fusers. So nothing runs under the mutex. A fuser that is shared
// lives on meanwhile; one that is not waits in its destructor.
void LiveFusers::drop_stale_plans() {
  struct Seen {
    OperationFuser* fuser;
    std::shared_ptr<OperationFuser> shared;
  };
  const auto never_shared = [](const std::weak_ptr<OperationFuser>& fuser) {
    const std::weak_ptr<OperationFuser> none;
    return !fuser.owner_before(none) && !none.owner_before(fuser);
  };
  std::vector<Seen> seen;
  std::vector<std::shared_ptr<const Plan>> dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [fuser, looks] : all_) {
      auto shared = fuser->weak_from_this().lock();
      if (shared == nullptr && !never_shared(fuser->weak_from_this())) continue;  // it ends now
      if (shared == nullptr) ++looks;
      seen.push_back({fuser, std::move(shared)});
    }
  }
  const auto done = [&](const Seen& one) {
    if (one.shared != nullptr) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    --all_.at(one.fuser);
    idle_.notify_all();
  };
  for (size_t i = 0; i < seen.size(); ++i) {
    try {
      seen[i].fuser->drop_stale_plans(dropped);
    } catch (...) {
      std::for_each(seen.begin() + static_cast<std::ptrdiff_t>(i), seen.end(), done);
      throw;
    }
    done(seen[i]);
  }
}

std::shared_ptr<const Plan> OperationFuser::drop_plan(size_t index) {
  std::shared_ptr<const Plan> dropped = std::move(plans_[index].plan);
  plans_.erase(plans_.begin() + static_cast<std::ptrdiff_t>(index));
  dropped_plans_.fetch_add(1, std::memory_order_relaxed);
  return dropped;
}

void OperationFuser::drop_stale_plans(std::vector<std::shared_ptr<const Plan>>& dropped) {
  // One that plans now, or runs, drops its own when it plans next.
  const std::unique_lock<std::recursive_mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (size_t i = plans_.size(); i-- > 0;) {
    if (plans_[i].key.registry != registry_version()) dropped.push_back(drop_plan(i));
  }
  if (last_plan_ == nullptr || last_plan_->registry == registry_version()) return;
  const auto has_users = [](const std::vector<PlanStep>& steps) {
    return std::any_of(steps.begin(), steps.end(), is_users);
  };
  if (!has_users(last_plan_->forward) && !has_users(last_plan_->backward)) return;
  if (!trace_last_call()) return;
  auto explained = std::make_shared<Plan>(*last_plan_);
  std::unordered_map<const FusibleOperation*, OpPtr> gone;
  for (auto* steps : {&explained->forward, &explained->backward}) {
    for (PlanStep& step : *steps) {
      if (!is_users(step)) continue;
      OpPtr& stand_in = gone[step.op.get()];
      if (stand_in == nullptr) stand_in = std::make_shared<GoneOperation>(*step.op);
      step.op = stand_in;
    }
  }
  dropped.push_back(std::move(last_plan_));
  dropped_plans_.fetch_add(1, std::memory_order_relaxed);
  if (last_situation_) last_situation_->plan = explained;
  last_plan_ = std::move(explained);
}

OperationFuser::CachedPlan& OperationFuser::find_plan(const PlanKey& key, const Bound* planner) {
  const auto is_wanted = [&](const CachedPlan& kept) { return kept.key == key; };
  if (!plans_.empty() && is_wanted(plans_.back())) return plans_.back();
  const auto found = std::find_if(plans_.begin(), plans_.end(), is_wanted);
  if (found != plans_.end()) {
    std::rotate(found, found + 1, plans_.end());
    return plans_.back();
  }
  PlanOptions options;
  options.recipe = key.recipe;
  options.calibrating = key.calibrating;
  options.dtype = key.dtype;
  options.device = key.device;
  options.recompute = options_.recompute;
  options.requires_grad = key.first_backward_op < basic_ops_.size();
  options.planner = planner;
  auto plan = make_plan(basic_ops_, wiring_, options, key.first_backward_op, options_.fuse);
  for (size_t i = plans_.size(); i-- > 0;) {
    if (plans_[i].key.registry != key.registry) drop_plan(i);
  }
  if (plans_.size() == kMostPlans) drop_plan(0);
  return plans_.emplace_back(CachedPlan{key, std::move(plan), false});
}

std::shared_ptr<const Plan> OperationFuser::plan_for(const PlanKey& key, bool to_run,
                                                     const Bound* planner) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  CachedPlan* found = &find_plan(key, planner);
  if (!to_run) return found->plan;
  // What runs again follows the recipe that its first run followed.
  if (key.recipe != nullptr && !is_recomputing() &&
      !use_recipe(*found->plan, key.recipe, key.device)) {
    drop_plan(plans_.size() - 1);
    found = &find_plan(key, planner);
    use_recipe(*found->plan, key.recipe, key.device);
  }
  if (!found->checked) {
    check_strict(*found->plan, options_.strict);
    found->checked = true;
  }
  if (last_plan_ != found->plan) {
    if (last_plan_ != nullptr) dropped_plans_.fetch_add(1, std::memory_order_relaxed);
    last_plan_ = found->plan;
    for (const OpQuantizationPtr& own : last_plan_->quantizations) {
      if (own != nullptr) own->move_to(key.device);
    }
  }
  return found->plan;
}

std::vector<std::shared_ptr<const Plan>> OperationFuser::plans() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::shared_ptr<const Plan>> out;
  for (const CachedPlan& kept : plans_) out.push_back(kept.plan);
  if (last_plan_ != nullptr) out.push_back(last_plan_);
  if (last_situation_ && last_situation_->plan != nullptr) out.push_back(last_situation_->plan);
  return out;
}

std::shared_ptr<const Plan> OperationFuser::plan() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return last_plan_;
}

void OperationFuser::set_recompute(Recompute recompute) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (recompute == options_.recompute) return;
  options_.recompute = recompute;
  while (!plans_.empty()) drop_plan(plans_.size() - 1);
}

}  // namespace ligature
