// Plain data beside tensors: what an operation keeps from forward to backward besides saved
// tensors, and the options it was made with. Plain means that a compiler may treat it as a
// constant.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ligature/check.h"

namespace ligature {

using PlainValue = std::variant<std::monostate, bool, int64_t, double, std::string,
                                std::vector<int64_t>, at::ScalarType>;

std::string to_string(const PlainValue& value);

/// A few named plain values; small enough that a linear search is the fastest look-up.
class PlainState {
 public:
  void set(std::string name, PlainValue value) {
    for (auto& entry : entries_) {
      if (entry.first == name) {
        entry.second = std::move(value);
        return;
      }
    }
    entries_.emplace_back(std::move(name), std::move(value));
  }

  const PlainValue* find(std::string_view name) const {
    for (const auto& entry : entries_) {
      if (entry.first == name) return &entry.second;
    }
    return nullptr;
  }

  template <class T>
  const T& get(std::string_view name) const {
    const PlainValue* value = find(name);
    LIGATURE_CHECK_STATE(value != nullptr && std::holds_alternative<T>(*value),
                         "the context holds no such plain value: '", std::string(name), "'");
    return std::get<T>(*value);
  }

  template <class T>
  T get_or(std::string_view name, T fallback) const {
    const PlainValue* value = find(name);
    return value != nullptr && std::holds_alternative<T>(*value) ? std::get<T>(*value) : fallback;
  }

  bool empty() const { return entries_.empty(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<std::pair<std::string, PlainValue>> entries_;
};

}  // namespace ligature
