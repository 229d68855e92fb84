#include "plain.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/tensor_dtypes.h>

namespace ligature::python {

std::optional<PlainValue> to_plain(const py::handle& value) {
  if (value.is_none()) return PlainValue{};
  if (PyBool_Check(value.ptr())) return PlainValue{value.ptr() == Py_True};
  static auto* enum_class = new py::object(py::module_::import("enum").attr("Enum"));
  if (py::isinstance(value, *enum_class)) return PlainValue{py::str(value).cast<std::string>()};
  if (PyLong_Check(value.ptr())) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0) return std::nullopt;
    return PlainValue{number};
  }
  if (PyFloat_Check(value.ptr())) return PlainValue{value.cast<double>()};
  if (PyUnicode_Check(value.ptr())) return PlainValue{value.cast<std::string>()};
  if (THPDtype_Check(value.ptr())) {
    return PlainValue{reinterpret_cast<THPDtype*>(value.ptr())->scalar_type};
  }
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    std::vector<int64_t> numbers;
    for (const auto& item : py::reinterpret_borrow<py::sequence>(value)) {
      const auto number = to_plain(item);
      if (!number || !std::holds_alternative<int64_t>(*number)) return std::nullopt;
      numbers.push_back(std::get<int64_t>(*number));
    }
    return PlainValue{std::move(numbers)};
  }
  return std::nullopt;
}

py::object from_plain(const PlainValue& value) {
  struct Converter {
    py::object operator()(std::monostate) { return py::none(); }
    py::object operator()(bool v) { return py::bool_(v); }
    py::object operator()(int64_t v) { return py::int_(v); }
    py::object operator()(double v) { return py::float_(v); }
    py::object operator()(const std::string& v) { return py::str(v); }
    py::object operator()(const std::vector<int64_t>& v) { return py::tuple(py::cast(v)); }
    py::object operator()(at::ScalarType v) {
      return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(v)));
    }
  };
  return std::visit(Converter{}, value);
}

PlainState state_from_dict(const py::dict& values, const char* what) {
  PlainState state;
  for (const auto& [key, value] : values) {
    auto plain = to_plain(value);
    LIGATURE_CHECK_TYPE(plain.has_value(), what, " '", py::str(key).cast<std::string>(),
                        "' must be plain (bool, int, float, str, enum, dtype, shape or None), got ",
                        py::str(py::type::of(value)).cast<std::string>());
    state.set(py::str(key).cast<std::string>(), std::move(*plain));
  }
  return state;
}

py::dict dict_from_state(const PlainState& state) {
  py::dict out;
  for (const auto& [name, value] : state) out[py::str(name)] = from_plain(value);
  return out;
}

py::object wrap(const Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::object wrap(const Value& value) {
  if (!value.is_quantized() || value.identity().defined()) return wrap(value.identity());
  return wrap(wrap_quantized(value.quantized()));
}

Tensor unwrap(const py::handle& object, const std::string& what) {
  if (!object || object.is_none()) return {};
  LIGATURE_CHECK_TYPE(THPVariable_Check(object.ptr()), what, " must be a tensor, got ",
                      py::str(py::type::of(object)).cast<std::string>());
  return THPVariable_Unpack(object.ptr());
}

std::vector<Tensor> unwrap_list(const py::handle& objects, const std::string& what) {
  std::vector<Tensor> out;
  if (!objects || objects.is_none()) return out;
  LIGATURE_CHECK_TYPE(!THPVariable_Check(objects.ptr()) && py::hasattr(objects, "__iter__"), what,
                      " must be a sequence of tensors, got ",
                      py::str(py::type::of(objects)).cast<std::string>());
  for (const auto& item : objects) out.push_back(unwrap(item, what));
  return out;
}

}  // namespace ligature::python
