// Fusions written in Python as those of the registry.
#pragma once

#include <string>

#include "host.h"
#include "ligature/fuser/registry.h"

namespace ligature::python {

FusionFunction make_function(std::string name, py::object function);
FusionRule make_rule(std::string name, const py::list& pattern, py::object predicate,
                     py::object factory, py::object count, py::object join);
Pass pass_from_string(const std::string& name);

}  // namespace ligature::python
