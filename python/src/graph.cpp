// What ligature.make_graphed_callables needs of the core.
#include "bindings.h"
#include "host.h"
#include "ligature/op_quantization.h"
#include "ligature/recipes/graphed_segment.h"

namespace ligature::python {

void bind_graph(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<CapturedWeights, std::shared_ptr<CapturedWeights>>(m, "CapturedWeights")
      .def(py::init<>());
  py::class_<CapturedPart, std::shared_ptr<CapturedPart>>(m, "CapturedPart")
      .def(py::init([](std::shared_ptr<CapturedWeights> weights) {
             auto part = std::make_shared<CapturedPart>();
             part->weights = std::move(weights);
             return part;
           }),
           py::arg("weights") = nullptr)
      .def("begin", &CapturedPart::begin)
      .def("end", &CapturedPart::end)
      .def("forget", &CapturedPart::forget, NoGil())
      .def("ran_forward", &CapturedPart::ran_forward, NoGil())
      .def("ran_backward", &CapturedPart::ran_backward, NoGil());
  m.def(
      "note_graph_writes", [](const std::vector<Tensor>& weights) { note_graph_writes(weights); },
      py::arg("weights"));
}

}  // namespace ligature::python
