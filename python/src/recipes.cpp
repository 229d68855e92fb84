// Recipes, autocast and recomputation in Python. A recipe's fields live in its Python object; here
// its twin is made from them.
#include "recipes.h"

#include <array>

#include "bindings.h"
#include "guest.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/model_init.h"
#include "quantized.h"

namespace ligature::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T>
void take(const py::dict& options, const char* name, T& to) {
  if (options.contains(name)) to = options[name].cast<T>();
}

void take(const py::dict& options, SplitAccumulation& to) {
  take(options, "fp8_gemm_fprop", to.forward);
  take(options, "fp8_gemm_dgrad", to.input_grad);
  take(options, "fp8_gemm_wgrad", to.weight_grad);
}

BackwardOverride backward_override(const std::string& recipe, const py::dict& options) {
  std::string name;
  take(options, "backward_override", name);
  return backward_override_from(recipe, name);
}

Fp8Format fp8_format(const py::dict& options) {
  const auto name = options["fp8_format"].cast<std::string>();
  return name == "E4M3" ? Fp8Format::E4M3 : name == "E5M2" ? Fp8Format::E5M2 : Fp8Format::Hybrid;
}

// ---- roles with settings of their own

/// What a user set for one role; fields that were not set stay those of the recipe.
struct RoleSettings {
  std::optional<bool> power_of_2_scales, hadamard, stochastic_rounding, block_2d;
  std::optional<float> amax_epsilon;

  explicit RoleSettings(const py::dict& given) {
    take(given, "power_of_2_scales", power_of_2_scales);
    take(given, "hadamard", hadamard);
    take(given, "stochastic_rounding", stochastic_rounding);
    take(given, "block_2d", block_2d);
    take(given, "amax_epsilon", amax_epsilon);
  }

  Format apply(Format format) const {
    format.power_of_2_scales = power_of_2_scales.value_or(format.power_of_2_scales);
    format.hadamard = hadamard.value_or(format.hadamard);
    format.stochastic_rounding = stochastic_rounding.value_or(format.stochastic_rounding);
    format.block_2d = block_2d.value_or(format.block_2d);
    format.amax_epsilon = amax_epsilon.value_or(format.amax_epsilon);
    return format;
  }

  std::string key() const {
    std::ostringstream out;
    const auto add = [&](const auto& value) {
      if (value) out << *value;
      out << ",";
    };
    add(power_of_2_scales);
    add(hadamard);
    add(stochastic_rounding);
    add(block_2d);
    add(amax_epsilon);
    return out.str();
  }
};

constexpr std::array<const char*, 3> kRoles = {"input", "weight", "grad_output"};

/// A recipe some of whose roles have settings of their own.
template <class Base>
class WithRoles : public Base {
 public:
  template <class Options>
  WithRoles(Options own, const py::dict& given) : Base(std::move(own)) {
    for (size_t i = 0; i < kRoles.size(); ++i) {
      if (!given.contains(kRoles[i])) continue;
      settings_[i].emplace(given[kRoles[i]].cast<py::dict>());
      this->key_ += std::string(kRoles[i]) + "(" + settings_[i]->key() + ")";
    }
  }

  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override {
    auto made = Base::make_quantizer(role, device);
    const auto& own = settings_[role.tensor_type == "weight"           ? 1
                                : role.tensor_type.starts_with("grad") ? 2
                                                                       : 0];
    return own ? std::make_shared<Quantizer>(own->apply(made->format_tag())) : made;
  }

 private:
  std::array<std::optional<RoleSettings>, 3> settings_;
};

// ---- recipes

/// Keeps with it what it was made from: (a weak reference to the Python object, its class, fields).
template <class R>
std::shared_ptr<R> with_host(std::unique_ptr<R> recipe, const std::shared_ptr<void>& host) {
  recipe->host = host.get();
  return std::shared_ptr<R>(recipe.release(), [host](R* raw) { delete raw; });
}

using MaybeRecipe = std::shared_ptr<std::weak_ptr<Recipe>>;

Tensor one_value(const py::object& result, const char* what) {
  Tensor value = unwrap(result, std::string("[DelayedScaling] what ") + what + " returns");
  LIGATURE_CHECK(value.defined() && value.numel() == 1, "[DelayedScaling] ", what,
                 " must give one value, got ",
                 value.defined() ? sizes_string(value.sizes()) : std::string("None"));
  return value.detach().to(at::kFloat).reshape({1});
}

DelayedScalingOptions delayed_options(const py::dict& given, const MaybeRecipe& self) {
  DelayedScalingOptions options;
  take(given, "margin", options.margin);
  options.fp8_format = fp8_format(given);
  take(given, "amax_history_len", options.amax_history_len);
  take(given, "amax_compute_algo", options.amax_compute_algo);
  take(given, "reduce_amax", options.reduce_amax);
  take(given, "functions_key", options.functions_key);
  if (given.contains("amax_function")) {
    auto keep = hold(given["amax_function"]);
    options.amax_function = [keep](const Tensor& history) {
      return with_python([&] {
        return one_value(held(keep)(wrap(history.clone().unsqueeze(1))), "amax_compute_algo");
      });
    };
  }
  if (given.contains("scale_function")) {
    auto keep = hold(given["scale_function"]);
    options.scale_function = [keep, self](const Tensor& amax, const Tensor& scale,
                                          double max_value) {
      return with_python([&] {
        return one_value(held(keep)(wrap(amax.clone()), wrap(scale.clone()), max_value,
                                    python_of(RecipePtr(self->lock()))),
                         "scaling_factor_compute_algo");
      });
    };
  }
  return options;
}

CustomRecipe::Factory factory_from(const py::dict& given) {
  auto keep = hold(given["qfactory"]);
  return [keep](const QuantizerRole& role) {
    return with_python([&]() -> std::shared_ptr<Quantizer> {
      const py::object made = held(keep)(python_of(role));
      LIGATURE_CHECK_TYPE(made.is_none() || quantizer_behind(made) != nullptr,
                          "[CustomRecipe] qfactory must return a Quantizer or None, got ",
                          py::str(py::type::of(made)).cast<std::string>());
      return quantizer_from(made);
    });
  };
}

std::unique_ptr<Recipe> make_plain_recipe(const std::string& name, const py::dict& given,
                                          const MaybeRecipe& self) {
  if (name == "DelayedScaling") {
    return std::make_unique<DelayedScaling>(delayed_options(given, self));
  }
  if (name == "Float8CurrentScaling") {
    Float8CurrentScalingOptions options;
    options.fp8_format = fp8_format(given);
    take(given, "use_power_2_scales", options.use_power_2_scales);
    take(given, options.split_accumulation);
    options.backward_override = backward_override(name, given);
    return std::make_unique<WithRoles<Float8CurrentScaling>>(options, given);
  }
  if (name == "Float8BlockScaling") {
    Float8BlockScalingOptions options;
    options.fp8_format = fp8_format(given);
    take(given, "use_f32_scales", options.use_f32_scales);
    take(given, "x_block_scaling_dim", options.x_block_scaling_dim);
    take(given, "w_block_scaling_dim", options.w_block_scaling_dim);
    take(given, "grad_block_scaling_dim", options.grad_block_scaling_dim);
    take(given, options.split_accumulation);
    options.backward_override = backward_override(name, given);
    return std::make_unique<WithRoles<Float8BlockScaling>>(options, given);
  }
  if (name == "MXFP8BlockScaling") {
    MXFP8BlockScalingOptions options;
    options.fp8_format = fp8_format(given);
    take(given, "enable_2d_quantization", options.enable_2d_quantization);
    options.backward_override = backward_override(name, given);
    return std::make_unique<MXFP8BlockScaling>(options);
  }
  if (name == "NVFP4BlockScaling") {
    NVFP4BlockScalingOptions options;
    take(given, "disable_rht", options.disable_rht);
    take(given, "disable_stochastic_rounding", options.disable_stochastic_rounding);
    take(given, "disable_2d_quantization", options.disable_2d_quantization);
    take(given, "row_scaled_activation", options.row_scaled_activation);
    take(given, "nvfp4_4over6", options.nvfp4_4over6);
    take(given, "nvfp4_4over6_e4m3_use_256", options.nvfp4_4over6_e4m3_use_256);
    take(given, "nvfp4_4over6_err_mode", options.nvfp4_4over6_err_mode);
    options.backward_override = backward_override(name, given);
    return std::make_unique<WithRoles<NVFP4BlockScaling>>(options, given);
  }
  LIGATURE_CHECK_TYPE(name == "CustomRecipe", name, " is not a recipe of Ligature's");
  return std::make_unique<CustomRecipe>(factory_from(given),
                                        given["factory_key"].cast<std::string>(),
                                        backward_override(name, given));
}

std::shared_ptr<Recipe> make_recipe(const std::string& name, const py::dict& given,
                                    const py::tuple& host) {
  auto self = std::make_shared<std::weak_ptr<Recipe>>();
  auto made = with_host(make_plain_recipe(name, given, self), hold(host));
  *self = made;
  // A format that cannot be is refused here, not in the first call.
  if (name != "CustomRecipe" && name != "DelayedScaling") {
    for (const char* role : kRoles) made->make_quantizer({"linear", role, ""}, at::kCPU);
  }
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
  if (recipe == nullptr || recipe->host == nullptr) return py::none();
  return py::module_::import("ligature.quantization.recipe_base")
      .attr("object_of")(py::handle(static_cast<PyObject*>(recipe->host)),
                         std::const_pointer_cast<Recipe>(recipe));
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
  auto both = std::make_shared<std::pair<std::shared_ptr<Quantizer>, std::shared_ptr<void>>>(
      behind, hold(object));
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
  m.def("make_recipe", &make_recipe, py::arg("name"), py::arg("options"), py::arg("host"));
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
