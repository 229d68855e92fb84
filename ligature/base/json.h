// Writes JSON; just what explanations and checkpoints need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ligature {

class JsonWriter {
 public:
  /// `indent` < 0: on one line.
  explicit JsonWriter(int indent) : indent_(indent) {}

  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name) {
    separate();
    write_string(name);
    out_ += indent_ < 0 ? ":" : ": ";
    after_key_ = true;
    return *this;
  }
  JsonWriter& value(std::string_view text) {
    separate();
    write_string(text);
    return *this;
  }
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag) { return raw(flag ? "true" : "false"); }
  JsonWriter& value(int64_t number) { return raw(std::to_string(number)); }
  JsonWriter& value(size_t number) { return raw(std::to_string(number)); }
  /// With as many digits as tell it apart from every other.
  JsonWriter& value(double number);
  JsonWriter& null() { return raw("null"); }
  /// null for an empty text.
  JsonWriter& value_or_null(const std::string& text) { return text.empty() ? null() : value(text); }
  template <class T>
  JsonWriter& array(const std::vector<T>& items) {
    begin_array();
    for (const T& item : items) value(item);
    return end_array();
  }

  std::string take() { return std::move(out_); }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  JsonWriter& raw(const std::string& text) {
    separate();
    out_ += text;
    return *this;
  }
  void separate();
  void new_line();
  void write_string(std::string_view text);

  std::string out_;
  int indent_;
  std::vector<bool> has_items_;
  bool after_key_ = false;
};

}  // namespace ligature
