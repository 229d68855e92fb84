// Weights that are kept in low precision: how they are made, and how values are written into them.
#pragma once

#include "ligature/operation.h"

namespace ligature {

/// Is its factor chosen by a recipe of delayed scaling, from step to step?
bool has_recipe_state(const QuantizerPtr& quantizer);

/// What quantizes new values into it: what made it, or, for one from a file, what makes the like of
/// it. A factor of delayed scaling is then the one that it was made with.
std::shared_ptr<Quantizer> quantizer_for(const QuantizedPtr& quantized);

/// With a factor and a largest value of its own.
std::shared_ptr<Quantizer> deep_copy(const Quantizer& quantizer);

/// The same format, shape and orientations.
bool same_layout(const QuantizedTensor& a, const QuantizedTensor& b);
/// Writes values into its memory: as they are where they have its layout, otherwise quantized.
/// Counts as a new version of its parts.
void write_quantized(const QuantizedPtr& to, const Value& values);
/// The same, quantized by this one.
void write_quantized(const QuantizedPtr& to, const Tensor& values, const Quantizer& quantizer);

/// The weight in the recipe's format, for forward and backward; null where the recipe leaves it in
/// high precision. A factor of delayed scaling becomes that of its values.
QuantizedPtr quantize_weight(BasicOperation& op, const RecipePtr& recipe, const Tensor& weight);
/// Before a quantized weight is given values of which nothing is known yet: a factor of delayed
/// scaling becomes theirs.
void expect_values(const Tensor& weight, const Value& values);
/// A weight that was copied or read belongs to this operation: it is quantized anew with the
/// operation's own quantizer, where that has its format.
void adopt_weight(const BasicOperation& op, const Tensor& weight);

}  // namespace ligature
