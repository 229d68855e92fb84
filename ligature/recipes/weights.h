// Weights that are kept in low precision: how a recipe makes them.
#pragma once

#include "ligature/operation.h"
#include "ligature/quantized/writes.h"

namespace ligature {

/// The weight in the recipe's format, for forward and backward; null where the recipe leaves it in
/// high precision. With delayed scaling it has a scale of its own.
/// `index`: which of the operation's weights.
QuantizedPtr quantize_weight(BasicOperation& op, const RecipePtr& recipe, const Tensor& weight,
                             size_t index = 0);
/// A weight that was copied or read belongs to this operation: it is quantized anew with the
/// operation's own quantizer, where that has its format.
void adopt_weight(const BasicOperation& op, const Tensor& weight, size_t index = 0);

}  // namespace ligature
