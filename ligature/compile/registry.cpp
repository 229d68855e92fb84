// The numbers under which compiled graphs know fusers and their calls. A graph holds a tensor, the
// owner, for as long as it may call them: so they live as long as the model or a graph does.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <unordered_map>
#include <utility>

#include "ligature/base/modes.h"
#include "ligature/compile/flat.h"

namespace ligature::compile {
namespace {

constexpr size_t kMostCalls = 32;  // of one fuser, with their plans

/// A call that was traced. What it takes to make it again stays, as graphs may call it at any time.
struct Known {
  std::shared_ptr<FlatCall> call;  // null: not used for long
  std::shared_ptr<const TracedCall> traced;
  uint64_t used = 0;
};

struct Entry {
  std::weak_ptr<OperationFuser> fuser;
  const OperationFuser* address = nullptr;
  std::unordered_map<int64_t, Known> calls;
  uint64_t uses = 0;

  bool is_of(const OperationFuser& other) const { return address == &other && !fuser.expired(); }

  std::shared_ptr<FlatCall> use(Known& known) {
    known.used = ++uses;
    return known.call;
  }

  /// Gives away the calls that were used longest ago, where there are too many.
  std::shared_ptr<FlatCall> drop_oldest() {
    Known* oldest = nullptr;
    size_t count = 0;
    for (auto& [id, known] : calls) {
      if (known.call == nullptr) continue;
      ++count;
      if (oldest == nullptr || known.used < oldest->used) oldest = &known;
    }
    return count > kMostCalls ? std::move(oldest->call) : nullptr;
  }
};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, Entry> entries;
  int64_t next = 1;

  /// Those that nobody can call any more. They are destroyed by the caller, without the lock.
  std::vector<Entry> take_dead() {
    std::vector<Entry> dead;
    std::erase_if(entries, [&](auto& item) {
      if (!item.second.fuser.expired()) return false;
      dead.push_back(std::move(item.second));
      return true;
    });
    return dead;
  }
};

Registry& registry() {
  static auto* made = new Registry;  // operations may outlive static objects
  return *made;
}

std::shared_ptr<OperationFuser> find_fuser(int64_t number) {
  Registry& all = registry();
  std::shared_ptr<OperationFuser> found;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto entry = all.entries.find(number);
    if (entry != all.entries.end()) found = entry->second.fuser.lock();
  }
  LIGATURE_CHECK_STATE(
      found != nullptr,
      "a graph calls operations that are gone: it must run in the process that made it, and "
      "either it or the model it was made of must have lived since");
  return found;
}

}  // namespace

int64_t register_fuser(const std::shared_ptr<OperationFuser>& fuser) {
  Registry& all = registry();
  std::vector<Entry> dead;
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [number, entry] : all.entries) {
    if (entry.is_of(*fuser)) return number;
  }
  dead = all.take_dead();
  Entry& entry = all.entries[all.next];
  entry.fuser = fuser;
  entry.address = fuser.get();
  return all.next++;
}

bool is_known(int64_t number) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(number);
  return found != all.entries.end() && !found->second.fuser.expired();
}

Tensor owner_of(int64_t number, at::Device device) {
  auto fuser = find_fuser(number);
  const ModesHidden modes;
  const c10::InferenceMode no_inference(false);
  const auto options = at::TensorOptions(at::kByte).device(device);
  // Tracers compare constants, and remember those of a single number for good; with dynamic shapes
  // they take equal sizes for one size, so it is one that inputs do not have.
  constexpr int64_t size = 4099;
  const Tensor memory = at::zeros({size}, options);
  return at::for_blob(device.is_meta() ? nullptr : memory.data_ptr(), {size})
      .deleter([memory, fuser](void*) {})
      .options(options)
      .target_device(device)
      .make_tensor();
}

std::vector<BasicOpPtr> operations_of(int64_t number) { return find_fuser(number)->basic_ops(); }

int64_t trace_call(int64_t number, TracedCall traced) {
  const std::shared_ptr<OperationFuser> fuser = find_fuser(number);
  auto call = std::make_shared<FlatCall>(fuser, std::move(traced));
  const int64_t id = call->id();
  std::shared_ptr<FlatCall> dropped;  // destroyed after the lock: it may call a host language
  std::shared_ptr<FlatCall> oldest;
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  Entry& entry = all.entries.at(number);
  Known& known = entry.calls[id];
  // Fusions may have been registered anew since: then the newer plan holds.
  if (known.call == nullptr || &known.call->plan() != &call->plan()) {
    dropped = std::exchange(known.call, std::move(call));
    known.traced = std::make_shared<const TracedCall>(known.call->traced());
  }
  entry.use(known);
  oldest = entry.drop_oldest();
  return id;
}

std::shared_ptr<FlatCall> find_call(int64_t number, int64_t call) {
  const std::shared_ptr<OperationFuser> fuser = find_fuser(number);
  Registry& all = registry();
  std::shared_ptr<const TracedCall> traced;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    Entry& entry = all.entries.at(number);
    const auto found = entry.calls.find(call);
    LIGATURE_CHECK_STATE(found != entry.calls.end(),
                         "a compiled graph calls operations in a way that was never traced in this "
                         "process; compile the model anew");
    if (auto known = entry.use(found->second)) return known;
    traced = found->second.traced;
  }
  LIGATURE_CHECK_STATE(trace_call(number, *traced) == call,
                       "a compiled graph calls operations with fusions that are gone; compile the "
                       "model anew");
  return find_call(number, call);
}

std::vector<std::shared_ptr<const Plan>> traced_plans(const OperationFuser& fuser) {
  Registry& all = registry();
  std::vector<std::shared_ptr<const Plan>> out;
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [number, entry] : all.entries) {
    if (!entry.is_of(fuser)) continue;
    for (const auto& [id, known] : entry.calls) {
      if (known.call != nullptr) out.push_back(known.call->plan_ptr());
    }
  }
  return out;
}

}  // namespace ligature::compile
