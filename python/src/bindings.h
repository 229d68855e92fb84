// One function per file of the binding.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ligature::python {

namespace py = pybind11;

void bind_config(py::module_& m);
void bind_quantized(py::module_& m);
void bind_recipes(py::module_& m);
void bind_context(py::module_& m);
void bind_operations(py::module_& m);
void bind_recipe_state(py::module_& m);
void bind_graph(py::module_& m);
void bind_guests(py::module_& m);
void bind_registry(py::module_& m);
void bind_fuser(py::module_& m);
void bind_odd_tensors(py::module_& m);
void bind_compile(py::module_& m);
void bind_explain(py::module_& m);
void bind_testing(py::module_& m);
void bind_storage(py::module_& m);
void bind_routing(py::module_& m);
void bind_distributed(py::module_& m);

}  // namespace ligature::python
