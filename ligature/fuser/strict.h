// Fusions that must fire: where one does not, planning fails and says why.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ligature/fuser/plan.h"

namespace ligature {

/// Among the names of fusions: forward and backward may not wait for a device.
inline constexpr const char* kNoSync = "no host sync";
bool forbids_sync(const std::vector<std::string>& fusions);

/// Throws unless the plan took every fusion named, by the fusion's name or by that of the operation
/// it makes. A fusion of the backward pass is not asked for where no backward runs.
void check_strict(const Plan& plan, const std::vector<std::string>& fusions);

/// Why the plan did not take the fusion; empty when it did.
std::string why_not_fused(const Plan& plan, const std::string& fusion);

/// Demands fusions of the fusers that this thread calls while it lives.
class StrictScope {
 public:
  enum class Where {
    Every,  ///< in each of them, when it is called
    Any,    ///< in one of them, by the time of finish()
  };
  explicit StrictScope(std::vector<std::string> fusions, Where where = Where::Every);
  ~StrictScope();
  StrictScope(const StrictScope&) = delete;
  StrictScope& operator=(const StrictScope&) = delete;

  /// For Any: throws unless each fusion fired somewhere.
  void finish() const;

  static bool active();
  /// Does one that lives forbid that the host waits?
  static bool forbids_sync();
  /// A fuser of this thread is about to run a plan.
  static void check(const Plan& plan);

 private:
  struct Demand;
  struct Demands;
  /// Those of this thread, the innermost last. They may be dropped in any order and by any thread.
  static std::vector<std::shared_ptr<Demand>>& demands();

  std::shared_ptr<Demand> demand_;
};

}  // namespace ligature
