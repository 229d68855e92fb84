// What operations have of recipes, in Python: their quantizers, the state of delayed scaling for
// copies and checkpoints, and weights that are kept in low precision.
#include "bindings.h"
#include "host.h"
#include "ligature/quantization/autocast.h"
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
py::object quantizer_object(BasicOperation& op, const std::string& mode, size_t index,
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

bool is_state(const std::shared_ptr<Quantizer>& quantizer) {
  return quantizer != nullptr && quantizer->delayed != nullptr &&
         quantizer->delayed->recipe != nullptr;
}

py::list delayed_tensors(const QuantizerList& quantizers) {
  py::list out;
  for (const auto& quantizer : quantizers) {
    if (!is_state(quantizer)) {
      out.append(py::none());
      continue;
    }
    const DelayedScale& delayed = *quantizer->delayed;
    out.append(py::make_tuple(wrap(delayed.scale.clone()), wrap(delayed.amax.clone()),
                              wrap(delayed.history.clone())));
  }
  return out;
}

/// For every recipe of delayed scaling, the last used one at the end: the recipe, and (scale, amax,
/// history) of each quantizer in forward and in backward. Copies.
py::list recipe_states(const BasicOperation& op) {
  py::list out;
  for (const OpQuantizationPtr& state : op.quantizations()) {
    const bool any = std::any_of(state->forward.begin(), state->forward.end(), is_state) ||
                     std::any_of(state->backward.begin(), state->backward.end(), is_state);
    if (!any) continue;
    out.append(py::make_tuple(python_of(state->recipe), delayed_tensors(state->forward),
                              delayed_tensors(state->backward)));
  }
  return out;
}

struct Loaded {
  DelayedScale* to;
  Tensor scale, amax, history;
};

void take_delayed(const BasicOperation& op, const QuantizerList& quantizers, const py::list& given,
                  std::vector<Loaded>& out) {
  LIGATURE_CHECK(given.size() == quantizers.size(), "[", op.label(), "] has ", quantizers.size(),
                 " quantizers, got recipe state for ", given.size());
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (given[i].is_none() || !is_state(quantizers[i])) continue;
    const auto tensors = given[i].cast<py::tuple>();
    DelayedScale& to = *quantizers[i]->delayed;
    Loaded loaded{&to, unwrap(tensors[0], "scale"), unwrap(tensors[1], "amax"),
                  unwrap(tensors[2], "amax_history")};
    LIGATURE_CHECK(loaded.scale.numel() == 1 && loaded.amax.numel() == 1 &&
                       loaded.history.sizes() == to.history.sizes(),
                   "[", op.label(), "] recipe state must have a history of ",
                   sizes_string(to.history.sizes()), ", got ",
                   sizes_string(loaded.history.sizes()));
    out.push_back(std::move(loaded));
  }
}

void load_recipe_state(BasicOperation& op, const std::shared_ptr<Recipe>& recipe, at::Device device,
                       const py::list& forward, const py::list& backward) {
  OpQuantizationPtr state;
  {
    py::gil_scoped_release no_gil;
    state = op.quantization(recipe, device);
  }
  LIGATURE_CHECK(state != nullptr, "[", op.label(), "] has no quantizers for recipe state");
  std::vector<Loaded> loaded;
  take_delayed(op, state->forward, forward, loaded);
  take_delayed(op, state->backward, backward, loaded);
  at::NoGradGuard no_grad;
  for (const Loaded& item : loaded) {
    item.to->scale = item.scale.detach().to(item.to->amax.options()).reshape({1}).clone();
    item.to->amax.copy_(item.amax.detach().reshape({1}));
    item.to->history.copy_(item.history.detach());
  }
}

// ---- weights kept in low precision

const std::shared_ptr<Quantizer>& weight_quantizer(const OpQuantization& state) {
  static const std::shared_ptr<Quantizer> none;
  return state.forward.size() > 1 ? state.forward[1] : none;
}

/// Values that nothing is known of yet: a factor of delayed scaling becomes theirs.
void begin_with(Quantizer& quantizer, const Tensor& values) {
  DelayedScale& delayed = *quantizer.delayed;
  kernels::update_amax(values.detach().to(delayed.amax.options()).contiguous(), delayed.amax);
  delayed.recipe->update(delayed);
}

/// The weight in the recipe's format, for forward and backward; None where the recipe leaves it in
/// high precision.
py::object quantize_weight(BasicOperation& op, const std::shared_ptr<Recipe>& recipe,
                           const Tensor& weight) {
  QuantizedPtr quantized;
  {
    py::gil_scoped_release no_gil;
    const OpQuantizationPtr state = op.quantization(recipe, weight.device());
    const auto quantizer = state != nullptr ? weight_quantizer(*state) : nullptr;
    if (quantizer != nullptr) {
      const std::string why = quantizer->why_not(weight);
      LIGATURE_CHECK_TYPE(why.empty(), "[", op.label(), "] weight: ", why);
      at::NoGradGuard no_grad;
      if (is_state(quantizer)) begin_with(*quantizer, weight);
      quantized =
          quantizer->quantize(weight.detach(), quantizer->usage_for({true, true}, weight.device()));
    }
  }
  return quantized == nullptr ? py::object(py::none()) : wrap(Value(quantized));
}

/// Before a quantized weight is given values from elsewhere.
void expect_values(const Tensor& weight, const Tensor& values) {
  const QuantizedPtr quantized = quantized_of(weight);
  if (quantized == nullptr) return;
  const auto quantizer = std::const_pointer_cast<Quantizer>(quantized->quantizer());
  at::NoGradGuard no_grad;
  if (is_state(quantizer)) begin_with(*quantizer, Value(values).dequantized());
}

/// A weight that was copied or read belongs to this operation: it is quantized anew with the
/// operation's own quantizer, where that has its format.
void adopt_weight(const BasicOperation& op, const Tensor& weight) {
  const QuantizedPtr quantized = quantized_of(weight);
  if (quantized == nullptr) return;
  const auto states = op.quantizations();
  for (size_t i = states.size(); i-- > 0;) {
    const auto& quantizer = weight_quantizer(*states[i]);
    if (quantizer == nullptr || quantizer->format_tag() != quantized->format_tag()) continue;
    quantized->set_quantizer(quantizer);
    return;
  }
}

}  // namespace

void bind_recipe_state(py::module_& m) {
  auto cls = py::class_<BasicOperation, FusibleOperation, std::shared_ptr<BasicOperation>>(
      m.attr("BasicOperation"));
  cls.def("quantizer_roles", &role_objects, py::arg("mode"))
      .def("quantizer", &quantizer_object, py::arg("mode"), py::arg("index"), py::arg("device"))
      .def("recipe_states", &recipe_states)
      .def("load_recipe_state", &load_recipe_state, py::arg("recipe"), py::arg("device"),
           py::arg("forward"), py::arg("backward"))
      .def(
          "reset_recipe_state",
          [](BasicOperation& op, const std::shared_ptr<Recipe>& recipe, at::Device device) {
            op.reset_recipe_state(recipe, device);
          },
          py::arg("recipe"), py::arg("device"), NoGil())
      .def("quantize_weight", &quantize_weight, py::arg("recipe"), py::arg("weight"))
      .def("adopt_weight", &adopt_weight, py::arg("weight"));
  m.def("note_weights_changed", &note_weights_changed);
  m.def("expect_values", &expect_values, py::arg("weight"), py::arg("values"));
  m.def(
      "wrap_quantized", [](const QuantizedPtr& quantized) { return wrap(Value(quantized)); },
      py::arg("quantized"));
}

}  // namespace ligature::python
