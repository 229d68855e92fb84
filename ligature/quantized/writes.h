// How values are written into a quantized tensor.
#pragma once

#include "ligature/quantized/quantizer.h"
#include "ligature/value.h"

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
/// Writes values into its memory: as they are where they have its layout, otherwise quantized, with
/// a scale that holds them. Counts as a new version of its parts.
void write_quantized(const QuantizedPtr& to, const Value& values);
/// The same, by this quantizer, as its `update`.
void write_quantized(const QuantizedPtr& to, const Tensor& values, const Quantizer& quantizer);
/// These values in its format and orientations, as if they had been written into it.
QuantizedPtr quantized_like(const QuantizedPtr& like, const Tensor& values);

/// The same format, dtype, orientations and quantizer with these values, where these are: for a
/// weight that has no memory yet.
QuantizedPtr with_values(const QuantizedTensor& like, const Value& values);

}  // namespace ligature
