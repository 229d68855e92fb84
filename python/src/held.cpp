#include "held.h"

namespace ligature::python {

Held::Held(py::object object, Ownership ownership) : object_(object), ownership_(ownership) {
  if (ownership == Ownership::Owned) object.release();
}

Held::~Held() {
  if (ownership_ == Ownership::Borrowed || Py_IsInitialized() == 0) return;
  if (PyGILState_Check() != 0) {
    object_.dec_ref();
    return;
  }
  const py::gil_scoped_acquire gil;
  object_.dec_ref();
}

HeldPtr hold(py::object object) {
  return std::make_shared<Held>(std::move(object), Held::Ownership::Owned);
}

HeldPtr borrow(const py::object& object) {
  auto holder = std::make_shared<Held>(object, Held::Ownership::Borrowed);
  const auto forget = [weak = std::weak_ptr(holder)](const py::handle& reference) {
    if (const auto left = weak.lock()) left->forget();
    reference.dec_ref();
  };
  py::weakref(object, py::cpp_function(forget)).release();
  return holder;
}

}  // namespace ligature::python
