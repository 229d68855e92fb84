// JSON as a value, read and written; just what checkpoints need.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace ligature {

struct JsonValue {
  using Array = std::vector<JsonValue>;
  using Object = std::map<std::string, JsonValue>;
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> value;

  template <class T>
  const T* get() const {
    return std::get_if<T>(&value);
  }
  bool is_null() const { return std::holds_alternative<std::monostate>(value); }
  /// An entry of an object; null (as JSON has it) where there is none.
  const JsonValue& operator[](const std::string& name) const;
};

/// Nothing for text that is not JSON in UTF-8, or is nested deeper than any checkpoint's.
std::optional<JsonValue> parse_json(std::string_view text);
std::string to_json(const JsonValue& value);
/// As messages show it.
std::string to_string(const JsonValue& value);

}  // namespace ligature
