#include "ligature/base/json_value.h"

#include <algorithm>
#include <charconv>

#include "ligature/base/json.h"

namespace ligature {
namespace {

constexpr int kDeepest = 8;

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    if (first < 0x80) continue;
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4) return false;
    unsigned code = first & (0x3F >> more);
    for (int k = 0; k < more; ++k) {
      if (i >= text.size() || (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return false;
      code = code << 6 | (static_cast<unsigned char>(text[i++]) & 0x3F);
    }
    const bool shortest = code >= (more == 1 ? 0x80u : more == 2 ? 0x800u : 0x10000u);
    if (!shortest || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
  }
  return true;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  std::optional<JsonValue> whole() {
    JsonValue out;
    if (!value(out, 0)) return std::nullopt;
    skip();
    return at_ == text_.size() ? std::optional(std::move(out)) : std::nullopt;
  }

 private:
  void skip() {
    while (at_ < text_.size() &&
           std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos)
      ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool word(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  bool value(JsonValue& out, int depth) {
    skip();
    if (at_ >= text_.size() || depth > kDeepest) return false;
    switch (text_[at_]) {
      case '{':
        return object(out.value.emplace<JsonValue::Object>(), depth);
      case '[':
        return array(out.value.emplace<JsonValue::Array>(), depth);
      case '"':
        return string(out.value.emplace<std::string>());
      case 't':
        out.value = true;
        return word("true");
      case 'f':
        out.value = false;
        return word("false");
      case 'n':
        return word("null");
      default:
        return number(out);
    }
  }

  bool object(JsonValue::Object& out, int depth) {
    if (!take('{')) return false;
    if (take('}')) return true;
    do {
      std::string name;
      skip();
      if (!string(name) || !take(':') || !value(out[name], depth + 1)) return false;
    } while (take(','));
    return take('}');
  }

  bool array(JsonValue::Array& out, int depth) {
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      if (!value(out.emplace_back(), depth + 1)) return false;
    } while (take(','));
    return take(']');
  }

  bool string(std::string& out) {
    if (at_ >= text_.size() || text_[at_++] != '"') return false;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '"') return true;
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c != '\\') {
        out += c;
      } else if (!escaped(out)) {
        return false;
      }
    }
    return false;
  }

  bool escaped(std::string& out) {
    if (at_ >= text_.size()) return false;
    static constexpr std::string_view names = "\"\\/bfnrt";
    static constexpr std::string_view meant = "\"\\/\b\f\n\r\t";
    const char c = text_[at_++];
    if (const size_t i = names.find(c); i != std::string_view::npos) {
      out += meant[i];
      return true;
    }
    unsigned code = 0;
    const std::string_view digits = text_.substr(at_, 4);
    if (c != 'u' || digits.size() != 4) return false;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + 4, code, 16);
    if (error != std::errc() || end != digits.data() + 4 || (code >= 0xD800 && code < 0xE000)) {
      return false;
    }
    at_ += 4;
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else {
      if (code < 0x800) {
        out += static_cast<char>(0xC0 | code >> 6);
      } else {
        out += static_cast<char>(0xE0 | code >> 12);
        out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
      }
      out += static_cast<char>(0x80 | (code & 0x3F));
    }
    return true;
  }

  bool number(JsonValue& out) {
    const size_t end = std::min(text_.find_first_not_of("+-.0123456789eE", at_), text_.size());
    const std::string_view digits = text_.substr(at_, end - at_);
    const char* first = digits.data();
    const char* last = first + digits.size();
    int64_t integer = 0;
    if (const auto read = std::from_chars(first, last, integer);
        read.ec == std::errc() && read.ptr == last) {
      out.value = integer;
    } else {
      double real = 0;
      const auto as_real = std::from_chars(first, last, real);
      if (as_real.ec != std::errc() || as_real.ptr != last) return false;
      out.value = real;
    }
    at_ = end;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const JsonValue& JsonValue::operator[](const std::string& name) const {
  static const JsonValue none;
  const Object* object = get<Object>();
  if (object == nullptr) return none;
  const auto found = object->find(name);
  return found == object->end() ? none : found->second;
}

std::optional<JsonValue> parse_json(std::string_view text) {
  return is_utf8(text) ? Parser(text).whole() : std::nullopt;
}

namespace {

void write(JsonWriter& out, const JsonValue& json) {
  struct Writer {
    JsonWriter& out;
    void operator()(std::monostate) { out.null(); }
    void operator()(bool v) { out.value(v); }
    void operator()(int64_t v) { out.value(v); }
    void operator()(double v) { out.value(v); }
    void operator()(const std::string& v) { out.value(v); }
    void operator()(const JsonValue::Array& v) {
      out.begin_array();
      for (const JsonValue& item : v) write(out, item);
      out.end_array();
    }
    void operator()(const JsonValue::Object& v) {
      out.begin_object();
      for (const auto& [name, item] : v) write(out.key(name), item);
      out.end_object();
    }
  };
  std::visit(Writer{out}, json.value);
}

}  // namespace

std::string to_json(const JsonValue& value) {
  JsonWriter writer(-1);
  write(writer, value);
  return writer.take();
}

std::string to_string(const JsonValue& json) {
  if (const auto* text = json.get<std::string>()) return *text;
  if (json.is_null()) return "None";
  std::string text = to_json(json);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ',') text.insert(++i, " ");
  }
  return text;
}

}  // namespace ligature
