// Operations by name, so that a binding can make them from plain options.
#include <map>

#include "ligature/operation.h"
#include "ligature/recipes/model_init.h"

namespace ligature {

namespace {

std::map<std::string, OpFactory>& factories() {
  static std::map<std::string, OpFactory> table;
  return table;
}

}  // namespace

bool register_operation(std::string name, OpFactory factory) {
  return factories().emplace(std::move(name), std::move(factory)).second;
}

BasicOpPtr make_operation(const std::string& name, const PlainState& options) {
  auto found = factories().find(name);
  LIGATURE_CHECK(found != factories().end(), "there is no operation named '", name, "'");
  const QuantizedModelInit describing({.enabled = false});
  return found->second(options);
}

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const auto& item : factories()) names.push_back(item.first);
  return names;
}

}  // namespace ligature
