// Operations as Python objects and back, and the parameters of Python modules.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <string>
#include <vector>

#include "ligature/fuser/fuser.h"
#include "plain.h"

namespace ligature::python {

/// The Python object that stands for an operation. A fused operation made in C++ gets one on
/// demand.
py::object python_of(const OpPtr& op);

/// The operations of a Python list, composites taken apart. `planner`: the list that a fuser's
/// Python object holds; fused operations written in Python are kept there, where the garbage
/// collector sees them. Without one the pointers keep them.
OpList operations_of(const py::handle& ops, const std::string& what,
                     const Bound* planner = nullptr);

/// Runs Python code from C++: takes the GIL, and turns a Python exception into one that autograd
/// and C++ can carry.
template <class F>
auto with_python(F&& function) {
  py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error carried;
    carried.persist();
    throw std::move(carried);
  }
}

/// Is it a tensor of a class that wants to be asked (__torch_function__), and are such asked now?
bool overrides_functions(PyObject* tensor);
using Overriding = c10::SmallVector<PyObject*, 1>;

/// Reads what one basic operation computes with from its Python module, on every call.
class ParameterSource {
 public:
  ParameterSource(const py::handle& module, const BasicOperation& op);
  /// `overriding`: where to note those that override functions; borrowed; null for nowhere.
  void collect(std::vector<Tensor>& out, Overriding* overriding = nullptr) const;
  bool training() const;
  bool uses_training() const { return uses_training_; }

 private:
  void collect_python_op(std::vector<Tensor>& out) const;

  py::handle owner_;  // not owned: the fuser or the caller keeps it
  std::vector<py::object> names_;
  std::string label_;
  bool is_python_op_ = false;
  bool optional_ = false;  // a composite's, which may have none
  bool uses_training_ = false;
};

}  // namespace ligature::python
