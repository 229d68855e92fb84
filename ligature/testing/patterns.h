// Which of the input, the parameters and the extra inputs need a gradient: bit i stands for the
// i-th of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ligature::testing {

using Needs = uint64_t;

inline bool has(Needs needs, size_t i) { return ((needs >> i) & 1U) != 0; }
inline Needs only(size_t i) { return Needs{1} << i; }

/// All subsets of `possible` while they are at most `limit`; otherwise all, none, each alone, all
/// but each, and random ones.
std::vector<Needs> patterns(Needs possible, size_t limit, uint64_t seed);

/// "input and Bias.bias need gradients"
std::string describe_needs(Needs needs, const std::vector<std::string>& names);

}  // namespace ligature::testing
