// Python objects that C++ holds: with objects of the core (Bound), in functions and in lists.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "ligature/base/bound.h"

namespace ligature::python {

namespace py = pybind11;

/// A Python object, owned or borrowed. Any thread may drop it; all else is done with the GIL.
class Held final : public Bound {
 public:
  enum class Ownership { Owned, Borrowed };
  Held(py::object object, Ownership ownership);
  ~Held() override;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  /// Null when it is borrowed and gone.
  py::handle object() const { return object_; }
  /// A borrowed object is about to go.
  void forget() { object_ = py::handle(); }

 private:
  py::handle object_;
  Ownership ownership_;
};
using HeldPtr = std::shared_ptr<Held>;

/// Keeps the object alive.
HeldPtr hold(py::object object);
/// Does not: it is forgotten when it goes.
HeldPtr borrow(const py::object& object);

inline py::handle held(const HeldPtr& holder) { return holder->object(); }
/// Null for none, for another binding's, and where it is gone.
inline py::handle held(const Bound* bound) {
  const auto* own = dynamic_cast<const Held*>(bound);
  return own != nullptr ? own->object() : py::handle();
}
inline py::handle held(const BoundPtr& bound) { return held(bound.get()); }

}  // namespace ligature::python
