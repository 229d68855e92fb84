#include "ligature/distributed/group.h"

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "ligature/check.h"

namespace ligature::distributed {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

class Alone final : public Group {
 public:
  Alone() : Group("", 0, 1, std::make_shared<Agreements>()) {}
};

class Several final : public Group {
 public:
  Several(const std::string& name, ProcessGroupPtr group, std::shared_ptr<Agreements> agreements)
      : Group(name, group->getRank(), group->getSize(), std::move(agreements)),
        group_(std::move(group)) {}
  const ProcessGroupPtr& process_group() const { return group_; }

 private:
  ProcessGroupPtr group_;
};

/// A group of torch's that was asked for. As long as it is remembered no other one has its address.
struct Remembered {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<Agreements> agreements;
};

/// Groups that were asked for, and what is wanted of them.
struct Known {
  std::mutex mutex;
  std::vector<Remembered> groups;
  std::map<std::string, GroupOptions> options;
  std::optional<std::string> default_name;
  DefaultGroupName default_lookup = nullptr;
};

Known& known() {
  static auto* all = new Known;  // groups may outlive static objects
  return *all;
}

std::optional<std::string> default_name() {
  Known& all = known();
  DefaultGroupName lookup = nullptr;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.default_name) return all.default_name;
    lookup = all.default_lookup;
  }
  return lookup != nullptr ? lookup() : std::nullopt;
}

GroupPtr alone() {
  static const GroupPtr one = std::make_shared<Alone>();
  return one;
}

}  // namespace

GroupPtr find_group(const std::optional<std::string>& given) {
  const std::optional<std::string> name = given ? given : default_name();
  if (!name || name->empty()) return alone();
  ProcessGroupPtr group;
  try {
    group = c10d::resolve_process_group(*name);
  } catch (const std::exception&) {
    LIGATURE_CHECK(false, "there is no process group named '", *name,
                   "': it was destroyed, or this process is not in it; make the group first "
                   "(torch.distributed.new_group, init_device_mesh)");
  }
  LIGATURE_CHECK(group != nullptr, "this process is not in the process group '", *name, "'");
  Known& all = known();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const Remembered& one : all.groups) {
    if (one.group._unsafe_get_target() == group.get()) {
      return std::make_shared<const Several>(*name, std::move(group), one.agreements);
    }
  }
  std::erase_if(all.groups, [](const Remembered& one) { return one.group.expired(); });
  auto agreements = std::make_shared<Agreements>();
  all.groups.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), agreements});
  return std::make_shared<const Several>(*name, std::move(group), std::move(agreements));
}

std::string register_group(const ProcessGroupPtr& group, const std::string& name) {
  LIGATURE_CHECK(group != nullptr, "a process group is wanted, got none");
  const std::string own = name.empty() ? group->getGroupName() : name;
  LIGATURE_CHECK(!own.empty(), "the process group has no name: give one");
  c10d::register_process_group(own, group);
  return own;
}

void set_default_group_lookup(DefaultGroupName lookup) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().default_lookup = lookup;
}

void set_default_group(std::optional<std::string> name) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().default_name = std::move(name);
}

void configure_group(const std::optional<std::string>& name, GroupOptions options) {
  LIGATURE_CHECK(options.handshake_timeout > 0, "handshake_timeout must be positive, got ",
                 options.handshake_timeout);
  LIGATURE_CHECK(options.pieces >= 0, "pieces must not be negative, got ", options.pieces);
  const std::string own = find_group(name)->name();
  const std::lock_guard<std::mutex> lock(known().mutex);
  known().options[own] = options;
}

GroupOptions Group::options() const {
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto found = known().options.find(name_);
  return found != known().options.end() ? found->second : GroupOptions();
}

const ProcessGroupPtr& process_group(const Group& group) {
  const auto* several = dynamic_cast<const Several*>(&group);
  LIGATURE_CHECK_STATE(several != nullptr, "a process by itself has no process group");
  return several->process_group();
}

std::string backend_name(const Group& group) {
  return group.name().empty() ? "none" : process_group(group)->getBackendName();
}

std::string describe(const Group& group) {
  if (group.name().empty()) return "one process by itself";
  return "group '" + group.name() + "' of " + std::to_string(group.size()) + " ranks (" +
         backend_name(group) + "), rank " + std::to_string(group.rank());
}

}  // namespace ligature::distributed
