#include "ligature/fuser/registry.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "ligature/fused/builtin_fusions.h"

namespace ligature {
namespace {

struct Entry {
  uint64_t id;
  std::shared_ptr<const Fusion> fusion;

  bool last() const {
    const auto* rule = std::get_if<FusionRule>(fusion.get());
    return rule != nullptr && rule->last;
  }
};

struct Registry {
  std::mutex mutex;
  std::array<std::vector<Entry>, 3> passes;
  uint64_t next_id = 1;
  std::atomic<uint64_t> version{1};

  Registry() {
    for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
      for (auto& rule : builtin_fusions(pass)) {
        entries(pass).push_back({next_id++, std::make_shared<const Fusion>(std::move(rule))});
      }
    }
  }
  std::vector<Entry>& entries(Pass pass) { return passes[static_cast<size_t>(pass)]; }
};

Registry& registry() {
  // Never destroyed: registrations of a host language may outlive static destruction.
  static Registry* instance = new Registry;
  return *instance;
}

}  // namespace

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

FusionHandle register_fusion(Pass pass, Fusion fusion, bool prepend) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const uint64_t id = all.next_id++;
  auto& entries = all.entries(pass);
  Entry entry{id, std::make_shared<const Fusion>(std::move(fusion))};
  auto place = prepend        ? entries.begin()
               : entry.last() ? entries.end()
                              : std::find_if(entries.begin(), entries.end(),
                                             [](const Entry& other) { return other.last(); });
  entries.insert(place, std::move(entry));
  ++all.version;
  return {pass, id};
}

void FusionHandle::unregister() {
  Registry& all = registry();
  std::shared_ptr<const Fusion> removed;  // destroyed after the lock: it may call a host language
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& entries = all.entries(pass_);
  auto found = std::find_if(entries.begin(), entries.end(),
                            [this](const Entry& entry) { return entry.id == id_; });
  if (found == entries.end()) return;
  removed = found->fusion;
  entries.erase(found);
  ++all.version;
}

bool FusionHandle::registered() const {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto& entries = all.entries(pass_);
  return std::any_of(entries.begin(), entries.end(),
                     [this](const Entry& entry) { return entry.id == id_; });
}

FusionList registered_fusions(Pass pass) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  FusionList out;
  for (const auto& entry : all.entries(pass)) out.push_back(entry.fusion);
  return out;
}

uint64_t registry_version() { return registry().version.load(std::memory_order_acquire); }

}  // namespace ligature
