// Recipes, autocast and the recipe state of operations in Python.
#include "bindings.h"
#include "host.h"

namespace ligature::python {

void bind_recipes(py::module_&) {}

}  // namespace ligature::python
