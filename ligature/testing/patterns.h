// Which of the input, the parameters and the extra inputs need a gradient: bit i stands for the
// i-th of them.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <vector>

namespace ligature::testing {

constexpr size_t kMostLeaves = 1024;
using Needs = std::bitset<kMostLeaves>;

inline bool has(const Needs& needs, size_t i) { return needs[i]; }
inline Needs only(size_t i) { return Needs().set(i); }

/// All subsets of `possible` while they are at most `limit`; otherwise all, none, each alone, all
/// but each, and random ones.
std::vector<Needs> patterns(const Needs& possible, size_t limit, uint64_t seed);

/// "input and Bias.bias need gradients"
std::string describe_needs(const Needs& needs, const std::vector<std::string>& names);

}  // namespace ligature::testing
