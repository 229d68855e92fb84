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
  /// Takes the fusion out again; every plan made with it is made anew. Doing so twice is harmless.
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

/// A snapshot of a pass's fusions in order, and the number of changes so far.
FusionList registered_fusions(Pass pass);
uint64_t registry_version();

}  // namespace ligature
