// Quantized parameters and recipe state as entries of a checkpoint: names and plain tensors,
// versioned.
//
// For a quantized parameter `weight`, instead of `weight` itself:
//   weight.format                        version, format, shape and dtype, as JSON in uint8
//   weight.rowwise_data, _scale, _amax   and the same with columnwise
// and for the state of delayed scaling, below `_recipe_state.`:
//   version                              int64, 1
//   recipe                               the fields of the DelayedScaling, as JSON in uint8
//   forward.scale, forward.amax          float32 [n], one per quantizer; likewise backward
//   forward.amax_history                 float32 [amax_history_len, n], newest first
//
// What is read is checked completely; errors name the entry.
#pragma once

#include "ligature/base/json_value.h"
#include "ligature/recipes/recipe_state.h"

namespace ligature {

using CheckpointEntries = std::vector<std::pair<std::string, Tensor>>;
/// The entry of this name; undefined where there is none.
using CheckpointLookup = std::function<Tensor(const std::string& key)>;

/// Refuses an entry whose values cannot be read: a sparse tensor, one without memory.
void check_readable(const Tensor& entry, const std::string& key);

/// Names without the parameter's own: "format", "rowwise_data".
CheckpointEntries quantized_entries(const QuantizedTensor& quantized);
/// The parameter `key`, of these sizes; null where the checkpoint has it plain or not at all.
QuantizedPtr read_quantized(const CheckpointLookup& find, const std::string& key,
                            at::IntArrayRef sizes);

/// A parameter from a checkpoint that has it in another layout (FusibleOperation::other_place).
struct OtherLayout {
  std::vector<Tensor> parts;  ///< in high precision
  bool stacked = false;
  std::vector<std::string> keys;  ///< what was read
  Tensor value() const;
};
/// None where the checkpoint does not have it so either. `sizes`: of the parameter.
std::optional<OtherLayout> read_other_layout(const CheckpointLookup& find,
                                             const std::string& prefix, const FusibleOperation& op,
                                             const std::string& parameter, at::IntArrayRef sizes);

/// Of the delayed scaling used last whose like another process can have; none where it is as it
/// begins. Names with `_recipe_state.`.
CheckpointEntries recipe_state_entries(const BasicOperation& op);
/// `prefix` ends before `_recipe_state.`.
std::optional<RecipeState> read_recipe_state(const CheckpointLookup& find,
                                             const std::string& prefix, const BasicOperation& op);
/// One mode of it, "forward" or "backward", for `count` quantizers; `prefix` ends before the mode.
std::vector<DelayedTensors> read_delayed(const CheckpointLookup& find, const std::string& prefix,
                                         const std::string& mode, int64_t count,
                                         const JsonValue& history_length);

}  // namespace ligature
