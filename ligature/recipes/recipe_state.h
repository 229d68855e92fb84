// What delayed scaling remembers for an operation, as plain tensors: for copies and checkpoints.
#pragma once

#include "ligature/operation.h"

namespace ligature {

/// Of one quantizer; undefined where it has no state.
struct DelayedTensors {
  Tensor scale;    ///< float [1]
  Tensor amax;     ///< float [1]
  Tensor history;  ///< float [amax_history_len], the newest first
};

struct RecipeState {
  RecipePtr recipe;
  std::vector<DelayedTensors> forward;
  std::vector<DelayedTensors> backward;

  at::Device device() const;
};

/// Of delayed scaling, with the recipe used last; empty before it was used. Copies.
std::vector<RecipeState> recipe_states(const BasicOperation& op);
/// Refuses state that does not fit before it changes any.
void load_recipe_state(BasicOperation& op, const RecipeState& state, at::Device device);

}  // namespace ligature
