#include "ligature/format/format_fields.h"

#include "ligature/check.h"

namespace ligature {
namespace {

template <class Enum>
using Names = std::vector<std::pair<const char*, Enum>>;

const Names<Scaling> scalings = {{"delayed", Scaling::Delayed},
                                 {"current", Scaling::Current},
                                 {"block", Scaling::Block},
                                 {"mx", Scaling::MX},
                                 {"nv", Scaling::NV}};
const Names<Element> elements = {
    {"e4m3", Element::E4M3}, {"e5m2", Element::E5M2}, {"e2m1", Element::E2M1}};
const Names<FourOverSix> choices = {{"none", FourOverSix::None},
                                    {"mean_absolute", FourOverSix::MeanAbsolute},
                                    {"mean_square", FourOverSix::MeanSquare}};

// Calls `f(name, field)` or `f(name, field, names)` for every field.
template <class F, class SomeFormat>
void each_field(SomeFormat& format, F&& f) {
  f("scaling", format.scaling, scalings);
  f("element", format.element, elements);
  f("block_2d", format.block_2d);
  f("power_of_2_scales", format.power_of_2_scales);
  f("amax_epsilon", format.amax_epsilon);
  f("hadamard", format.hadamard);
  f("stochastic_rounding", format.stochastic_rounding);
  f("row_scaled", format.row_scaled);
  f("four_over_six", format.four_over_six, choices);
  f("scales_to_448", format.scales_to_448);
}

struct Writer {
  JsonValue::Object& out;
  void operator()(const char* name, bool value) const { out[name].value = value; }
  void operator()(const char* name, float value) const {
    out[name].value = static_cast<double>(value);
  }
  template <class Enum>
  void operator()(const char* name, Enum value, const Names<Enum>& names) const {
    for (const auto& [text, known] : names) {
      if (known == value) out[name].value = std::string(text);
    }
  }
};

struct Reader {
  const std::string& wanted;
  const JsonValue& given;
  bool& found;

  void operator()(const char* name, bool& to) const {
    if (wanted != name) return;
    found = true;
    const bool* value = given.get<bool>();
    LIGATURE_CHECK_TYPE(value != nullptr, "a format's ", name, " must be True or False, got ",
                        to_string(given));
    to = *value;
  }
  void operator()(const char* name, float& to) const {
    if (wanted != name) return;
    found = true;
    const double* real = given.get<double>();
    const int64_t* integer = given.get<int64_t>();
    LIGATURE_CHECK_TYPE(real != nullptr || integer != nullptr, "a format's ", name,
                        " must be a number, got ", to_string(given));
    to = real != nullptr ? static_cast<float>(*real) : static_cast<float>(*integer);
  }
  template <class Enum>
  void operator()(const char* name, Enum& to, const Names<Enum>& names) const {
    if (wanted != name) return;
    found = true;
    const std::string* text = given.get<std::string>();
    LIGATURE_CHECK_TYPE(text != nullptr, "a format's ", name, " must be a name, got ",
                        to_string(given));
    for (const auto& [known, value] : names) {
      if (*text != known) continue;
      to = value;
      return;
    }
    LIGATURE_CHECK(false, "a format's ", name, " is none of those known, got '", *text, "'");
  }
};

}  // namespace

JsonValue fields_of(const Format& format) {
  JsonValue out;
  each_field(format, Writer{out.value.emplace<JsonValue::Object>()});
  return out;
}

Format format_from_fields(const JsonValue& fields) {
  Format format;
  const auto* object = fields.get<JsonValue::Object>();
  LIGATURE_CHECK_TYPE(object != nullptr, "a format must be named fields, got ", to_string(fields));
  for (const auto& [name, value] : *object) {
    bool found = false;
    each_field(format, Reader{name, value, found});
    LIGATURE_CHECK(found, "a format has no field '", name, "'");
  }
  return format;
}

}  // namespace ligature
