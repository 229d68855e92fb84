// ligature.testing: subjects made of Python's modules, references written in Python. The checks
// themselves run in C++, without the GIL.
#include "ligature/testing/testing.h"

#include "bindings.h"
#include "python_op.h"
#include "registry.h"

namespace ligature::python {
namespace {

using namespace ligature::testing;

/// In the order in which a ParameterSource collects them.
std::vector<std::string> parameter_names(const py::handle& module, const BasicOperation& op) {
  if (!op.is_python_op()) return op.parameter_names();
  std::vector<std::string> names;
  const py::object owner = module.attr("_parameter_owner");
  for (const auto& [name, value] : py::dict(owner.attr("_parameters"))) {
    if (!value.is_none()) names.push_back(name.cast<std::string>());
  }
  for (const auto& [name, child] : py::dict(owner.attr("_modules"))) {
    if (child.is_none()) continue;
    if (name.cast<std::string>() == "parametrizations") {
      for (const auto& key : child.attr("keys")()) names.push_back(key.cast<std::string>());
      continue;
    }
    for (const auto& item : child.attr("named_parameters")()) {
      names.push_back(name.cast<std::string>() + "." +
                      item.cast<py::tuple>()[0].cast<std::string>());
    }
  }
  return names;
}

Subject subject_of_modules(const py::object& modules) {
  Subject subject;
  py::list keep;
  keep.append(modules);
  for (const auto& op : operations_of(modules, "the operations to be checked")) {
    for (auto& basic : op->basic_ops()) subject.ops.push_back(std::move(basic));
  }
  LIGATURE_CHECK(!subject.ops.empty(), "there are no operations to check");
  for (const auto& op : subject.ops) {
    const py::object module = python_of(op);
    if (auto* written = dynamic_cast<PythonOperation*>(op.get())) {
      written->set_num_extra(module.attr("num_extra_inputs").cast<size_t>(),
                             module.attr("num_extra_outputs").cast<size_t>());
    }
    op->pre_first_fuser_forward();
    const ParameterSource source(module, *op);
    source.collect(subject.params.emplace_back());
    subject.training.push_back(source.training());
    subject.param_names.push_back(parameter_names(module, *op));
    keep.append(module);
    keep.append(module.attr("_parameter_owner"));
  }
  subject.keep_alive = hold(std::move(keep));
  return subject;
}

/// `make(dtype, device)` gives a list of modules.
MakeSubject subject_maker(py::object make) {
  return [make = hold(std::move(make))](at::ScalarType dtype, at::Device device) {
    return with_python([&] { return subject_of_modules(held(make)(py::cast(dtype), device)); });
  };
}

std::vector<ExampleShapes> shapes_from(const py::list& shapes) {
  std::vector<ExampleShapes> out;
  for (const auto& item : shapes) {
    const auto [input, extras] =
        item.cast<std::pair<std::vector<int64_t>, std::vector<std::vector<int64_t>>>>();
    out.emplace_back(input, extras);
  }
  return out;
}

/// Is it an interrupt or an exit? Autograd has also set a Python exception in Python, where the
/// next call would stumble over it.
bool ends_everything(const std::exception& error) {
  const auto* from_python = dynamic_cast<const python_error*>(&error);
  if (from_python == nullptr) return false;
  py::gil_scoped_acquire gil;
  PyErr_Clear();
  return from_python->type != nullptr &&
         PyErr_GivenExceptionMatches(from_python->type, PyExc_Exception) == 0;
}

CheckOptions options_from(const py::dict& given) {
  CheckOptions options;
  options.is_fatal = &ends_everything;
  for (const auto& item : given["dtypes"]) {
    const auto [input, params] = item.cast<std::pair<at::ScalarType, at::ScalarType>>();
    options.dtypes.emplace_back(input, params);
  }
  options.device = given["device"].cast<at::Device>();
  options.seed = given["seed"].cast<uint64_t>();
  options.max_patterns = given["max_patterns"].cast<size_t>();
  options.tolerance = given["tolerance"].cast<double>();
  options.contexts =
      given["exact_contexts"].cast<bool>() ? ContextMatch::Exact : ContextMatch::Enough;
  options.recompute = given["recompute"].cast<bool>() ? Recompute::Cheap : Recompute::None;
  if (given.contains("recipe")) options.recipe = given["recipe"].cast<RecipePtr>();
  if (!given["autocast"].is_none()) options.autocast = given["autocast"].cast<at::ScalarType>();
  options.may_alias = given["may_alias"].cast<bool>();
  options.may_give_unneeded = given["may_give_unneeded"].cast<bool>();
  options.may_change_gradients = given["may_change_gradients"].cast<bool>();
  options.may_change_dtype = given["may_change_dtype"].cast<bool>();
  options.randomize_parameters = given["randomize_parameters"].cast<bool>();
  options.numeric = given["numeric"].cast<bool>();
  if (!given["sample"].is_none()) {
    options.sample = [sample = hold(given["sample"])](at::IntArrayRef sizes) {
      return with_python([&] {
        return unwrap(held(sample)(py::tuple(py::cast(sizes.vec()))), "a sample")
            .to(at::kCPU, at::kDouble);
      });
    };
  }
  return options;
}

/// ("rule", what a Fusion is made of), ("function", name, function), or ("name", name).
Fusion fusion_from(const py::tuple& given, Pass pass) {
  const auto form = given[0].cast<std::string>();
  auto name = given[1].cast<std::string>();
  if (form == "rule") {
    return make_rule(std::move(name), given[2], given[3], given[4], given[5], given[6]);
  }
  if (form == "function") return make_function(std::move(name), given[2]);
  for (const auto& fusion : registered_fusions(pass)) {
    if (fusion_name(*fusion) == name) return *fusion;
  }
  LIGATURE_CHECK(false, "there is no ", pass_name(pass), " fusion named '", name, "'");
}

Report python_check_fusion(const std::string& kind, const py::tuple& fusion, py::object make,
                           const py::list& shapes, const py::dict& options) {
  const Pass pass = pass_from_string(kind);
  const Fusion subject = fusion_from(fusion, pass);
  const MakeSubject maker = subject_maker(std::move(make));
  const auto examples = shapes_from(shapes);
  CheckOptions chosen = options_from(options);
  py::gil_scoped_release no_gil;
  return check_fusion(subject, pass, maker, examples, std::move(chosen));
}

Report python_check_operation(py::object make, py::object reference, const py::list& shapes,
                              const py::dict& options) {
  // The reference is given parameters by name; each subject has the same.
  auto names = std::make_shared<std::vector<std::string>>();
  const MakeSubject maker = [names, inner = subject_maker(std::move(make))](at::ScalarType dtype,
                                                                            at::Device device) {
    Subject subject = inner(dtype, device);
    names->clear();
    for (const auto& of_op : subject.param_names) {
      for (std::string name : of_op) {
        std::replace(name.begin(), name.end(), '.', '_');
        names->push_back(std::move(name));
      }
    }
    return subject;
  };
  const Reference formula = [names, keep = hold(std::move(reference))](
                                const Tensor& input, const std::vector<Tensor>& params,
                                const std::vector<Tensor>& extras) {
    return with_python([&]() -> std::vector<Tensor> {
      py::list arguments;
      arguments.append(wrap(input));
      for (const Tensor& extra : extras) arguments.append(wrap(extra));
      py::dict keywords;
      for (size_t i = 0; i < params.size(); ++i) keywords[py::str((*names)[i])] = wrap(params[i]);
      const py::object result = held(keep)(*arguments, **keywords);
      if (py::isinstance<py::tuple>(result) || py::isinstance<py::list>(result)) {
        return unwrap_list(result, "an output of the reference");
      }
      return {unwrap(result, "the output of the reference")};
    });
  };
  const auto examples = shapes_from(shapes);
  CheckOptions chosen = options_from(options);
  py::gil_scoped_release no_gil;
  return check_operation(maker, formula, examples, std::move(chosen));
}

}  // namespace

void bind_testing(py::module_& m) {
  py::class_<Report>(
      m, "Report",
      "What a check found. It is true when nothing is wrong and something was compared.")
      .def_readonly("runs", &Report::runs, "How many cases were compared.")
      .def_readonly("failures", &Report::failures,
                    "Which case failed, what, and by how much: a list of texts.")
      .def("text", &Report::text,
           "For people: one line when all is well, else the failures, the first ones in full.")
      .def("__bool__", [](const Report& report) { return static_cast<bool>(report); })
      .def("__str__", &Report::text)
      .def("__repr__", [](const Report& report) {
        return "Report(runs=" + std::to_string(report.runs) +
               ", failures=" + std::to_string(report.failures.size()) + ")";
      });
  m.def("check_fusion", &python_check_fusion);
  m.def("check_operation", &python_check_operation);
}

}  // namespace ligature::python
