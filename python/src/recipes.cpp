// Recipes, autocast and recomputation in Python. A recipe's fields live in its Python object; here
// its twin is made from them.
#include "recipes.h"

#include "bindings.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/model_init.h"
#include "python_op.h"
#include "quantized.h"

namespace ligature::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// ---- recipes

// For a function that is given the recipe it belongs to, which is not made yet.
using MaybeRecipe = std::shared_ptr<std::weak_ptr<Recipe>>;

/// A function of the user's, and what tells it apart from others.
struct KeyedFunction {
  HeldPtr function;
  std::string key;
};

std::optional<KeyedFunction> function_of(const py::dict& functions, const char* name) {
  if (!functions.contains(name)) return std::nullopt;
  const auto [function, key] = functions[name].cast<std::pair<py::object, std::string>>();
  return KeyedFunction{hold(function), key};
}

Tensor one_value(const py::object& result, const char* what) {
  Tensor value = unwrap(result, std::string("[DelayedScaling] what ") + what + " returns");
  LIGATURE_CHECK(value.defined() && value.numel() == 1, "[DelayedScaling] ", what,
                 " must give one value, got ",
                 value.defined() ? sizes_string(value.sizes()) : std::string("None"));
  return value.detach().to(at::kFloat).reshape({1});
}

void set_functions(DelayedScalingOptions& options, const py::dict& functions,
                   const MaybeRecipe& self) {
  if (const auto amax = function_of(functions, "amax_compute_algo")) {
    options.amax_function = [keep = amax->function](const Tensor& history) {
      return with_python([&] {
        return one_value(held(keep)(wrap(history.clone().unsqueeze(1))), "amax_compute_algo");
      });
    };
    options.functions_key = "amax:" + amax->key;
  }
  if (const auto scale = function_of(functions, "scaling_factor_compute_algo")) {
    options.scale_function = [keep = scale->function, self](
                                 const Tensor& amax, const Tensor& before, double max_value) {
      return with_python([&] {
        return one_value(held(keep)(wrap(amax.clone()), wrap(before.clone()), max_value,
                                    python_of(RecipePtr(self->lock()))),
                         "scaling_factor_compute_algo");
      });
    };
    options.functions_key += (options.functions_key.empty() ? "scale:" : ";scale:") + scale->key;
  }
}

void set_functions(CustomRecipeOptions& options, const py::dict& functions, const MaybeRecipe&) {
  const auto factory = function_of(functions, "qfactory");
  if (!factory) return;
  options.factory_key = factory->key;
  options.factory = [keep = factory->function](const QuantizerRole& role) {
    return with_python([&]() -> std::shared_ptr<Quantizer> {
      const py::object made = held(keep)(python_of(role));
      LIGATURE_CHECK_TYPE(made.is_none() || quantizer_behind(made) != nullptr,
                          "[CustomRecipe] qfactory must return a Quantizer or None, got ",
                          py::str(py::type::of(made)).cast<std::string>());
      return quantizer_from(made);
    });
  };
}

template <class R>
std::shared_ptr<Recipe> make_with_functions(const std::string& name, const PlainState& fields,
                                            const py::dict& functions, const MaybeRecipe& self) {
  auto options = options_from_state<typename R::Options>(fields, name);
  set_functions(options, functions, self);
  return std::make_shared<R>(std::move(options));
}

/// `functions`: by their fields, each with its key. `made_from`: a weak reference to the Python
/// object, its class and the values of its fields.
std::shared_ptr<Recipe> make_twin(const std::string& name, const py::dict& fields,
                                  const py::dict& functions, const py::tuple& made_from) {
  const PlainState plain = state_from_dict(fields, "field");
  auto self = std::make_shared<std::weak_ptr<Recipe>>();
  std::shared_ptr<Recipe> made;
  if (functions.empty()) {
    made = make_recipe(name, plain);
  } else if (name == "CustomRecipe") {
    made = make_with_functions<CustomRecipe>(name, plain, functions, self);
  } else {
    made = make_with_functions<DelayedScaling>(name, plain, functions, self);
  }
  made->bound = hold(made_from);
  *self = made;
  return made;
}

// ---- autocast

AmaxReduction reduction_from(const py::object& function) {
  if (function.is_none()) return nullptr;
  auto keep = hold(function);
  return [keep](Tensor& amax) { with_python([&] { held(keep)(wrap(amax)); }); };
}

void enter(bool enabled, bool calibrating, const std::shared_ptr<Recipe>& recipe,
           const py::object& reduce, bool only_where_faster) {
  enter_autocast({enabled, calibrating, recipe, reduction_from(reduce), only_where_faster});
}

py::tuple state_now() {
  const AutocastState& state = autocast_state();
  return py::make_tuple(state.enabled, state.calibrating, python_of(state.recipe),
                        autocast_depth());
}

/// A recomputation as a context that Python enters by making it and leaves by `exit`.
class Recomputation {
 public:
  explicit Recomputation(const AutocastState& state)
      : scope_(std::make_unique<RecomputeScope>(state)) {}
  void exit() { scope_.reset(); }

 private:
  std::unique_ptr<RecomputeScope> scope_;
};

}  // namespace

py::object python_of(const RecipePtr& recipe) {
  const py::handle made_from = recipe != nullptr ? held(recipe->bound) : py::handle();
  if (!made_from) return py::none();
  return py::module_::import("ligature.quantization.recipe_base")
      .attr("object_of")(made_from, std::const_pointer_cast<Recipe>(recipe));
}

py::object python_of(const QuantizerRole& role) {
  return py::module_::import("ligature.quantization.roles")
      .attr("QuantizerRole")(role.module_type, role.tensor_type, role.name);
}

QuantizerRole role_from(const py::handle& role) {
  return {role.attr("module_type").cast<std::string>(),
          role.attr("tensor_type").cast<std::string>(), role.attr("name").cast<std::string>()};
}

std::shared_ptr<Quantizer> quantizer_from(const py::object& object) {
  if (object.is_none()) return nullptr;
  auto behind = quantizer_behind(object);
  if (behind == nullptr) return std::make_shared<PythonQuantizer>(object);
  // The object lives as long as whoever computes with its quantizer.
  auto both =
      std::make_shared<std::pair<std::shared_ptr<Quantizer>, HeldPtr>>(behind, hold(object));
  return {both, behind.get()};
}

const std::vector<std::shared_ptr<Quantizer>>& quantizers_of(const OpQuantization& state,
                                                             const std::string& mode) {
  LIGATURE_CHECK(mode == "forward" || mode == "backward",
                 "mode must be 'forward' or 'backward', got '", mode, "'");
  return mode == "forward" ? state.forward : state.backward;
}

void bind_recipes(py::module_& m) {
  py::class_<Recipe, std::shared_ptr<Recipe>>(m, "Recipe")
      .def_property_readonly("name", &Recipe::name)
      .def_property_readonly("key", &Recipe::key)
      .def(
          "make_quantizer",
          [](const Recipe& recipe, const py::handle& role, at::Device device) {
            return python_of(QuantizerPtr(recipe.make_quantizer(role_from(role), device)));
          },
          py::arg("role"), py::arg("device"));
  m.def("make_recipe", &make_twin, py::arg("name"), py::arg("fields"), py::arg("functions"),
        py::arg("made_from"));
  m.def("recipe_fields",
        [](const std::string& name) { return dict_from_state(recipe_fields(name)); });
  m.def("replace_recipe", [](const Recipe& before, const std::shared_ptr<Recipe>& now) {
    replace_recipe(&before, now);
    replace_model_init_recipe(&before, now);
  });

  m.def("enter_autocast", &enter, py::arg("enabled"), py::arg("calibrating"), py::arg("recipe"),
        py::arg("reduce_amax"), py::arg("only_where_faster"));
  m.def("exit_autocast", py::overload_cast<bool>(&exit_autocast), py::arg("update"), NoGil());
  m.def("autocast_state", &state_now);
  py::class_<AutocastState>(m, "AutocastState");
  m.def("capture_autocast", [] { return autocast_state(); });
  m.def("is_recomputing", &is_recomputing);
  py::class_<Recomputation>(m, "RecomputeScope")
      .def(py::init<const AutocastState&>())
      .def("exit", &Recomputation::exit);
}

}  // namespace ligature::python
