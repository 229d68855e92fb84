// Tokens to the rows of their experts and back, as differentiable functions: what te.pytorch's
// moe_permute, moe_unpermute and moe_sort_chunks_by_index compute, on any device, always with the
// same bits. Nothing is read by the host unless it says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace ligature {

using at::Tensor;

/// What a routing map says of each token.
enum class MapType : uint8_t {
  Mask,   ///< [tokens, experts]: not zero where it is sent to an expert
  Index,  ///< [tokens, top_k]: its experts; one below 0 is none
};

struct Permuted {
  Tensor rows;   ///< [rows, columns], by expert and in the order of tokens; zeros past the last one
  Tensor probs;  ///< [rows], where probabilities were given
  /// int32 [tokens, experts or top_k]: where the row of each is, -1 where it is sent nowhere.
  Tensor row_id_map;
};

/// `probs`: of routing_map's shape, or undefined. `num_out_tokens`: how many rows there are; those
/// that find no place are dropped. Below 0, all are there: of a mask, they are counted, for which
/// the host waits.
Permuted moe_permute(const Tensor& inp, const Tensor& probs, const Tensor& routing_map,
                     int64_t num_out_tokens = -1, MapType type = MapType::Mask);

struct PaddedPermuted : Permuted {
  Tensor pad_offsets;        ///< int64 [experts]: by how much each expert's rows are moved
  Tensor tokens_per_expert;  ///< int64 [experts]: multiples of the alignment
};

/// Of a mask. Each expert's rows are filled up with zeros to a multiple of `align_size`. The host
/// reads the sum of `tokens_per_expert`.
PaddedPermuted moe_permute_and_pad(const Tensor& inp, const Tensor& probs,
                                   const Tensor& routing_map, const Tensor& tokens_per_expert,
                                   int64_t align_size);

/// The sum of the rows of each token, [tokens, columns], in the order of experts (or of their
/// index), times `merging_probs` of row_id_map's shape where they are given; in float, rounded
/// once. `pad_offsets`: of the permutation, or undefined.
Tensor moe_unpermute(const Tensor& inp, const Tensor& row_id_map, const Tensor& merging_probs = {},
                     const Tensor& pad_offsets = {});

/// Chunks of rows in another order: those of chunk sorted_index[0] first. `probs`: [rows], moved
/// alike, or undefined.
std::pair<Tensor, Tensor> moe_sort_chunks_by_index(const Tensor& inp, const Tensor& probs,
                                                   const Tensor& split_sizes,
                                                   const Tensor& sorted_index);

/// Rows in consecutive groups of these sizes, in groups of those: filled up with zeros, or cut off.
Tensor resize_groups(const Tensor& inp, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& wanted);

}  // namespace ligature
