// Checks of arguments that operations share.
#pragma once

#include "ligature/operation.h"
#include "ligature/prepare.h"

namespace ligature {

/// Which dtypes operations take.
bool is_input_dtype(at::ScalarType dtype);
void check_floating(const BasicOperation& op, const ValueMeta& input);
/// A parameter lives where the input does, and is of a dtype that operations take.
void check_parameter(const BasicOperation& op, const ValueMeta& input, const char* what,
                     const Tensor& parameter);

}  // namespace ligature
