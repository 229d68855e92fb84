// A fusion as data: a pattern of operations, a condition, and what to make of a match.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ligature/operation.h"
#include "ligature/recipes/recipe.h"

namespace ligature {

/// Recomputation in backward that the user allows a joint fusion to do.
enum class Recompute {
  None,   ///< save whatever backward needs
  Cheap,  ///< save what a GEMM made, recompute norms and activations
};

/// What a fusion may look at besides the operations.
struct PlanOptions {
  RecipePtr recipe;          ///< null in high precision
  bool calibrating = false;  ///< the recipe only looks on
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  Recompute recompute = Recompute::None;
  bool requires_grad = false;  ///< some operation runs in backward
  /// Also fusions that pay on other devices alone: those must be right on every device.
  bool of_every_device = false;
  /// Call::planner, while a plan is made for that call; else null.
  const Bound* planner = nullptr;

  bool quantizes_gradients() const {
    return recipe != nullptr && recipe->backward_override() == BackwardOverride::None;
  }
};

/// One place of a pattern. `take` tells how many of the operations, from the first one on, it
/// covers; 0 means that it does not match.
struct PatternElement {
  std::string what;
  std::function<size_t(at::ArrayRef<OpPtr>)> take;
  bool optional = false;
};

using Pattern = std::vector<PatternElement>;

/// The operations that matched, and for each element of the pattern which of them it covers.
struct Match {
  OpList ops;
  std::vector<at::ArrayRef<OpPtr>> elements;
  const Bound* planner = nullptr;  ///< as in PlanOptions
};

struct FusionRule {
  std::string name;
  Pattern pattern;
  /// Why a match is not fused; empty when it is.
  std::function<std::string(const Match&, const PlanOptions&)> why_not;
  std::function<OpPtr(const Match&)> make;
  /// Of a built-in rule: does te.ops fuse these operations too? There it is tried before the
  /// fusions that users register, elsewhere after them. Null: nowhere.
  std::function<bool(const Match&, const PlanOptions&)> in_te_ops{};
  bool needs_ranks = false;  ///< it matches operations alone that are spread over several ranks
};

/// A place of a pattern: an operation of this class.
template <class Op>
PatternElement of(std::string what) {
  return {std::move(what),
          [](at::ArrayRef<OpPtr> ops) -> size_t {
            return dynamic_cast<const Op*>(ops.front().get()) != nullptr ? 1 : 0;
          },
          false};
}

inline PatternElement optional(PatternElement element) {
  element.optional = true;
  return element;
}

}  // namespace ligature
