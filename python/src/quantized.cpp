// Quantizers and quantized tensors in Python.
#include "bindings.h"
#include "host.h"

namespace ligature::python {

void bind_quantized(py::module_&) {}

}  // namespace ligature::python
