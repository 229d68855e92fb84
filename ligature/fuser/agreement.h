// What a plan has to do with other ranks: which groups it communicates over, whether they are about
// to run the same, and which gradients are only parts of sums.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "ligature/operation.h"

namespace ligature {

struct Plan;
struct Call;

/// Have the ranks compared this plan? A copy of a plan asks again.
struct Agreed {
  Agreed() = default;
  Agreed(const Agreed&) {}
  Agreed& operator=(const Agreed&) { return *this; }
  std::atomic<bool> yes{false};
};

/// An operation whose parameters' gradients are sums over this rank's tokens alone: the others'
/// have to be added.
struct PartialGradients {
  size_t op = 0;
  std::optional<std::string> group;
};

/// The operations with parameters that see one rank's tokens: before those are gathered, and after
/// they were scattered.
std::vector<PartialGradients> find_partial_gradients(const std::vector<BasicOpPtr>& ops);
/// Every group that an operation communicates over, once.
std::vector<std::optional<std::string>> find_groups(const std::vector<BasicOpPtr>& ops);

/// Before a run: throws, on every rank in the same words, where the ranks are about to run
/// different things.
void agree_on(const Plan& plan, const Call& call, ArgsList args);

/// Adds up over the ranks the gradients that are parts of sums, where the group wants that.
/// `results`: the gradient of the input, then those of the parameters, which begin at
/// `param_offsets`.
void reduce_partial_gradients(const Plan& plan, const std::vector<size_t>& param_offsets,
                              std::vector<Tensor>& results);

}  // namespace ligature
