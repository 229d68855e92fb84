// The only scanner: finds a rule's pattern in a list of operations and replaces what it matched.
#pragma once

#include <string>
#include <vector>

#include "ligature/fuser/rule.h"

namespace ligature {

/// A fusion that was looked at, at one place, and what came of it.
struct Consideration {
  std::string fusion;
  size_t position = 0;  ///< index of the first basic operation
  std::string reason;   ///< why it was not taken; empty when it was
  size_t count = 1;     ///< basic operations from there on that it covers, when it was taken
};

/// Scans from the left; matches do not overlap. Appends to `considered` unless it is null.
/// `only_in_te_ops`: leaves what te.ops does not fuse for later, without a word.
OpList apply_rule(const FusionRule& rule, const OpList& ops, const PlanOptions& options,
                  std::vector<Consideration>* considered, bool only_in_te_ops = false);

}  // namespace ligature
