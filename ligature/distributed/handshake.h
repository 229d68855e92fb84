// Ranks that are about to compute together compare what they are about to compute, before any
// kernel runs: a difference is an error in the same words on every rank, where a collective would
// end the process, give garbage or wait for its timeout.
#pragma once

#include <string>
#include <vector>

#include "ligature/distributed/group.h"

namespace ligature::distributed {

/// What one rank is about to compute, line by line: "operation 1, BasicLinear: out_features=64".
using PlanText = std::vector<std::string>;

/// Before the first run of a plan. Ranks compare through the store of the group, so that nobody is
/// in the way of a collective; texts that were agreed on before are not compared again.
void agree(const GroupPtr& group, const PlanText& text);

/// Now, with a collective of a few bytes (GroupOptions::check, Always).
void agree_always(const GroupPtr& group, const PlanText& text);

}  // namespace ligature::distributed
