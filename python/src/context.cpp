// OperationContext in Python: saved tensors, flags, and any other attribute. Attributes that are
// plain are visible to C++ too, so that a context filled in Python serves a backward in C++.
#include "ligature/context.h"

#include "bindings.h"
#include "plain.h"

namespace ligature::python {
namespace {

py::dict attributes(OperationContext& ctx) {
  if (ctx.bound == nullptr) ctx.bound = hold(py::dict());
  return py::reinterpret_borrow<py::dict>(held(ctx.bound));
}

py::object get_attribute(OperationContext& ctx, const std::string& name) {
  if (ctx.bound != nullptr) {
    py::dict own = attributes(ctx);
    if (own.contains(name)) return own[py::str(name)];
  }
  if (const auto value = ctx.state.find(name)) return from_plain(*value);
  throw py::attribute_error("the context has no attribute '" + name + "'");
}

void save_for_backward(OperationContext& ctx, const py::args& tensors) {
  std::vector<Value> values;
  for (const auto& item : tensors) values.emplace_back(unwrap(item, "a saved tensor"));
  ctx.save_for_backward(std::move(values));
}

py::tuple saved_tensors(const OperationContext& ctx) {
  py::tuple out(ctx.num_saved());
  for (size_t i = 0; i < ctx.num_saved(); ++i) out[i] = wrap(ctx.saved()[i]);
  return out;
}

void set_attribute(OperationContext& ctx, const std::string& name, const py::object& value) {
  if (name == "requires_grad") {
    ctx.requires_grad.op = value.cast<bool>();
  } else if (name == "input_requires_grad") {
    ctx.requires_grad.input = value.cast<bool>();
  } else if (name == "to_save") {
    save_for_backward(ctx, py::args(py::tuple(value)));
  } else if (name == "saved_tensors") {
    throw py::attribute_error("saved_tensors is read-only; use save_for_backward");
  } else {
    attributes(ctx)[py::str(name)] = value;
    if (auto plain = to_plain(value)) ctx.state.set(name, std::move(*plain));
  }
}

/// Bit i for flag i.
py::int_ bits_of(const Flags& flags) {
  py::object out = py::int_(0);
  for (size_t word = 0; word < flags.size(); word += 64) {
    uint64_t bits = 0;
    for (size_t i = 0; i < 64; ++i) bits |= uint64_t{flags[word + i]} << i;
    out = word == 0 ? py::object(py::int_(bits)) : out | (py::int_(bits) << py::int_(word));
  }
  return out;
}

}  // namespace

void bind_context(py::module_& m) {
  py::class_<OperationContext, std::shared_ptr<OperationContext>>(m, "OperationContext")
      .def(py::init<>())
      .def("save_for_backward", &save_for_backward)
      .def_property_readonly("saved_tensors", &saved_tensors)
      .def_property_readonly("requires_grad",
                             [](const OperationContext& ctx) { return ctx.requires_grad.op; })
      .def_property_readonly("input_requires_grad",
                             [](const OperationContext& ctx) { return ctx.requires_grad.input; })
      .def_property_readonly(
          "params_requires_grad",
          [](const OperationContext& ctx) { return bits_of(ctx.requires_grad.params); })
      .def_property_readonly(
          "extra_inputs_requires_grad",
          [](const OperationContext& ctx) { return bits_of(ctx.requires_grad.extra_inputs); })
      .def("__getattr__", &get_attribute)
      .def("__setattr__", &set_attribute);
}

}  // namespace ligature::python
