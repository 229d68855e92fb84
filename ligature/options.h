// Options structs as data. A struct lists its fields once, in `fields`; copying options to and from
// named plain values follows from that.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ligature/plain_state.h"

namespace ligature {

namespace detail {

template <class T>
struct is_optional : std::false_type {};
template <class T>
struct is_optional<std::optional<T>> : std::true_type {};

template <class T>
PlainValue to_plain(const T& value) {
  if constexpr (is_optional<T>::value) {
    return value ? to_plain(*value) : PlainValue{};
  } else {
    return PlainValue{value};
  }
}

template <class T>
void from_plain(const std::string& name, const PlainValue& plain, T& value) {
  if constexpr (is_optional<T>::value) {
    if (std::holds_alternative<std::monostate>(plain)) {
      value.reset();
    } else {
      typename T::value_type inner{};
      from_plain(name, plain, inner);
      value = inner;
    }
  } else {
    if constexpr (std::is_same_v<T, double>) {
      if (const auto* integer = std::get_if<int64_t>(&plain)) {
        value = static_cast<double>(*integer);
        return;
      }
    }
    const T* given = std::get_if<T>(&plain);
    LIGATURE_CHECK_TYPE(given != nullptr, "option '", name, "' cannot be ", to_string(plain));
    value = *given;
  }
}

}  // namespace detail

template <class Options>
PlainState options_to_state(const Options& options) {
  PlainState state;
  const_cast<Options&>(options).fields(
      [&](const char* name, auto& value) { state.set(name, detail::to_plain(value)); });
  return state;
}

template <class Options>
bool set_option_field(Options& options, const std::string& name, const PlainValue& plain) {
  bool found = false;
  options.fields([&](const char* field, auto& value) {
    if (name == field) {
      detail::from_plain(name, plain, value);
      found = true;
    }
  });
  return found;
}

template <class Options>
Options options_from_state(const PlainState& state) {
  Options options;
  for (const auto& [name, value] : state) {
    LIGATURE_CHECK(set_option_field(options, name, value), "no such option: '", name, "'");
  }
  return options;
}

/// Where parameters are made that no device is named for: the current CUDA device where there is
/// one, else the CPU (config.cpp).
at::Device default_device();

/// Fields of every options struct of an operation with parameters.
struct ParameterOptions {
  std::optional<at::Device> device;     ///< CUDA where there is one, else the CPU
  std::optional<at::ScalarType> dtype;  ///< torch's default dtype

  at::TensorOptions tensor_options() const;
};

/// Makes an operation from options as data. It only describes: its parameters hold no memory.
template <class Impl>
std::shared_ptr<Impl> make_from_state(const PlainState& state) {
  auto options = options_from_state<typename Impl::Options>(state);
  if constexpr (std::is_base_of_v<ParameterOptions, typename Impl::Options>) {
    options.device = at::Device(at::kMeta);
  }
  return std::make_shared<Impl>(options);
}

}  // namespace ligature

/// In an operation with a member `options`: the virtual functions that treat them as data.
#define LIGATURE_OPTIONS_AS_DATA                                                                  \
  ::ligature::PlainState options_state() const override {                                         \
    return ::ligature::options_to_state(options);                                                 \
  }                                                                                               \
  void set_option(const std::string& option_name, const ::ligature::PlainValue& value) override { \
    auto changed = options;                                                                       \
    LIGATURE_CHECK(::ligature::set_option_field(changed, option_name, value), "[", label(),       \
                   "] has no option '", option_name, "'");                                        \
    check_options(changed);                                                                       \
    options = changed;                                                                            \
  }

/// In an operation's .cpp: makes it known by name.
#define LIGATURE_REGISTER_OPERATION(Name)                                        \
  static const bool Name##_is_registered = ::ligature::register_operation(       \
      #Name, [](const ::ligature::PlainState& state) -> ::ligature::BasicOpPtr { \
        return ::ligature::make_from_state<Name##Impl>(state);                   \
      })
