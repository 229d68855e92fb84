#include "ligature/fuser/strict.h"

#include <algorithm>
#include <atomic>

#include "ligature/kernels/run_context.h"

namespace ligature {
namespace {

bool fired(const Plan& plan, const std::string& fusion) {
  for (const auto& report : plan.reports) {
    for (const Consideration& c : report.considered) {
      if (c.fusion == fusion && c.reason.empty()) return true;
    }
  }
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const PlanStep& step : *steps) {
      if (step.op->is_fused_op() && step.op->name() == fusion) return true;
    }
  }
  return false;
}

/// A registered fusion of this name, and its passes.
struct Found {
  std::shared_ptr<const Fusion> fusion;
  bool backward_only = true;
};

Found find(const std::string& name) {
  Found found;
  for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    for (const auto& fusion : registered_fusions(pass)) {
      if (fusion_name(*fusion) != name) continue;
      found.fusion = fusion;
      found.backward_only = found.backward_only && pass == Pass::Backward;
    }
  }
  return found;
}

std::string all_names() {
  std::string out;
  for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    for (const auto& fusion : registered_fusions(pass)) {
      out += (out.empty() ? "" : ", ") + fusion_name(*fusion);
    }
  }
  return out;
}

}  // namespace

std::string why_not_fused(const Plan& plan, const std::string& name) {
  if (fired(plan, name)) return "";
  const Found found = find(name);
  if (found.fusion == nullptr) return "no such fusion is registered; there are " + all_names();
  if (found.backward_only && !plan.options.requires_grad) return "";
  if (!plan.fuse) return "fusing is switched off";
  std::string reasons;
  for (const auto& report : plan.reports) {
    size_t offset = 0;
    if (report.pass == Pass::Backward) {
      for (const PlanStep& step : plan.backward) {
        if (step.first + step.count <= plan.first_backward_op) offset = step.first + step.count;
      }
    }
    for (const Consideration& c : report.considered) {
      if (c.fusion != name) continue;
      const size_t at = c.position + offset;
      reasons += (reasons.empty() ? "" : "; ") + ("at " + std::to_string(at) + " ") +
                 (at < plan.basic_ops.size() ? plan.basic_ops[at]->name() : "") + ": " + c.reason;
    }
  }
  if (!reasons.empty()) return reasons;
  if (const auto* rule = std::get_if<FusionRule>(found.fusion.get())) {
    std::string wanted;
    for (const PatternElement& element : rule->pattern) {
      if (element.optional) {
        wanted += (wanted.empty() ? "" : ", ") + ("[" + element.what + "]");
      } else {
        wanted += (wanted.empty() ? "" : ", ") + element.what;
      }
    }
    return "its pattern (" + wanted + ") begins nowhere here, or other fusions came first";
  }
  return "it was not tried";
}

bool forbids_sync(const std::vector<std::string>& fusions) {
  return std::find(fusions.begin(), fusions.end(), kNoSync) != fusions.end();
}

void check_strict(const Plan& plan, const std::vector<std::string>& fusions) {
  for (const auto& name : fusions) {
    if (name == kNoSync) continue;
    const std::string reason = why_not_fused(plan, name);
    LIGATURE_CHECK_STATE(reason.empty(), "strict: fusion '", name, "' did not fire for ",
                         describe(plan.basic_ops), ": ", reason);
  }
}

struct StrictScope::Demand {
  struct Missing {
    std::string fusion;
    bool fired = false;
    std::vector<std::string> reasons;
  };

  void see(const Plan& plan);

  std::vector<Missing> fusions;
  bool no_sync = false;
  Where where = Where::Every;
  std::atomic<bool> dropped{false};
};

struct StrictScope::Demands : kernels::ThreadPart {
  std::vector<std::shared_ptr<Demand>> all;
};

std::vector<std::shared_ptr<StrictScope::Demand>>& StrictScope::demands() {
  auto& all = kernels::thread_part<Demands>(&kernels::RunContext::strict).all;
  while (!all.empty() && all.back()->dropped) all.pop_back();
  return all;
}

StrictScope::StrictScope(std::vector<std::string> fusions, Where where)
    : demand_(std::make_shared<Demand>()) {
  for (auto& name : fusions) {
    if (name == kNoSync) {
      demand_->no_sync = true;
    } else {
      demand_->fusions.push_back({std::move(name), false, {}});
    }
  }
  demand_->where = where;
  demands().push_back(demand_);
}

StrictScope::~StrictScope() { demand_->dropped = true; }

bool StrictScope::active() { return !demands().empty(); }

bool StrictScope::forbids_sync() {
  const auto& all = demands();
  return std::any_of(all.begin(), all.end(),
                     [](const auto& one) { return one->no_sync && !one->dropped; });
}

void StrictScope::check(const Plan& plan) {
  const auto all = demands();
  for (size_t i = all.size(); i-- > 0;) {
    if (!all[i]->dropped) all[i]->see(plan);
  }
}

void StrictScope::Demand::see(const Plan& plan) {
  for (Missing& missing : fusions) {
    if (where == Where::Every) {
      check_strict(plan, {missing.fusion});
      continue;
    }
    if (missing.fired) continue;
    std::string reason = why_not_fused(plan, missing.fusion);
    missing.fired = reason.empty();
    reason = describe(plan.basic_ops) + ": " + reason;
    const auto& known = missing.reasons;
    if (std::find(known.begin(), known.end(), reason) == known.end()) {
      missing.reasons.push_back(std::move(reason));
    }
  }
}

void StrictScope::finish() const {
  if (demand_->where == Where::Every) return;
  for (const Demand::Missing& missing : demand_->fusions) {
    if (missing.fired) continue;
    std::string reasons;
    for (const auto& reason : missing.reasons) reasons += (reasons.empty() ? "" : "\n  ") + reason;
    LIGATURE_CHECK_STATE(false, "strict: fusion '", missing.fusion, "' fired nowhere",
                         reasons.empty() ? ": no operations ran" : ":\n  " + reasons);
  }
}

}  // namespace ligature
