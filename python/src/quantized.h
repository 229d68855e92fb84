// Quantizers as Python objects and back.
#pragma once

#include <memory>

#include "ligature/base/json_value.h"
#include "ligature/quantized/quantizer.h"
#include "plain.h"

namespace ligature::python {

/// An object of ligature.quantization that stands for it; None for null.
py::object python_of(const QuantizerPtr& quantizer);

/// The quantizer behind such an object; null for anything else.
std::shared_ptr<Quantizer> quantizer_behind(const py::handle& object);

/// Numbers, texts and named values as data.
JsonValue json_of(const py::handle& object);

}  // namespace ligature::python
