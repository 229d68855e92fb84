#include "host.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace ligature::python {
namespace {

py::object attribute(const py::handle& object, const char* name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), name));
}

py::object checked_attribute(const py::handle& object, const py::handle& name) {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name.ptr()));
  if (!value) throw py::error_already_set();
  return value;
}

const py::object& interned(const char* text) {
  // Leaked on purpose: used until the interpreter is gone.
  static auto* parameters =
      new py::object(py::reinterpret_steal<py::object>(PyUnicode_InternFromString("_parameters")));
  static auto* training =
      new py::object(py::reinterpret_steal<py::object>(PyUnicode_InternFromString("training")));
  return text[0] == '_' ? *parameters : *training;
}

}  // namespace

py::object python_of(const OpPtr& op) {
  if (const py::handle own = held(op->bound)) return py::reinterpret_borrow<py::object>(own);
  LIGATURE_CHECK_STATE(op->is_fused_op(), "[", op->label(), "] has no Python object");
  return py::module_::import("ligature.ops.fused").attr("_wrap")(op);
}

OpList operations_of(const py::handle& ops, const std::string& what, const Bound* planner) {
  const py::handle kept = held(planner);
  OpList out;
  for (const auto& item : ops) {
    py::object op = attribute(item, "_op");
    if (!op) PyErr_Clear();
    if (op && py::isinstance<FusibleOperation>(op)) {
      auto pointer = op.cast<OpPtr>();
      if (pointer->is_python_op() && pointer->is_fused_op() && kept) {
        kept.attr("append")(item);
        out.push_back(std::move(pointer));
      } else if (pointer->is_python_op() && pointer->is_fused_op()) {
        auto keep = hold(py::reinterpret_borrow<py::object>(item));
        out.emplace_back(pointer.get(), [keep, pointer](FusibleOperation*) {});
      } else {
        out.push_back(std::move(pointer));
      }
      continue;
    }
    LIGATURE_CHECK_TYPE(py::hasattr(item, "basic_ops"), what, " must be fusible operations, got ",
                        py::str(py::type::of(item)).cast<std::string>());
    for (auto& part : operations_of(item.attr("basic_ops"), what, planner)) {
      out.push_back(std::move(part));
    }
  }
  return out;
}

ParameterSource::ParameterSource(const py::handle& module, const BasicOperation& op)
    : owner_(checked_attribute(module, py::str("_parameter_owner"))),
      label_(op.label()),
      is_python_op_(op.is_python_op()),
      optional_(op.parameters_are_optional() && !owner_.is(module)),
      uses_training_(op.uses_training() || op.is_python_op()) {
  for (const auto& name : op.parameter_names()) {
    names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str())));
  }
}

bool overrides_functions(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) return false;
  static auto* core = new py::module_(py::module_::import("torch._C"));
  static auto* disabled = new py::object(core->attr("_disabled_torch_function_impl"));
  static auto* enabled = new py::object(core->attr("_is_torch_function_enabled"));
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
  const py::object own = py::getattr(type, "__torch_function__", py::none());
  return !own.is_none() && !own.is(*disabled) && (*enabled)().cast<bool>();
}

bool ParameterSource::training() const {
  return !uses_training_ || checked_attribute(owner_, interned("training")).ptr() == Py_True;
}

// A parameter is where the module keeps it; when a parametrization or a swap took it from there, it
// is what the module's attribute gives.
void ParameterSource::collect(std::vector<Tensor>& out, Overriding* overriding) const {
  if (is_python_op_) return collect_python_op(out);
  if (names_.empty()) return;
  const py::object dict = checked_attribute(owner_, interned("_parameters"));
  for (const auto& name : names_) {
    PyObject* found = PyDict_GetItemWithError(dict.ptr(), name.ptr());
    py::object held;
    if (found == nullptr || found == Py_None) {
      held = checked_attribute(owner_, name);
      found = held.ptr();
      if (found == Py_None && optional_) continue;
    }
    LIGATURE_CHECK_TYPE(THPVariable_Check(found), "[", label_, "] parameter '",
                        name.cast<std::string>(), "' must be a tensor, got ",
                        py::str(py::type::of(py::handle(found))).cast<std::string>());
    if (overriding != nullptr && overrides_functions(found)) overriding->push_back(found);
    out.push_back(THPVariable_Unpack(found));
  }
}

// A user's operation: its own parameters, then parametrized ones, then those of its submodules.
void ParameterSource::collect_python_op(std::vector<Tensor>& out) const {
  const py::dict own = checked_attribute(owner_, interned("_parameters"));
  for (const auto& item : own) {
    if (!item.second.is_none()) out.push_back(unwrap(item.second, "a parameter of " + label_));
  }
  const py::dict modules = owner_.attr("_modules");
  for (const auto& [name, module] : modules) {
    if (module.is_none()) continue;
    if (name.cast<std::string>() == "parametrizations") {
      for (const auto& parametrized : module.attr("keys")()) {
        out.push_back(unwrap(checked_attribute(owner_, parametrized), "a parameter of " + label_));
      }
      continue;
    }
    for (const auto& parameter : module.attr("parameters")()) {
      out.push_back(unwrap(parameter, "a parameter of " + label_));
    }
  }
}

}  // namespace ligature::python
