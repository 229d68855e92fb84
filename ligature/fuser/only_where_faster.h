// An autocast may be told to quantize only where that is faster. This decides, call by call, and
// says why not.
#pragma once

#include <string>
#include <vector>

#include "ligature/fuser/execute.h"

namespace ligature {

/// Why a call inside `autocast(only_where_faster=True)` computes in high precision; empty where it
/// follows the recipe. `device`: what an input without memory stands for.
std::string why_high_precision(const Call& call, const std::vector<BasicOpPtr>& ops,
                               at::Device device);

}  // namespace ligature
