// Tensors without memory that only Python knows: FakeTensors, which have a meaning, and subclasses
// that hold others.
#pragma once

#include <ATen/core/Tensor.h>

#include "bindings.h"

namespace ligature::python {

/// Is it a FakeTensor? They need not be in their mode.
bool is_fake(const at::Tensor& tensor);

}  // namespace ligature::python
