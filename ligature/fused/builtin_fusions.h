// The one table of built-in fusions.
#pragma once

#include <vector>

#include "ligature/fuser/registry.h"

namespace ligature {

/// In the order in which a pass tries them.
std::vector<FusionRule> builtin_fusions(Pass pass);

}  // namespace ligature
