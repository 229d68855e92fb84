// Which fusions there are, in which order each pass tries them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "ligature/fuser/rule.h"

namespace ligature {

enum class Pass { Joint, Forward, Backward };

const char* pass_name(Pass pass);

/// A fusion written as a function over the whole list of operations.
struct FusionFunction {
  std::string name;
  std::function<OpList(const OpList&, const PlanOptions&)> apply;
};

using Fusion = std::variant<FusionRule, FusionFunction>;

const std::string& fusion_name(const Fusion& fusion);

/// Stands for one registration.
class FusionHandle {
 public:
  FusionHandle() = default;
  FusionHandle(Pass pass, uint64_t id) : pass_(pass), id_(id) {}
  /// Takes the fusion out again. Every plan made with it is made anew, and what it made is released
  /// where no graph needs it. Doing so twice is harmless.
  void unregister();
  bool registered() const;

 private:
  Pass pass_ = Pass::Joint;
  uint64_t id_ = 0;
};

/// Takes a fusion out again at the end of a scope.
class ScopedFusion {
 public:
  explicit ScopedFusion(FusionHandle handle) : handle_(handle) {}
  ~ScopedFusion() { handle_.unregister(); }
  ScopedFusion(const ScopedFusion&) = delete;
  ScopedFusion& operator=(const ScopedFusion&) = delete;
  FusionHandle& operator*() { return handle_; }

 private:
  FusionHandle handle_;
};

/// Joint: one operation serves both directions; only the pair must equal the basic operations.
/// Forward, backward: interchangeable with the basic operations, contexts included.
///
/// It is tried after the built-in fusions that te.ops has too and before all others, so that it
/// sees the operations as te.ops would show them; with `prepend` before every other one.
FusionHandle register_fusion(Pass pass, Fusion fusion, bool prepend = false);

inline FusionHandle register_forward_fusion(Fusion fusion, bool prepend = false) {
  return register_fusion(Pass::Forward, std::move(fusion), prepend);
}
inline FusionHandle register_backward_fusion(Fusion fusion, bool prepend = false) {
  return register_fusion(Pass::Backward, std::move(fusion), prepend);
}
inline FusionHandle register_forward_backward_fusion(Fusion fusion, bool prepend = false) {
  return register_fusion(Pass::Joint, std::move(fusion), prepend);
}

using FusionList = std::vector<std::shared_ptr<const Fusion>>;

/// The built-in fusions of a pass, in the order in which it tries them.
using BuiltinFusions = std::vector<FusionRule> (*)(Pass pass);
/// Gives them, before the first look at the registry. Returns true.
bool set_builtin_fusions(BuiltinFusions table);
/// Made anew.
std::vector<FusionRule> builtin_fusions(Pass pass);

/// Called whenever a fusion was taken out, in the order in which they were given.
void at_unregister(std::function<void()> function);

/// A snapshot of a pass's fusions in the order in which they are first tried, and the number of
/// changes so far.
FusionList registered_fusions(Pass pass);
uint64_t registry_version();

/// One turn of a fusion in a pass.
struct FusionTurn {
  std::shared_ptr<const Fusion> fusion;
  bool only_in_te_ops = false;  ///< only where te.ops has it; the rest has a turn later
};
std::vector<FusionTurn> fusion_turns(Pass pass);

}  // namespace ligature
