// Classes bound by pybind11 that keep objects of Python which may, in turn, keep them: the garbage
// collector sees what they keep.
#pragma once

#include <utility>
#include <vector>

#include "bindings.h"

namespace ligature::python {

/// What a class keeps, in its public member `refs`.
using Refs = std::vector<py::object>;

/// The C++ object of a class that pybind11 bound; null while it is being made.
template <class T>
T* made(PyObject* object) {
  auto value = reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder();
  return value.holder_constructed() ? static_cast<T*>(value.value_ptr()) : nullptr;
}

template <class T>
int visit_refs(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (const T* object = made<T>(self)) {
    for (const py::object& ref : object->refs) Py_VISIT(ref.ptr());
  }
  return 0;
}

template <class T>
int clear_refs(PyObject* self) {
  if (T* object = made<T>(self)) Refs dropped = std::move(object->refs);
  return 0;
}

/// To be given to py::class_.
template <class T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = &visit_refs<T>;
    type->tp_clear = &clear_refs<T>;
  });
}

}  // namespace ligature::python
