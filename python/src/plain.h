// Python values as plain values and back.
#pragma once

#include <optional>

#include "held.h"
#include "ligature/plain_state.h"
#include "ligature/value.h"

namespace ligature::python {

/// Nothing when the value is not plain.
std::optional<PlainValue> to_plain(const py::handle& value);
py::object from_plain(const PlainValue& value);
PlainState state_from_dict(const py::dict& values, const char* what);
py::dict dict_from_state(const PlainState& state);

py::object wrap(const Tensor& tensor);  // None when undefined
py::object wrap(const Value& value);    // a QuantizedTensor when it is quantized
/// Undefined for None; TypeError for anything but a tensor.
Tensor unwrap(const py::handle& object, const std::string& what);
std::vector<Tensor> unwrap_list(const py::handle& objects, const std::string& what);

}  // namespace ligature::python
