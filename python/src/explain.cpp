// Explanations and strictness in Python.
#include "ligature/explain/explain.h"

#include <memory>

#include "bindings.h"
#include "ligature/fuser/strict.h"

namespace ligature::python {
namespace {

/// The Python form of a StrictScope: it lives from __enter__ to __exit__.
class PythonStrictScope {
 public:
  PythonStrictScope(std::vector<std::string> fusions, bool any)
      : fusions_(std::move(fusions)), any_(any) {}

  void enter() {
    LIGATURE_CHECK_STATE(scope_ == nullptr, "strict: this context is already entered");
    scope_ = std::make_unique<StrictScope>(
        fusions_, any_ ? StrictScope::Where::Any : StrictScope::Where::Every);
  }
  void exit(bool failed) {
    const std::unique_ptr<StrictScope> scope = std::move(scope_);
    if (scope != nullptr && !failed) scope->finish();
  }

 private:
  std::vector<std::string> fusions_;
  bool any_;
  std::unique_ptr<StrictScope> scope_;
};

Explanation join(const std::vector<std::pair<std::string, Explanation>>& named) {
  Explanation out;
  for (const auto& [name, explanation] : named) {
    for (ExplainedPart part : explanation.parts) {
      if (!name.empty()) part.name = part.name.empty() ? name : name + "." + part.name;
      out.parts.push_back(std::move(part));
    }
  }
  return out;
}

}  // namespace

void bind_explain(py::module_& m) {
  py::class_<Explanation>(m, "Explanation")
      .def("text", &Explanation::text)
      .def("json", &Explanation::json, py::arg("indent"))
      .def("svg", &Explanation::svg)
      .def_property_readonly("saved_bytes", &Explanation::saved_bytes)
      .def_property_readonly("fusions", &Explanation::fusions)
      .def("diff", [](const Explanation& a, const Explanation& b) { return diff(a, b); });
  py::class_<PlanDiff>(m, "PlanDiff")
      .def("text", &PlanDiff::text)
      .def("json", &PlanDiff::json, py::arg("indent"))
      .def_property_readonly("differs", &PlanDiff::differs);
  m.def("join_explanations", &join);
  m.def("explain_module", [](std::string module, std::string note) {
    ExplainedPart part;
    part.module = std::move(module);
    part.note = std::move(note);
    return Explanation{{std::move(part)}};
  });
  py::class_<PythonStrictScope>(m, "StrictScope")
      .def(py::init<std::vector<std::string>, bool>(), py::arg("fusions"), py::arg("any"))
      .def("enter", &PythonStrictScope::enter)
      .def("exit", &PythonStrictScope::exit, py::arg("failed"));
}

}  // namespace ligature::python
