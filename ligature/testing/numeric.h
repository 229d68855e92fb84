// Gradients by central differences in float64: what a backward should have given, known from the
// forward alone.
#pragma once

#include <string>
#include <vector>

#include "ligature/testing/run.h"

namespace ligature::testing {

/// How the gradients that `forward` gives differ from those that its outputs tell. Of large tensors
/// some elements are tried.
std::vector<std::string> numeric_differences(const Forward& forward, const Data& data,
                                             const std::vector<std::string>& names,
                                             const Needs& leaves, double tolerance);

}  // namespace ligature::testing
