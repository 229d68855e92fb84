// What operations have of recipes, in Python: their quantizers, the state of delayed scaling for
// copies and checkpoints, and weights that are kept in low precision.
#include "bindings.h"
#include "host.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/checkpoint.h"
#include "ligature/recipes/model_init.h"
#include "ligature/recipes/weights.h"
#include "quantized.h"
#include "recipes.h"

namespace ligature::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using QuantizerList = std::vector<std::shared_ptr<Quantizer>>;

std::vector<QuantizerRole> roles_of(const BasicOperation& op, const std::string& mode) {
  LIGATURE_CHECK(mode == "forward" || mode == "backward",
                 "mode must be 'forward' or 'backward', got '", mode, "'");
  return mode == "forward" ? op.forward_quantizer_roles() : op.backward_quantizer_roles();
}

py::list role_objects(const BasicOperation& op, const std::string& mode) {
  py::list out;
  for (const QuantizerRole& role : roles_of(op, mode)) out.append(python_of(role));
  return out;
}

/// Of the recipe that computes now in this thread, else of the one used last.
py::object quantizer_of_op(BasicOperation& op, const std::string& mode, size_t index,
                           at::Device device) {
  OpQuantizationPtr state;
  {
    py::gil_scoped_release no_gil;
    const RecipePtr recipe = autocast_state().active();
    state = recipe != nullptr ? op.quantization(recipe, device) : op.quantization();
  }
  if (state == nullptr) return py::none();
  const QuantizerList& all = quantizers_of(*state, mode);
  LIGATURE_CHECK(index < all.size(), "[", op.label(), "] has ", all.size(), " quantizers in ", mode,
                 ", so there is none with index ", index);
  return python_of(QuantizerPtr(all[index]));
}

py::list objects_of(const std::vector<DelayedTensors>& tensors) {
  py::list out;
  for (const DelayedTensors& t : tensors) {
    if (t.scale.defined()) {
      out.append(py::make_tuple(wrap(t.scale), wrap(t.amax), wrap(t.history)));
    } else {
      out.append(py::none());
    }
  }
  return out;
}

std::vector<DelayedTensors> tensors_from(const py::list& given) {
  std::vector<DelayedTensors> out;
  for (const auto& item : given) {
    DelayedTensors& t = out.emplace_back();
    if (item.is_none()) continue;
    const auto tensors = item.cast<py::tuple>();
    t = {unwrap(tensors[0], "scale"), unwrap(tensors[1], "amax"),
         unwrap(tensors[2], "amax_history")};
  }
  return out;
}

/// For every recipe of delayed scaling, the last used one at the end: the recipe, and (scale, amax,
/// history) of each quantizer in forward and in backward. Copies.
py::list state_objects(const BasicOperation& op) {
  py::list out;
  for (const RecipeState& state : recipe_states(op)) {
    out.append(py::make_tuple(python_of(state.recipe), objects_of(state.forward),
                              objects_of(state.backward)));
  }
  return out;
}

void load_state(BasicOperation& op, const std::shared_ptr<Recipe>& recipe, at::Device device,
                const py::list& forward, const py::list& backward) {
  const RecipeState state{recipe, tensors_from(forward), tensors_from(backward)};
  py::gil_scoped_release no_gil;
  load_recipe_state(op, state, device);
}

// ---- weights kept in low precision

/// The weight as this thread's quantized_model_init wants it, with the values to be kept or None;
/// None where it stays in high precision.
py::object new_weight_object(BasicOperation& op, const Tensor& weight, size_t index) {
  Tensor made;
  {
    py::gil_scoped_release no_gil;
    made = new_weight(op, weight, index);
  }
  if (made.is_same(weight)) return py::none();
  return py::make_tuple(wrap(made), wrap(high_precision_init_val(made)));
}

// ---- checkpoints

/// `find(key)` gives a tensor or None.
CheckpointLookup lookup(const py::function& find) {
  return [find](const std::string& key) { return unwrap(find(key), "checkpoint entry"); };
}

py::list objects_of(const CheckpointEntries& entries) {
  py::list out;
  for (const auto& [name, tensor] : entries) out.append(py::make_tuple(name, wrap(tensor)));
  return out;
}

}  // namespace

void bind_recipe_state(py::module_& m) {
  auto cls = py::class_<BasicOperation, FusibleOperation, std::shared_ptr<BasicOperation>>(
      m.attr("BasicOperation"));
  cls.def("quantizer_roles", &role_objects, py::arg("mode"))
      .def("quantizer", &quantizer_of_op, py::arg("mode"), py::arg("index"), py::arg("device"))
      .def("recipe_states", &state_objects)
      .def("recipe_state_entries",
           [](const BasicOperation& op) { return objects_of(recipe_state_entries(op)); })
      .def(
          "place_recipe_state",
          [](const BasicOperation& op, at::Device device) {
            for (const auto& state : op.quantizations()) state->move_to(device);
          },
          py::arg("device"), NoGil())
      .def("load_recipe_state", &load_state, py::arg("recipe"), py::arg("device"),
           py::arg("forward"), py::arg("backward"))
      .def(
          "reset_recipe_state",
          [](BasicOperation& op, const std::shared_ptr<Recipe>& recipe, at::Device device) {
            op.reset_recipe_state(recipe, device);
          },
          py::arg("recipe"), py::arg("device"), NoGil())
      .def(
          "read_other_layout",
          [](const BasicOperation& op, const py::function& find, const std::string& prefix,
             const std::string& parameter, const std::vector<int64_t>& sizes) -> py::object {
            const auto found = read_other_layout(lookup(find), prefix, op, parameter, sizes);
            if (!found) return py::none();
            py::list parts;
            for (const Tensor& part : found->parts) parts.append(wrap(part));
            return py::make_tuple(parts, found->stacked, found->keys);
          },
          py::arg("find"), py::arg("prefix"), py::arg("parameter"), py::arg("sizes"))
      .def("new_weight", &new_weight_object, py::arg("weight"), py::arg("index") = 0)
      .def("adopt_weight", &adopt_weight, py::arg("weight"), py::arg("index") = 0);
  m.def("note_weights_changed", &note_weights_changed);
  m.def(
      "enter_quantized_model_init",
      [](const std::shared_ptr<Recipe>& recipe, bool enabled, bool preserve) {
        enter_quantized_model_init({recipe, enabled, preserve});
      },
      py::arg("recipe"), py::arg("enabled"), py::arg("preserve_high_precision_init_val"));
  m.def("exit_quantized_model_init", py::overload_cast<>(&exit_quantized_model_init));
  m.def(
      "quantized_entries",
      [](const QuantizedTensor& quantized) { return objects_of(quantized_entries(quantized)); },
      py::arg("quantized"));
  m.def("check_readable", &check_readable, py::arg("entry"), py::arg("key"));
  m.def(
      "with_values",
      [](const QuantizedPtr& like, const Tensor& values) {
        const QuantizedPtr quantized = quantized_of(values);
        return with_values(*like, quantized != nullptr ? Value(quantized) : Value(values));
      },
      py::arg("like"), py::arg("values"));
  m.def(
      "read_quantized",
      [](const py::function& find, const std::string& key, const std::vector<int64_t>& sizes) {
        return read_quantized(lookup(find), key, sizes);
      },
      py::arg("find"), py::arg("key"), py::arg("sizes"));
  m.def(
      "read_delayed",
      [](const py::function& find, const std::string& prefix, const std::string& mode,
         int64_t count, const py::handle& history_length) {
        return objects_of(read_delayed(lookup(find), prefix, mode, count, json_of(history_length)));
      },
      py::arg("find"), py::arg("prefix"), py::arg("mode"), py::arg("count"),
      py::arg("history_length"));
  m.def(
      "wrap_quantized", [](const QuantizedPtr& quantized) { return wrap(Value(quantized)); },
      py::arg("quantized"));
}

}  // namespace ligature::python
