// What the binding tells of a fuser's part in a group.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "ligature/fuser/fuser.h"

namespace ligature::python {

/// (index of the operation, name of the group or None), as find_partial_gradients tells them.
pybind11::list partial_gradients(const OperationFuser& fuser);

}  // namespace ligature::python
