// Processes that compute together. A group is known by the name it has in torch's registry, so that
// options, copies, archives and compiled graphs hold nothing but a string.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace c10d {
class ProcessGroup;
}

namespace ligature::distributed {

/// How sums over a group are made.
enum class Reduction {
  Native,   ///< as the backend does it
  Ordered,  ///< in the order of the ranks, in float32, rounded once: the same bits on any backend
};

/// When ranks compare what they are about to compute.
enum class Check {
  Once,    ///< before the first run of each plan
  Always,  ///< before every run, the sizes of inputs too: for debugging, at the cost of a
           ///< collective
};

/// What one wants of a group.
struct GroupOptions {
  Reduction reduction = Reduction::Native;
  Check check = Check::Once;
  /// Are partial gradients of parameters summed up in backward?
  bool reduce_partial_grads = false;
  /// Does anything run while a collective is under way?
  bool overlap = true;
  /// Into how many pieces a GEMM beside a collective is cut; 0: as many as the model says.
  int64_t pieces = 0;
  /// How long ranks wait for each other's plan, in seconds.
  double handshake_timeout = 60.0;
};

/// What the ranks of a group have compared so far. It lasts as long as torch's group does.
struct Agreements {
  std::mutex mutex;
  int64_t count = 0;  ///< comparisons begun: the same number on every rank
  std::set<std::string> texts;
};

/// A group as it is now. The name "" is that of a process by itself.
class Group {
 public:
  virtual ~Group() = default;

  const std::string& name() const { return name_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  bool alone() const { return size_ == 1; }
  GroupOptions options() const;
  Agreements& agreements() const { return *agreements_; }

 protected:
  Group(std::string name, int64_t rank, int64_t size, std::shared_ptr<Agreements> agreements)
      : agreements_(std::move(agreements)), name_(std::move(name)), rank_(rank), size_(size) {}

 private:
  std::shared_ptr<Agreements> agreements_;
  std::string name_;
  int64_t rank_;
  int64_t size_;
};
using GroupPtr = std::shared_ptr<const Group>;

/// The group of this name. None: torch's default group, or this process alone where there is none.
/// Throws for a name that torch does not know.
GroupPtr find_group(const std::optional<std::string>& name);

/// Makes a group of C++ known under its name, or under `name` where it has none, and returns that.
std::string register_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           const std::string& name = "");

/// Which group is the default one: asked on each call; none where there is none. A binding has its
/// own answer.
using DefaultGroupName = std::optional<std::string> (*)();
void set_default_group_lookup(DefaultGroupName lookup);
/// In C++: this one is it.
void set_default_group(std::optional<std::string> name);

/// For all that is computed over the group of this name from now on. Every rank must say the same.
void configure_group(const std::optional<std::string>& name, GroupOptions options);

/// What torch knows of a group.
const c10::intrusive_ptr<c10d::ProcessGroup>& process_group(const Group& group);

/// "group '1' of 4 ranks (gloo), rank 2"
std::string describe(const Group& group);
/// The name of the backend that serves a device there: "gloo", "nccl".
std::string backend_name(const Group& group);

}  // namespace ligature::distributed
