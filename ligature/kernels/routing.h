// Rows of tokens, in the order of the experts that they are sent to, and back. Token t is sent to
// top_k experts, each a slot [t, k]; a slot whose expert there is not is sent nowhere. Rows lie in
// the experts' order, and those of one expert in the order of their slots.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::kernels {

using at::Tensor;

struct Routing {
  Tensor splits;  ///< int64 [experts]: how many rows each expert has
  /// int32 [2, tokens, top_k]. The first half, as a vector: the slot of each row, t * top_k + k,
  /// and -1 past the last row. The second: the row of each slot, -1 where it is sent nowhere.
  /// Kernels take it with any number of dimensions for the tokens.
  Tensor map;
};

/// `experts_of`: [tokens, top_k], any integer dtype. Numbers below 0 or not below `experts` are of
/// no expert.
Routing route(const Tensor& experts_of, int64_t experts);

/// The token of each row: int32 [rows], -1 past the last.
Tensor tokens_of(const Tensor& map);

/// y[r] = x[token of r]: [rows, columns] of x [tokens, columns]; zeros past the last row.
Tensor dispatch_rows(const Tensor& x, const Tensor& map);
/// y[t] = sum over k of x[row of slot t, k], times weights[t, k] where there are some, in the order
/// of k, in float, rounded once. Slots that are sent nowhere count as zeros.
Tensor combine_rows(const Tensor& x, const Tensor& map, const Tensor& weights = {});

/// rows[r] = slots[slot of r], of [tokens, top_k]; zeros past the last row.
Tensor dispatch_slots(const Tensor& slots, const Tensor& map);
/// slots[t, k] = rows[row of t, k]; zeros for those that are sent nowhere.
Tensor combine_slots(const Tensor& rows, const Tensor& map);

/// Of combine_rows with weights: dweights[t, k] = dy[t] . x[row of slot t, k], in float.
Tensor combine_weights_grad(const Tensor& dy, const Tensor& x, const Tensor& map);

}  // namespace ligature::kernels
