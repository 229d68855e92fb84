#include "ligature/recipes/recipe.h"

#include <array>
#include <atomic>
#include <charconv>
#include <map>

#include "ligature/check.h"

namespace ligature {

// ---- enumerations as data

const char* fp8_format_name(Fp8Format format) {
  LIGATURE_CHECK(format >= Fp8Format::E4M3 && format <= Fp8Format::Hybrid,
                 "fp8_format must be E4M3, E5M2 or Hybrid, got number ", static_cast<int>(format));
  return format == Fp8Format::E4M3 ? "E4M3" : format == Fp8Format::E5M2 ? "E5M2" : "HYBRID";
}

PlainValue to_plain(Fp8Format format) { return std::string(fp8_format_name(format)); }

void from_plain(const std::string& what, const PlainValue& plain, Fp8Format& format) {
  std::string name;
  detail::from_plain(what, plain, name);
  for (const auto known : {Fp8Format::E4M3, Fp8Format::E5M2, Fp8Format::Hybrid}) {
    if (name != fp8_format_name(known)) continue;
    format = known;
    return;
  }
  LIGATURE_CHECK(false, what, " must be 'E4M3', 'E5M2' or 'HYBRID', got '", name, "'");
}

const char* backward_override_name(BackwardOverride override_) {
  return override_ == BackwardOverride::None            ? ""
         : override_ == BackwardOverride::HighPrecision ? "high_precision"
                                                        : "dequantized";
}

PlainValue to_plain(BackwardOverride override_) {
  if (override_ == BackwardOverride::None) return {};
  return std::string(backward_override_name(override_));
}

void from_plain(const std::string& what, const PlainValue& plain, BackwardOverride& override_) {
  for (const auto known :
       {BackwardOverride::None, BackwardOverride::HighPrecision, BackwardOverride::Dequantized}) {
    if (plain != to_plain(known)) continue;
    override_ = known;
    return;
  }
  LIGATURE_CHECK(false, what, " must be None, 'high_precision' or 'dequantized', got ",
                 to_string(plain));
}

// ---- roles

namespace {

bool is_gradient(const QuantizerRole& role) { return role.tensor_type.starts_with("grad"); }
bool is_weight(const QuantizerRole& role) { return role.tensor_type == "weight"; }

Element element_of(Fp8Format format, const QuantizerRole& role) {
  if (format == Fp8Format::Hybrid) return is_gradient(role) ? Element::E5M2 : Element::E4M3;
  return format == Fp8Format::E5M2 ? Element::E5M2 : Element::E4M3;
}

template <class Options>
const Fp8RoleParams& fp8_params(const Options& options, const QuantizerRole& role) {
  return is_weight(role)     ? options.fp8_quant_fwd_weight
         : is_gradient(role) ? options.fp8_quant_bwd_grad
                             : options.fp8_quant_fwd_inp;
}

}  // namespace

void Fp8RoleParams::apply_to(Format& format) const {
  format.power_of_2_scales = power_2_scale.value_or(format.power_of_2_scales);
  format.amax_epsilon = amax_epsilon.value_or(format.amax_epsilon);
}

void Fp4RoleParams::apply_to(Format& format) const {
  format.hadamard = random_hadamard_transform.value_or(format.hadamard);
  format.stochastic_rounding = stochastic_rounding.value_or(format.stochastic_rounding);
  format.block_2d = fp4_2d_quantization.value_or(format.block_2d);
}

// ---- Recipe

namespace {

std::string exact(const PlainValue& value) {
  const double* real = std::get_if<double>(&value);
  if (real == nullptr) return to_string(value);
  std::array<char, 32> digits;
  return {digits.data(), std::to_chars(digits.begin(), digits.end(), *real).ptr};
}

}  // namespace

std::string Recipe::key_from(const std::string& name, const PlainState& fields) {
  std::string out;
  for (const auto& [field, value] : fields) {
    out += (out.empty() ? "" : ", ") + field + "=" + exact(value);
  }
  return name + "(" + out + ")";
}

void Recipe::check_formats() const {
  for (const char* tensor : {"input", "weight", "grad_output"}) {
    make_quantizer({"linear", tensor, ""}, at::kCPU);
  }
}

// ---- recipes by name

namespace {

struct RecipeEntry {
  PlainState defaults;
  RecipeFactory make;
};

std::map<std::string, RecipeEntry>& entries() {
  static std::map<std::string, RecipeEntry> all;
  return all;
}

const RecipeEntry& entry_of(const std::string& name) {
  const auto found = entries().find(name);
  LIGATURE_CHECK(found != entries().end(), "there is no recipe named '", name, "'");
  return found->second;
}

}  // namespace

bool register_recipe(std::string name, PlainState defaults, RecipeFactory factory) {
  return entries()
      .emplace(std::move(name), RecipeEntry{std::move(defaults), std::move(factory)})
      .second;
}

std::shared_ptr<Recipe> make_recipe(const std::string& name, const PlainState& fields) {
  return entry_of(name).make(fields);
}

const PlainState& recipe_fields(const std::string& name) { return entry_of(name).defaults; }

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries()) names.push_back(name);
  return names;
}

// ---- DelayedScaling

LIGATURE_REGISTER_RECIPE(DelayedScaling);

namespace {

// The name of an algorithm that a function stands in for tells nothing apart.
DelayedScalingOptions normalized(DelayedScalingOptions options) {
  if (options.amax_function) options.amax_compute_algo = "function";
  return options;
}

}  // namespace

DelayedScaling::DelayedScaling(Options given)
    : RecipeOf("DelayedScaling", normalized(std::move(given))) {
  LIGATURE_CHECK(options.amax_history_len > 0,
                 "[DelayedScaling] amax_history_len must be positive, got ",
                 options.amax_history_len);
  LIGATURE_CHECK(options.amax_function || options.amax_compute_algo == "max" ||
                     options.amax_compute_algo == "most_recent",
                 "[DelayedScaling] amax_compute_algo must be 'max', 'most_recent' or a function, "
                 "got '",
                 options.amax_compute_algo, "'");
  plan_key_ = key_;
  key_ += options.functions_key;
}

std::shared_ptr<Quantizer> DelayedScaling::make_quantizer(const QuantizerRole& role,
                                                          at::Device device) const {
  auto made = make_delayed_quantizer(element_of(options.fp8_format, role), options.amax_history_len,
                                     device);
  made->delayed->recipe = std::static_pointer_cast<const DelayedScaling>(shared_from_this());
  return made;
}

// ---- Float8CurrentScaling

LIGATURE_REGISTER_RECIPE(Float8CurrentScaling);

Float8CurrentScaling::Float8CurrentScaling(Options given)
    : RecipeOf("Float8CurrentScaling", std::move(given)) {
  check_formats();
}

std::shared_ptr<Quantizer> Float8CurrentScaling::make_quantizer(const QuantizerRole& role,
                                                                at::Device) const {
  Format format;
  format.scaling = Scaling::Current;
  format.element = element_of(options.fp8_format, role);
  format.power_of_2_scales = options.use_power_2_scales;
  format.amax_epsilon = options.amax_epsilon;
  fp8_params(options, role).apply_to(format);
  return std::make_shared<Quantizer>(format);
}

// ---- Float8BlockScaling

LIGATURE_REGISTER_RECIPE(Float8BlockScaling);

namespace {

void check_block_dim(const char* what, int64_t dim) {
  LIGATURE_CHECK(dim == 1 || dim == 2, "[Float8BlockScaling] ", what, " must be 1 or 2, got ", dim);
}

}  // namespace

Float8BlockScaling::Float8BlockScaling(Options given)
    : RecipeOf("Float8BlockScaling", std::move(given)) {
  check_block_dim("x_block_scaling_dim", options.x_block_scaling_dim);
  check_block_dim("w_block_scaling_dim", options.w_block_scaling_dim);
  check_block_dim("grad_block_scaling_dim", options.grad_block_scaling_dim);
  LIGATURE_CHECK(options.x_block_scaling_dim == 1 || options.w_block_scaling_dim == 1 ||
                     options.grad_block_scaling_dim == 1,
                 "[Float8BlockScaling] one operand of a product has blocks of 1x128");
  check_formats();
}

std::shared_ptr<Quantizer> Float8BlockScaling::make_quantizer(const QuantizerRole& role,
                                                              at::Device) const {
  Format format;
  format.scaling = Scaling::Block;
  format.element = element_of(options.fp8_format, role);
  format.power_of_2_scales = !options.use_f32_scales;
  format.amax_epsilon = options.amax_epsilon;
  const int64_t dim = is_weight(role)     ? options.w_block_scaling_dim
                      : is_gradient(role) ? options.grad_block_scaling_dim
                                          : options.x_block_scaling_dim;
  format.block_2d = dim == 2;
  fp8_params(options, role).apply_to(format);
  return std::make_shared<Quantizer>(format);
}

// ---- MXFP8BlockScaling

LIGATURE_REGISTER_RECIPE(MXFP8BlockScaling);

MXFP8BlockScaling::MXFP8BlockScaling(Options given)
    : RecipeOf("MXFP8BlockScaling", std::move(given)) {
  check_formats();
}

std::shared_ptr<Quantizer> MXFP8BlockScaling::make_quantizer(const QuantizerRole& role,
                                                             at::Device) const {
  Format format;
  format.scaling = Scaling::MX;
  format.element = element_of(options.fp8_format, role);
  format.block_2d = options.enable_2d_quantization && is_weight(role);
  return std::make_shared<Quantizer>(format);
}

// ---- NVFP4BlockScaling

LIGATURE_REGISTER_RECIPE(NVFP4BlockScaling);

namespace {

void check_scope(const char* what, const std::string& where) {
  LIGATURE_CHECK(where == "none" || where == "weights" || where == "activations" || where == "all",
                 "[NVFP4BlockScaling] ", what,
                 " must be 'none', 'weights', 'activations' or 'all', got '", where, "'");
}

bool is_in_scope(const std::string& where, const QuantizerRole& role) {
  if (is_gradient(role)) return false;
  return where == "all" || where == (is_weight(role) ? "weights" : "activations");
}

}  // namespace

NVFP4BlockScaling::NVFP4BlockScaling(Options given)
    : RecipeOf("NVFP4BlockScaling", std::move(given)) {
  check_scope("nvfp4_4over6", options.nvfp4_4over6);
  check_scope("nvfp4_4over6_e4m3_use_256", options.nvfp4_4over6_e4m3_use_256);
  LIGATURE_CHECK(options.nvfp4_4over6_err_mode == "MAE" || options.nvfp4_4over6_err_mode == "MSE",
                 "[NVFP4BlockScaling] nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got '",
                 options.nvfp4_4over6_err_mode, "'");
  check_formats();
}

std::shared_ptr<Quantizer> NVFP4BlockScaling::make_quantizer(const QuantizerRole& role,
                                                             at::Device) const {
  Format format;
  format.scaling = Scaling::NV;
  format.element = Element::E2M1;
  const bool weight = is_weight(role);
  const bool gradient = is_gradient(role);
  format.block_2d = weight && !options.disable_2d_quantization;
  format.hadamard = !weight && !options.disable_rht;
  format.stochastic_rounding = gradient && !options.disable_stochastic_rounding;
  format.row_scaled = !weight && !gradient && options.row_scaled_activation;
  if (is_in_scope(options.nvfp4_4over6, role)) {
    format.four_over_six = options.nvfp4_4over6_err_mode == "MAE" ? FourOverSix::MeanAbsolute
                                                                  : FourOverSix::MeanSquare;
    format.scales_to_448 = !is_in_scope(options.nvfp4_4over6_e4m3_use_256, role);
  }
  const Fp4RoleParams& own = weight     ? options.fp4_quant_fwd_weight
                             : gradient ? options.fp4_quant_bwd_grad
                                        : options.fp4_quant_fwd_inp;
  own.apply_to(format);
  return std::make_shared<Quantizer>(format);
}

// ---- CustomRecipe

LIGATURE_REGISTER_RECIPE(CustomRecipe);

namespace {

CustomRecipeOptions normalized(CustomRecipeOptions options) {
  static std::atomic<uint64_t> made{0};
  if (options.factory_key.empty()) options.factory_key = std::to_string(++made);
  return options;
}

}  // namespace

CustomRecipe::CustomRecipe(Options given) : RecipeOf("CustomRecipe", normalized(std::move(given))) {
  LIGATURE_CHECK(options.factory != nullptr,
                 "[CustomRecipe] qfactory must be a function, got none");
}

std::shared_ptr<Quantizer> CustomRecipe::make_quantizer(const QuantizerRole& role,
                                                        at::Device) const {
  return options.factory(role);
}

}  // namespace ligature
