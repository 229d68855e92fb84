#include "ligature/recipes/recipe_text.h"

#include <set>

#include "ligature/check.h"

namespace ligature {
namespace {

constexpr const char* kRecipe = "DelayedScaling";
constexpr const char* kAmax = "amax_compute_algo";
constexpr const char* kScale = "scaling_factor_compute_algo";
// Only where a key is not made of the functions' own: "amax:..." and "scale:...", in this order.
constexpr const char* kKey = "functions_key";

/// What a description has: the fields, and what is none because it may be a function.
std::set<std::string> described() {
  std::set<std::string> names{"recipe", kScale};
  const std::string recipe = kRecipe;
  for (const auto& [name, value] : recipe_fields(recipe)) names.insert(name);
  return names;
}

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

JsonValue to_json_value(const PlainValue& plain) {
  if (const auto* flag = std::get_if<bool>(&plain)) return {*flag};
  if (const auto* number = std::get_if<int64_t>(&plain)) return {*number};
  return text(std::get<std::string>(plain));
}

/// The entry of a description for this field.
PlainValue plain_entry(const JsonValue& about, const std::string& name, const PlainValue& like) {
  const JsonValue& given = about[name];
  const auto check = [&](bool good, const char* wanted) {
    LIGATURE_CHECK_TYPE(good, "[DelayedScaling] ", name, " must be ", wanted, ", got ",
                        to_string(given));
  };
  if (std::holds_alternative<bool>(like)) {
    check(given.get<bool>() != nullptr, "a bool");
    return *given.get<bool>();
  }
  if (std::holds_alternative<int64_t>(like)) {
    check(given.get<int64_t>() != nullptr, "an int");
    return *given.get<int64_t>();
  }
  check(given.get<std::string>() != nullptr, "a name");
  return *given.get<std::string>();
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
  about["recipe"] = text(kRecipe);
  for (const auto& [name, value] : delayed->options_state()) about[name] = to_json_value(value);
  about[kScale];
  if (options.amax_function || options.scale_function) {
    // A '#' marks the key of a function that only this process has.
    if (options.functions_key.empty() || options.functions_key.find('#') != std::string::npos) {
      return std::nullopt;
    }
    const FunctionKeys keys = split(options);
    if (options.amax_function) about[kAmax] = function(keys.amax);
    if (options.scale_function) about[kScale] = function(keys.scale);
    if (keys.joined() != options.functions_key) about[kKey] = text(options.functions_key);
  }
  return JsonValue{std::move(about)};
}

std::shared_ptr<DelayedScaling> delayed_from_description(const JsonValue& about) {
  const auto* entries = about.get<JsonValue::Object>();
  const bool keyed = entries != nullptr && entries->contains(kKey);
  const std::set<std::string> wanted = described();
  bool all = entries != nullptr && entries->size() == wanted.size() + (keyed ? 1 : 0) &&
             to_string(about["recipe"]) == kRecipe;
  std::string names;
  for (const std::string& name : wanted) {
    all = all && entries->contains(name);
    names += (names.empty() ? "" : ", ") + name;
  }
  LIGATURE_CHECK(all, "wanted DelayedScaling with ", names, ", got ", to_string(about));

  const std::string format = to_string(about["fp8_format"]);
  bool known = false;
  for (const Fp8Format one : {Fp8Format::E4M3, Fp8Format::E5M2, Fp8Format::Hybrid}) {
    known = known || format == fp8_format_name(one);
  }
  LIGATURE_CHECK(known, "fp8_format must be the name of a Format, got '", format, "'");

  const FunctionKeys keys{function_key(about, kAmax), function_key(about, kScale)};
  PlainState fields;
  const std::string recipe = kRecipe;
  for (const auto& [name, value] : recipe_fields(recipe)) {
    if (name != kAmax || keys.amax.empty()) fields.set(name, plain_entry(about, name, value));
  }
  auto options = options_from_state<DelayedScalingOptions>(fields, kRecipe);
  if (!keys.amax.empty()) options.amax_function = unknown<const at::Tensor&>(keys.amax);
  if (!keys.scale.empty()) {
    options.scale_function = unknown<const at::Tensor&, const at::Tensor&, double>(keys.scale);
  } else {
    LIGATURE_CHECK_TYPE(about[kScale].is_null(), "[DelayedScaling] ", kScale,
                        " must be a function or None, got ", to_string(about[kScale]));
  }
  options.functions_key =
      keyed ? std::get<std::string>(plain_entry(about, kKey, std::string())) : keys.joined();
  return std::make_shared<DelayedScaling>(std::move(options));
}

}  // namespace ligature
