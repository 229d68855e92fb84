#include "ligature/distributed/handshake.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ligature/check.h"
#include "ligature/distributed/collectives.h"

namespace ligature::distributed {
namespace {

std::string joined(const PlanText& text) {
  std::string out;
  for (const std::string& line : text) out += line + "\n";
  return out;
}

PlanText lines_of(const std::string& text) {
  PlanText lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// How the first rank that differs from rank 0 does; empty where none does.
std::string difference(const std::vector<std::string>& texts) {
  const PlanText wanted = lines_of(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const PlanText got = lines_of(texts[rank]);
    for (size_t i = 0; i < std::max(wanted.size(), got.size()); ++i) {
      const std::string mine = i < got.size() ? got[i] : "nothing more";
      const std::string first = i < wanted.size() ? wanted[i] : "nothing more";
      if (mine == first) continue;
      return "rank 0 has " + first + "; rank " + std::to_string(rank) + " has " + mine;
    }
  }
  return "";
}

[[noreturn]] void disagree(const Group& group, const std::string& how) {
  LIGATURE_CHECK_STATE(false, "the ranks of group '", group.name(),
                       "' do not agree on what they are about to compute: ", how,
                       ". Nothing was computed; every rank must make the same calls in the same "
                       "order");
}

template <class Processes>
c10::intrusive_ptr<c10d::Store> store_of(const Processes& group) {
  if constexpr (requires { group.getStore(); }) {
    return group.getStore();
  } else {
    return nullptr;
  }
}

/// Of one process that stands for all ranks there is nobody to ask.
bool is_real(const Group& group) {
  const auto& handle = process_group(group);
  for (const c10::Device& device : handle->getDeviceTypes()) {
    if (handle->getBackend(device.type())->getBackendName() == "fake") return false;
  }
  return true;
}

std::string get(c10d::Store& store, const std::string& key, double timeout) {
  store.wait({key}, std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000)));
  const std::vector<uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

void set(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

/// Rank 0 compares and tells the others.
std::string verdict(const Group& group, c10d::Store& store, int64_t number,
                    const std::string& text) {
  const double timeout = group.options().handshake_timeout;
  const std::string prefix = "ligature/plan/" + std::to_string(number) + "/";
  const std::string told = prefix + "verdict";
  if (group.rank() != 0) {
    set(store, prefix + std::to_string(group.rank()), text);
    try {
      const std::string answer = get(store, told, timeout + 5.0);
      return answer == "same" ? "" : answer;
    } catch (const std::exception&) {
      return "rank 0 said nothing within " + std::to_string(static_cast<int64_t>(timeout)) +
             " s; rank " + std::to_string(group.rank()) + " has " + lines_of(text)[0];
    }
  }
  std::vector<std::string> texts{text};
  std::string how;
  for (int64_t rank = 1; rank < group.size() && how.empty(); ++rank) {
    try {
      texts.push_back(get(store, prefix + std::to_string(rank), timeout));
    } catch (const std::exception&) {
      how = "rank " + std::to_string(rank) + " said nothing within " +
            std::to_string(static_cast<int64_t>(timeout)) + " s; rank 0 has " + lines_of(text)[0];
    }
  }
  if (how.empty()) how = difference(texts);
  set(store, told, how.empty() ? "same" : how);
  return how;
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return hash;
}

at::Device device_of(const Group& group) {
  const auto devices = process_group(group)->getDeviceTypes();
  for (const c10::Device& device : devices) {
    if (device.is_cpu()) return device;
  }
  return devices.empty() ? at::Device(at::kCPU) : devices.front();
}

std::string compare_with_collective(const GroupPtr& group, const std::string& text) {
  const Purpose purpose{"handshake", "text"};
  const at::Device device = device_of(*group);
  const auto gather = [&](const Tensor& mine) {
    return all_gather(group, {mine.to(device)}, purpose).wait_one().cpu();
  };
  Tensor mine = at::empty({1, 2}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(hash_of(text));
  mine.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(text.size());
  const Tensor all = gather(mine);
  const int64_t* seen = all.const_data_ptr<int64_t>();
  int64_t longest = 0;
  bool same = true;
  for (int64_t rank = 0; rank < group->size(); ++rank) {
    same = same && seen[2 * rank] == seen[0];
    longest = std::max(longest, seen[2 * rank + 1]);
  }
  if (same) return "";
  const Tensor padded = at::zeros({1, longest}, at::kByte);
  std::memcpy(padded.mutable_data_ptr(), text.data(), text.size());
  const Tensor texts = gather(padded);
  std::vector<std::string> of_ranks;
  for (int64_t rank = 0; rank < group->size(); ++rank) {
    const auto* bytes = static_cast<const char*>(texts.const_data_ptr()) + rank * longest;
    of_ranks.emplace_back(bytes, static_cast<size_t>(seen[2 * rank + 1]));
  }
  return difference(of_ranks);
}

}  // namespace

void agree(const GroupPtr& group, const PlanText& text) {
  if (group->alone() || !is_real(*group)) return;
  const std::string own = joined(text);
  Agreements& known = group->agreements();
  int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    if (known.texts.contains(own)) return;
    number = known.count++;
  }
  const auto store = store_of(*process_group(*group));
  const std::string how =
      store != nullptr ? verdict(*group, *store, number, own) : compare_with_collective(group, own);
  if (!how.empty()) disagree(*group, how);
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (known.texts.size() == 1024) known.texts.clear();
  known.texts.insert(own);
}

void agree_always(const GroupPtr& group, const PlanText& text) {
  if (group->alone() || !is_real(*group)) return;
  const std::string how = compare_with_collective(group, joined(text));
  if (!how.empty()) disagree(*group, how);
}

}  // namespace ligature::distributed
