// Python values as plain values and back.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "ligature/plain_state.h"
#include "ligature/value.h"

namespace ligature::python {

namespace py = pybind11;

/// Nothing when the value is not plain.
std::optional<PlainValue> to_plain(const py::handle& value);
py::object from_plain(const PlainValue& value);
PlainState state_from_dict(const py::dict& values, const char* what);
py::dict dict_from_state(const PlainState& state);

/// A Python object that C++ may hold and drop in any thread.
std::shared_ptr<void> hold(py::object object);
inline py::handle held(const std::shared_ptr<void>& holder) {
  return py::handle(static_cast<PyObject*>(holder.get()));
}

py::object wrap(const Tensor& tensor);  // None when undefined
py::object wrap(const Value& value);    // a QuantizedTensor when it is quantized
/// Undefined for None; TypeError for anything but a tensor.
Tensor unwrap(const py::handle& object, const std::string& what);
std::vector<Tensor> unwrap_list(const py::handle& objects, const std::string& what);

}  // namespace ligature::python
