#include "ligature/fuser/registry.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

namespace ligature {
namespace {

struct Entry {
  uint64_t id;
  std::shared_ptr<const Fusion> fusion;
};

bool in_te_ops(const Fusion& fusion) {
  const auto* rule = std::get_if<FusionRule>(&fusion);
  return rule != nullptr && rule->in_te_ops != nullptr;
}

/// The fusions of one pass: the built-in ones in the order of their table, and the users'.
struct PassFusions {
  FusionList builtin;
  std::vector<Entry> prepended;
  std::vector<Entry> appended;
};

BuiltinFusions builtin_table = [](Pass) { return std::vector<FusionRule>(); };

struct Registry {
  std::mutex mutex;
  std::array<PassFusions, 3> passes;
  uint64_t next_id = 1;
  std::atomic<uint64_t> version{1};
  std::vector<std::function<void()>> at_unregister;

  Registry() {
    for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
      for (auto& rule : builtin_table(pass)) {
        of(pass).builtin.push_back(std::make_shared<const Fusion>(std::move(rule)));
      }
    }
  }
  PassFusions& of(Pass pass) { return passes[static_cast<size_t>(pass)]; }
};

auto find(std::vector<Entry>& entries, uint64_t id) {
  return std::find_if(entries.begin(), entries.end(),
                      [id](const Entry& entry) { return entry.id == id; });
}

Registry& registry() {
  // Never destroyed: registrations of a host language may outlive static destruction.
  static Registry* instance = new Registry;
  return *instance;
}

}  // namespace

std::vector<FusionRule> builtin_fusions(Pass pass) { return builtin_table(pass); }

bool set_builtin_fusions(BuiltinFusions table) {
  builtin_table = table;
  return true;
}

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::Joint:
      return "joint forward-backward";
    case Pass::Forward:
      return "forward";
    case Pass::Backward:
      return "backward";
  }
  return "";
}

const std::string& fusion_name(const Fusion& fusion) {
  return std::visit([](const auto& f) -> const std::string& { return f.name; }, fusion);
}

namespace {

/// Refuses what planning would have to call and cannot.
void check_callable(const Fusion& fusion) {
  const std::string& name = fusion_name(fusion);
  if (const auto* function = std::get_if<FusionFunction>(&fusion)) {
    LIGATURE_CHECK_TYPE(function->apply != nullptr, "fusion '", name, "' has no function");
    return;
  }
  const auto& rule = std::get<FusionRule>(fusion);
  LIGATURE_CHECK(!rule.pattern.empty(), "fusion '", name, "' has an empty pattern");
  for (const PatternElement& element : rule.pattern) {
    LIGATURE_CHECK_TYPE(element.take != nullptr, "fusion '", name, "': place '", element.what,
                        "' of its pattern has no function");
  }
  LIGATURE_CHECK_TYPE(rule.make != nullptr, "fusion '", name, "' has no function that makes it");
}

}  // namespace

FusionHandle register_fusion(Pass pass, Fusion fusion, bool prepend) {
  LIGATURE_CHECK(pass >= Pass::Joint && pass <= Pass::Backward,
                 "pass must be Joint, Forward or Backward, got number ", static_cast<int>(pass));
  check_callable(fusion);
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const uint64_t id = all.next_id++;
  Entry entry{id, std::make_shared<const Fusion>(std::move(fusion))};
  PassFusions& fusions = all.of(pass);
  if (prepend) {
    fusions.prepended.insert(fusions.prepended.begin(), std::move(entry));
  } else {
    fusions.appended.push_back(std::move(entry));
  }
  ++all.version;
  return {pass, id};
}

void FusionHandle::unregister() {
  Registry& all = registry();
  std::shared_ptr<const Fusion> removed;  // destroyed after the lock: it may call a host language
  std::vector<std::function<void()>> told;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    PassFusions& fusions = all.of(pass_);
    for (auto* entries : {&fusions.prepended, &fusions.appended}) {
      const auto found = find(*entries, id_);
      if (found == entries->end()) continue;
      removed = found->fusion;
      entries->erase(found);
      break;
    }
    if (removed == nullptr) return;
    ++all.version;
    told = all.at_unregister;
  }
  for (const auto& function : told) function();
}

void at_unregister(std::function<void()> function) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.at_unregister.push_back(std::move(function));
}

bool FusionHandle::registered() const {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  PassFusions& fusions = all.of(pass_);
  return find(fusions.prepended, id_) != fusions.prepended.end() ||
         find(fusions.appended, id_) != fusions.appended.end();
}

std::vector<FusionTurn> fusion_turns(Pass pass) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const PassFusions& fusions = all.of(pass);
  std::vector<FusionTurn> out;
  for (const auto& entry : fusions.prepended) out.push_back({entry.fusion, false});
  for (const auto& fusion : fusions.builtin) {
    if (in_te_ops(*fusion)) out.push_back({fusion, true});
  }
  for (const auto& entry : fusions.appended) out.push_back({entry.fusion, false});
  for (const auto& fusion : fusions.builtin) out.push_back({fusion, false});
  return out;
}

FusionList registered_fusions(Pass pass) {
  FusionList out;
  for (auto& turn : fusion_turns(pass)) {
    if (std::find(out.begin(), out.end(), turn.fusion) == out.end()) {
      out.push_back(std::move(turn.fusion));
    }
  }
  return out;
}

uint64_t registry_version() { return registry().version.load(std::memory_order_acquire); }

}  // namespace ligature
