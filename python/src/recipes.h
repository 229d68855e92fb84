// Recipes as Python objects.
#pragma once

#include "ligature/op_quantization.h"
#include "plain.h"

namespace ligature::python {

/// The user's own object where it still is what the recipe was made from, else an equal one. None
/// for null and for a recipe made in C++.
py::object python_of(const RecipePtr& recipe);

/// A role as an object of ligature.quantization, and back.
py::object python_of(const QuantizerRole& role);
QuantizerRole role_from(const py::handle& role);

/// The quantizer that a Python object stands for: the one behind it, kept together with the object,
/// or one that only hands the object out. Null for None.
std::shared_ptr<Quantizer> quantizer_from(const py::object& object);

/// What `state` has for one mode, "forward" or "backward".
const std::vector<std::shared_ptr<Quantizer>>& quantizers_of(const OpQuantization& state,
                                                             const std::string& mode);

}  // namespace ligature::python
