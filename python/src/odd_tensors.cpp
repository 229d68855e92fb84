#include "odd_tensors.h"

#include "host.h"
#include "ligature/readable.h"

namespace ligature::python {
namespace {

py::object module() { return py::module_::import("ligature.ops._traced.odd_tensors"); }

std::optional<TensorClass> class_of(const at::Tensor& tensor) {
  return with_python([&]() -> std::optional<TensorClass> {
    const py::tuple found = module().attr("describe")(wrap(tensor));
    return TensorClass{found[0].cast<std::string>(), found[1].cast<std::string>()};
  });
}

}  // namespace

bool is_fake(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return false;
  return module().attr("is_fake")(wrap(tensor)).cast<bool>();
}

void bind_odd_tensors(py::module_&) { set_tensor_classes(&class_of); }

}  // namespace ligature::python
