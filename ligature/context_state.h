// What an operation keeps from forward to backward besides tensors: plain values by name, or a
// struct of the operation's own, whose fields have names too.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <variant>

#include "ligature/options.h"
#include "ligature/plain_state.h"

namespace ligature {

namespace detail {

/// False for a value of another kind: the field is then not set.
template <class T>
bool set_field(T& field, const PlainValue& value) {
  if constexpr (is_optional<T>::value) {
    field.emplace();
    if (set_field(*field, value)) return true;
    field.reset();
    return false;
  } else {
    const T* given = std::get_if<T>(&value);
    if (given != nullptr) {
      field = *given;
    } else if constexpr (std::is_same_v<T, bool>) {
      field = false;
    }
    return given != nullptr;
  }
}

template <class T>
bool is_set(const T& field) {
  if constexpr (is_optional<T>::value || std::is_same_v<T, bool>) {
    return static_cast<bool>(field);
  } else {
    return true;
  }
}

/// A struct whose type only its operation knows, as named values.
class StateFields {
 public:
  virtual ~StateFields() = default;
  virtual StateFields* copy_to(void* room) const = 0;
  /// False where there is no such field, or one of another kind, which is then not set.
  virtual bool set(std::string_view name, const PlainValue& value) = 0;
  virtual void each(c10::function_ref<void(const char*, PlainValue)> f) const = 0;
};

template <class T>
class StateFieldsOf final : public StateFields {
 public:
  StateFields* copy_to(void* room) const override { return new (room) StateFieldsOf(*this); }
  bool set(std::string_view name, const PlainValue& value) override {
    bool taken = false;
    fields.fields([&](const char* field_name, auto& field) {
      if (name == field_name) taken = set_field(field, value);
    });
    return taken;
  }
  void each(c10::function_ref<void(const char*, PlainValue)> f) const override {
    const_cast<T&>(fields).fields([&](const char* name, auto& field) {
      if (is_set(field)) f(name, to_plain(field));
    });
  }

  T fields;
};

}  // namespace detail

/// An operation of a user's sets and gets values by name. A built-in one has a small struct that
/// lists its fields, as options do: `state.as<LinearState>().dtype`. Both are one state: what a
/// user's fusion sets by name is in the struct, and what is in the struct can be found by name,
/// except for optional fields and flags that are not set.
class ContextState {
 public:
  ContextState() = default;
  ContextState(PlainState named) : named_(std::move(named)) {}  // NOLINT: values are a state
  ContextState(const ContextState& other) : named_(other.named_) { copy_fields(other); }
  ContextState(ContextState&& other) : named_(std::move(other.named_)) { copy_fields(other); }
  ContextState& operator=(ContextState other) {
    drop_fields();
    named_ = std::move(other.named_);
    copy_fields(other);
    return *this;
  }
  ~ContextState() { drop_fields(); }

  /// The struct of this type. If there is none, it is made of the named values.
  template <class T>
  T& as() {
    if (!holds<T>()) make<T>();
    return static_cast<detail::StateFieldsOf<T>*>(fields_)->fields;
  }
  template <class T>
  T as() const {
    if (!holds<T>()) return ContextState(*this).as<T>();
    return static_cast<const detail::StateFieldsOf<T>*>(fields_)->fields;
  }

  void set(std::string name, PlainValue value) {
    if (fields_ != nullptr && fields_->set(name, value)) return;
    named_.set(std::move(name), std::move(value));
  }

  std::optional<PlainValue> find(std::string_view name) const {
    std::optional<PlainValue> found;
    if (fields_ != nullptr) {
      fields_->each([&](const char* field, PlainValue value) {
        if (name == field) found = std::move(value);
      });
    }
    if (found) return found;
    const PlainValue* named = named_.find(name);
    return named != nullptr ? std::optional(*named) : std::nullopt;
  }

  template <class T>
  T get(std::string_view name) const {
    const std::optional<PlainValue> value = find(name);
    LIGATURE_CHECK_STATE(value && std::holds_alternative<T>(*value),
                         "the context holds no such plain value: '", std::string(name), "'");
    return std::get<T>(*value);
  }

  template <class T>
  T get_or(std::string_view name, T fallback) const {
    const std::optional<PlainValue> value = find(name);
    return value && std::holds_alternative<T>(*value) ? std::get<T>(*value) : fallback;
  }

  /// Everything, by name.
  PlainState all() const {
    PlainState all = named_;
    if (fields_ != nullptr) {
      fields_->each([&](const char* name, PlainValue value) { all.set(name, std::move(value)); });
    }
    return all;
  }
  bool empty() const { return all().empty(); }

 private:
  template <class T>
  bool holds() const {
    return fields_ != nullptr && typeid(*fields_) == typeid(detail::StateFieldsOf<T>);
  }

  template <class T>
  void make() {
    using Fields = detail::StateFieldsOf<T>;
    static_assert(sizeof(Fields) <= sizeof(room_) && alignof(Fields) <= alignof(std::max_align_t));
    PlainState values = fields_ != nullptr ? all() : std::move(named_);
    drop_fields();
    named_ = {};
    fields_ = new (room_) Fields();
    for (const auto& [name, value] : values) set(name, value);
  }

  void copy_fields(const ContextState& other) {
    if (other.fields_ != nullptr) fields_ = other.fields_->copy_to(room_);
  }
  void drop_fields() {
    if (fields_ != nullptr) std::exchange(fields_, nullptr)->~StateFields();
  }

  PlainState named_;
  detail::StateFields* fields_ = nullptr;  // in room_, so that it needs no memory of its own
  alignas(std::max_align_t) std::byte room_[80];
};

}  // namespace ligature
