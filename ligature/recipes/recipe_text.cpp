#include "ligature/recipes/recipe_text.h"

#include "ligature/check.h"

namespace ligature {
namespace {

constexpr std::array<const char*, 7> kFields = {
    "amax_compute_algo", "amax_history_len",           "fp8_format", "margin", "recipe",
    "reduce_amax",       "scaling_factor_compute_algo"};
// Only where a key is not made of the functions' own: "amax:..." and "scale:...", in this order.
constexpr const char* kKey = "functions_key";

struct FunctionKeys {
  std::string amax, scale;
  std::string joined() const {
    return (amax.empty() ? "" : "amax:" + amax) + (amax.empty() || scale.empty() ? "" : ";") +
           (scale.empty() ? "" : "scale:" + scale);
  }
};

FunctionKeys split(const DelayedScalingOptions& options) {
  FunctionKeys keys;
  std::string rest = options.functions_key;
  const bool amax = static_cast<bool>(options.amax_function);
  if (options.scale_function) {
    const size_t at = rest.rfind("scale:");
    if (at != std::string::npos) {
      keys.scale = rest.substr(at + 6);
      rest = rest.substr(0, at > 0 ? at - 1 : 0);
    }
  }
  if (amax && rest.starts_with("amax:")) keys.amax = rest.substr(5);
  if (keys.joined() == options.functions_key) return keys;
  return {amax ? options.functions_key : "", options.scale_function ? options.functions_key : ""};
}

JsonValue text(std::string value) { return {std::move(value)}; }
JsonValue function(const std::string& key) { return {JsonValue::Object{{"function", text(key)}}}; }

template <class T>
T field(const JsonValue& about, const char* name, const char* wanted) {
  const T* value = about[name].get<T>();
  LIGATURE_CHECK_TYPE(value != nullptr, "[DelayedScaling] ", name, " must be ", wanted, ", got ",
                      to_string(about[name]));
  return *value;
}

/// The key of a function; empty where there is none.
std::string function_key(const JsonValue& about, const char* name) {
  const JsonValue& value = about[name];
  if (value.get<JsonValue::Object>() == nullptr) return "";
  const std::string* key = value["function"].get<std::string>();
  LIGATURE_CHECK(key != nullptr && !key->empty(), name, " must name a function, got ",
                 to_string(value));
  return *key;
}

template <class... Args>
std::function<at::Tensor(Args...)> unknown(const std::string& key) {
  return [key](Args...) -> at::Tensor {
    LIGATURE_CHECK_STATE(false, "[DelayedScaling] recipe state was loaded for the function '", key,
                         "', which no recipe has brought");
  };
}

}  // namespace

std::optional<JsonValue> description_of(const Recipe& recipe) {
  const auto* delayed = dynamic_cast<const DelayedScaling*>(&recipe);
  if (delayed == nullptr) return std::nullopt;
  const DelayedScalingOptions& options = delayed->options;
  JsonValue::Object about;
  about["recipe"] = text("DelayedScaling");
  about["fp8_format"] = text(fp8_format_name(options.fp8_format));
  about["margin"].value = options.margin;
  about["amax_history_len"].value = options.amax_history_len;
  about["reduce_amax"].value = options.reduce_amax;
  about["amax_compute_algo"] = text(options.amax_compute_algo);
  about["scaling_factor_compute_algo"];
  if (options.amax_function || options.scale_function) {
    // A '#' marks the key of a function that only this process has.
    if (options.functions_key.empty() || options.functions_key.find('#') != std::string::npos) {
      return std::nullopt;
    }
    const FunctionKeys keys = split(options);
    if (options.amax_function) about["amax_compute_algo"] = function(keys.amax);
    if (options.scale_function) about["scaling_factor_compute_algo"] = function(keys.scale);
    if (keys.joined() != options.functions_key) about[kKey] = text(options.functions_key);
  }
  return JsonValue{std::move(about)};
}

std::shared_ptr<DelayedScaling> delayed_from_description(const JsonValue& about) {
  const auto* fields = about.get<JsonValue::Object>();
  const bool keyed = fields != nullptr && fields->contains(kKey);
  bool all = fields != nullptr && fields->size() == kFields.size() + (keyed ? 1 : 0) &&
             to_string(about["recipe"]) == "DelayedScaling";
  std::string names;
  for (const char* name : kFields) {
    all = all && fields->contains(name);
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  LIGATURE_CHECK(all, "wanted DelayedScaling with ", names, ", got ", to_string(about));

  DelayedScalingOptions options;
  const std::string format = to_string(about["fp8_format"]);
  bool known = false;
  for (const Fp8Format one : {Fp8Format::E4M3, Fp8Format::E5M2, Fp8Format::Hybrid}) {
    if (format != fp8_format_name(one)) continue;
    options.fp8_format = one;
    known = true;
  }
  LIGATURE_CHECK(known, "fp8_format must be the name of a Format, got '", format, "'");
  options.margin = field<int64_t>(about, "margin", "an int");
  options.amax_history_len = field<int64_t>(about, "amax_history_len", "an int");
  options.reduce_amax = field<bool>(about, "reduce_amax", "a bool");

  const FunctionKeys keys{function_key(about, "amax_compute_algo"),
                          function_key(about, "scaling_factor_compute_algo")};
  if (keys.amax.empty()) {
    options.amax_compute_algo = field<std::string>(about, "amax_compute_algo", "a name");
  } else {
    options.amax_function = unknown<const at::Tensor&>(keys.amax);
  }
  if (!keys.scale.empty()) {
    options.scale_function = unknown<const at::Tensor&, const at::Tensor&, double>(keys.scale);
  } else {
    LIGATURE_CHECK_TYPE(about["scaling_factor_compute_algo"].is_null(),
                        "[DelayedScaling] scaling_factor_compute_algo must be a function or None, "
                        "got ",
                        to_string(about["scaling_factor_compute_algo"]));
  }
  options.functions_key = keyed ? field<std::string>(about, kKey, "a name") : keys.joined();
  return std::make_shared<DelayedScaling>(std::move(options));
}

}  // namespace ligature
