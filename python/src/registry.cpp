// Fusions written in Python: functions over the list of operations, and patterns of classes. Both
// become entries of the one registry; patterns are matched by the one scanner.
#include "registry.h"

#include "bindings.h"
#include "recipes.h"

namespace ligature::python {
namespace {

bool all_have_objects(const OpList& ops) {
  for (const auto& op : ops) {
    for (const auto& basic : op->basic_ops()) {
      if (!held(basic->bound)) return false;
    }
  }
  return true;
}

py::list python_list(const OpList& ops) {
  py::list out;
  for (const auto& op : ops) out.append(python_of(op));
  return out;
}

}  // namespace

// A model written in C++ has no Python objects to show to the function; it is left as it is.
FusionFunction make_function(std::string name, py::object function) {
  auto keep = hold(std::move(function));
  auto apply = [keep, name](const OpList& ops, const PlanOptions& options) -> OpList {
    return with_python([&]() -> OpList {
      if (!all_have_objects(ops)) return ops;
      py::list given = python_list(ops);
      // While a recipe only looks on, what runs is in high precision.
      const py::object recipe = python_of(options.calibrating ? nullptr : options.recipe);
      py::object result = held(keep)(given, py::arg("recipe") = recipe);
      LIGATURE_CHECK_TYPE(py::isinstance<py::list>(result) || py::isinstance<py::tuple>(result),
                          "fusion '", name, "' must return a list of operations, got ",
                          py::str(py::type::of(result)).cast<std::string>());
      OpList out = operations_of(result, "fusion '" + name + "': the results", options.planner);
      // What came back unchanged stays the pointer it was.
      for (auto& op : out) {
        for (const auto& before : ops) {
          if (before.get() == op.get()) op = before;
        }
      }
      return out;
    });
  };
  return {std::move(name), std::move(apply)};
}

namespace {

/// How many operations, from the first on, one place of a Python pattern covers. The place is a
/// class, a composite class (it covers the parts of one instance) or a function of an operation.
size_t take(const py::handle& wanted, const py::handle& count, at::ArrayRef<OpPtr> ops) {
  return with_python([&]() -> size_t {
    if (!all_have_objects(ops.vec())) return 0;
    return count(wanted, python_list(ops.vec())).cast<size_t>();
  });
}

py::list matched_objects(const Match& match, const py::handle& join) {
  py::list out;
  for (size_t i = 0; i < match.elements.size(); ++i) {
    py::list parts;
    for (const auto& op : match.elements[i]) parts.append(python_of(op));
    out.append(join(i, parts));
  }
  return out;
}

}  // namespace

// pattern: (text, wanted, optional) each. `count(wanted, ops)` tells how many operations a place
// covers, `join(index, ops)` what the factory is given for it: the package knows about composites.
FusionRule make_rule(std::string name, const py::list& pattern, py::object predicate,
                     py::object factory, py::object count, py::object join) {
  FusionRule rule;
  rule.name = name;
  auto keep_count = hold(std::move(count));
  auto keep_join = hold(std::move(join));
  for (const auto& place : pattern) {
    const auto parts = place.cast<py::tuple>();
    auto wanted = hold(py::reinterpret_borrow<py::object>(parts[1]));
    rule.pattern.push_back({parts[0].cast<std::string>(),
                            [wanted, keep_count](at::ArrayRef<OpPtr> ops) {
                              return take(held(wanted), held(keep_count), ops);
                            },
                            parts[2].cast<bool>()});
  }
  if (!predicate.is_none()) {
    auto keep = hold(std::move(predicate));
    rule.why_not = [keep, keep_join](const Match& match, const PlanOptions&) {
      return with_python([&]() -> std::string {
        py::object answer = held(keep)(*matched_objects(match, held(keep_join)));
        if (py::isinstance<py::str>(answer)) return answer.cast<std::string>();
        return answer.cast<bool>() ? "" : "its predicate refused";
      });
    };
  }
  auto keep = hold(std::move(factory));
  rule.make = [keep, keep_join, name](const Match& match) {
    return with_python([&]() -> OpPtr {
      py::list result;
      result.append(held(keep)(*matched_objects(match, held(keep_join))));
      OpList made =
          operations_of(result, "fusion '" + name + "': what its factory makes", match.planner);
      LIGATURE_CHECK_TYPE(made.size() == 1, "fusion '", name,
                          "': its factory must make one fused operation");
      return made[0];
    });
  };
  return rule;
}

Pass pass_from_string(const std::string& name) {
  if (name == "joint") return Pass::Joint;
  if (name == "forward") return Pass::Forward;
  LIGATURE_CHECK(name == "backward", "no such pass: '", name, "'");
  return Pass::Backward;
}

void bind_registry(py::module_& m) {
  py::class_<FusionHandle>(m, "FusionHandle")
      .def("unregister", &FusionHandle::unregister, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("registered", &FusionHandle::registered);
  m.def("register_function",
        [](const std::string& pass, std::string name, py::object function, bool prepend) {
          return register_fusion(pass_from_string(pass),
                                 make_function(std::move(name), std::move(function)), prepend);
        });
  m.def("register_rule",
        [](const std::string& pass, std::string name, const py::list& pattern, py::object predicate,
           py::object factory, py::object count, py::object join, bool prepend) {
          return register_fusion(pass_from_string(pass),
                                 make_rule(std::move(name), pattern, std::move(predicate),
                                           std::move(factory), std::move(count), std::move(join)),
                                 prepend);
        });
  m.def("apply_rule",
        [](std::string name, const py::list& pattern, py::object predicate, py::object factory,
           py::object count, py::object join, const py::list& ops) {
          const FusionRule rule = make_rule(std::move(name), pattern, std::move(predicate),
                                            std::move(factory), std::move(count), std::move(join));
          return python_list(apply_rule(rule, operations_of(ops, "the operations"), {}, nullptr));
        });
  m.def("registered_fusions", [](const std::string& pass) {
    std::vector<std::string> names;
    for (const auto& fusion : registered_fusions(pass_from_string(pass))) {
      names.push_back(fusion_name(*fusion));
    }
    return names;
  });
}

}  // namespace ligature::python
