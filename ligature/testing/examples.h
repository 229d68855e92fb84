// Chains of operations that a fusion takes, found out by trying: a fusion that is registered is
// tested, without a list kept by hand.
#pragma once

#include <string>
#include <vector>

#include "ligature/fuser/rule.h"
#include "ligature/testing/subject.h"

namespace ligature::testing {

struct Example {
  std::string text;  ///< "[BasicLinear, Bias, GELU]"
  MakeSubject make;
  std::vector<ExampleShapes> shapes;
};

/// Chains of registered operations that the rule fuses into one. Every operation that a place of
/// its pattern accepts, with each of the options and channels that are tried, occurs in one of them
/// as far as the rule's condition lets it; optional places are there and left out.
std::vector<Example> find_examples(const FusionRule& rule, Recompute recompute = Recompute::Cheap);

/// Registered operations that find_examples cannot make: it does not know which of their options
/// depend on the size of the input.
std::vector<std::string> unknown_operations();

}  // namespace ligature::testing
