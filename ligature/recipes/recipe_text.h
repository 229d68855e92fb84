// Recipes of delayed scaling as data, for checkpoints: state is kept with the recipe it is of.
#pragma once

#include "ligature/base/json_value.h"
#include "ligature/recipes/recipe.h"

namespace ligature {

/// What a checkpoint says of a recipe; nothing when it is no delayed scaling, or has functions that
/// no key tells apart.
std::optional<JsonValue> description_of(const Recipe& recipe);
/// The recipe that a checkpoint speaks of. Its functions are known by their keys only: they must
/// not be called before an equal recipe has brought them.
std::shared_ptr<DelayedScaling> delayed_from_description(const JsonValue& about);

}  // namespace ligature
