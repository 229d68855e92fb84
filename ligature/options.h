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

struct AnyField {
  template <class T>
  void operator()(const char*, T&) const {}
};
template <class T>
concept HasFields = requires(T& value) { value.fields(AnyField{}); };

// A type that is no plain one, as an enumeration, has functions of these names beside it.

template <class T>
PlainValue to_plain(const T& value) {
  if constexpr (is_optional<T>::value) {
    return value ? to_plain(*value) : PlainValue{};
  } else if constexpr (std::is_same_v<T, float>) {
    return PlainValue{static_cast<double>(value)};
  } else {
    return PlainValue{value};
  }
}

/// `what`: the field, for errors.
template <class T>
void from_plain(const std::string& what, const PlainValue& plain, T& value) {
  if constexpr (is_optional<T>::value) {
    if (std::holds_alternative<std::monostate>(plain)) {
      value.reset();
    } else {
      typename T::value_type inner{};
      from_plain(what, plain, inner);
      value = inner;
    }
  } else if constexpr (std::is_same_v<T, float>) {
    double wide = 0;
    from_plain(what, plain, wide);
    value = static_cast<float>(wide);
  } else {
    if constexpr (std::is_same_v<T, double>) {
      if (const auto* integer = std::get_if<int64_t>(&plain)) {
        value = static_cast<double>(*integer);
        return;
      }
    }
    const T* given = std::get_if<T>(&plain);
    LIGATURE_CHECK_TYPE(given != nullptr, what, " cannot be ", to_string(plain));
    value = *given;
  }
}

/// Calls `f(name, value)` for every field, for those of a struct among them as "struct.name".
template <class Options, class F>
void each_field(Options& options, F&& f, const std::string& prefix = "") {
  options.fields([&](const char* name, auto& value) {
    if constexpr (HasFields<std::decay_t<decltype(value)>>) {
      each_field(value, f, prefix + name + ".");
    } else {
      f(prefix + name, value);
    }
  });
}

}  // namespace detail

template <class Options>
PlainState options_to_state(const Options& options) {
  PlainState state;
  detail::each_field(const_cast<Options&>(options), [&](const std::string& name, auto& value) {
    using detail::to_plain;
    state.set(name, to_plain(value));
  });
  return state;
}

/// `owner`: whose options they are, for errors.
template <class Options>
bool set_option_field(Options& options, const std::string& name, const PlainValue& plain,
                      const std::string& owner = "") {
  bool found = false;
  detail::each_field(options, [&](const std::string& field, auto& value) {
    if (name != field) return;
    using detail::from_plain;
    from_plain(owner.empty() ? "option '" + name + "'" : "[" + owner + "] " + name, plain, value);
    found = true;
  });
  return found;
}

template <class Options>
Options options_from_state(const PlainState& state, const std::string& owner = "") {
  Options options;
  for (const auto& [name, value] : state) {
    LIGATURE_CHECK(set_option_field(options, name, value, owner),
                   owner.empty() ? "no such option: '" : "[" + owner + "] there is no field '",
                   name, "'");
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
