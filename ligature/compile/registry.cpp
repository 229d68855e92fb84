// The numbers under which compiled graphs know fusers and their calls.
#include <map>
#include <unordered_map>

#include "ligature/compile/flat.h"

namespace ligature::compile {
namespace {

struct Entry {
  std::weak_ptr<OperationFuser> fuser;
  std::unordered_map<int64_t, std::shared_ptr<FlatCall>> calls;
};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, Entry> entries;
  int64_t next = 1;

  void drop_dead() {
    std::erase_if(entries, [](const auto& item) { return item.second.fuser.expired(); });
  }
};

Registry& registry() {
  static auto* made = new Registry;  // operations may outlive static objects
  return *made;
}

}  // namespace

int64_t register_fuser(const std::shared_ptr<OperationFuser>& fuser) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [number, entry] : all.entries) {
    if (entry.fuser.lock() == fuser) return number;
  }
  all.drop_dead();
  all.entries[all.next].fuser = fuser;
  return all.next++;
}

std::shared_ptr<OperationFuser> find_fuser(int64_t number) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(number);
  auto fuser = found != all.entries.end() ? found->second.fuser.lock() : nullptr;
  LIGATURE_CHECK_STATE(fuser != nullptr,
                       "a compiled graph calls operations that are gone: the model it was made of "
                       "must live as long as the graph, in the process that made it");
  return fuser;
}

int64_t trace_call(int64_t number, TracedCall traced) {
  const std::shared_ptr<OperationFuser> fuser = find_fuser(number);
  auto call = std::make_shared<FlatCall>(fuser, std::move(traced));
  const int64_t id = call->id();
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  // Fusions may have been registered anew since: then the newer plan holds.
  auto& kept = all.entries[number].calls[id];
  if (kept == nullptr || &kept->plan() != &call->plan()) kept = std::move(call);
  return id;
}

std::shared_ptr<FlatCall> find_call(int64_t number, int64_t call) {
  const std::shared_ptr<OperationFuser> fuser = find_fuser(number);
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto entry = all.entries.find(number);
  const auto found = entry->second.calls.find(call);
  LIGATURE_CHECK_STATE(found != entry->second.calls.end(),
                       "a compiled graph calls operations in a way that was never traced in this "
                       "process; compile the model anew");
  return found->second;
}

}  // namespace ligature::compile
