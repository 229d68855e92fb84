#include "ligature/testing/patterns.h"

#include <algorithm>
#include <random>

namespace ligature::testing {

std::vector<Needs> patterns(const Needs& possible, size_t limit, uint64_t seed) {
  std::vector<size_t> bits;
  for (size_t i = 0; i < kMostLeaves; ++i) {
    if (has(possible, i)) bits.push_back(i);
  }
  std::vector<Needs> out;
  const auto add = [&](const Needs& needs) {
    if (out.size() < limit && std::find(out.begin(), out.end(), needs) == out.end()) {
      out.push_back(needs);
    }
  };
  add(possible);
  add({});
  if (bits.size() < 20 && (size_t{1} << bits.size()) <= limit) {
    for (size_t subset = 0; subset < (size_t{1} << bits.size()); ++subset) {
      Needs needs;
      for (size_t k = 0; k < bits.size(); ++k) {
        if (((subset >> k) & 1U) != 0) needs.set(bits[k]);
      }
      add(needs);
    }
    return out;
  }
  for (const size_t bit : bits) add(only(bit));
  for (const size_t bit : bits) add(possible & ~only(bit));
  std::mt19937_64 random(seed);
  for (size_t tries = 0; out.size() < limit && tries < 8 * limit; ++tries) {
    Needs some;
    for (const size_t bit : bits) some[bit] = (random() & 1U) != 0;
    add(some);
  }
  return out;
}

std::string describe_needs(const Needs& needs, const std::vector<std::string>& names) {
  if (needs.none()) return "nothing needs gradients";
  std::vector<std::string> with;
  std::vector<std::string> without;
  for (size_t i = 0; i < names.size(); ++i) (has(needs, i) ? with : without).push_back(names[i]);
  if (without.empty() && names.size() > 3) return "all need gradients";
  const auto join = [](const std::vector<std::string>& list) {
    std::string out;
    for (size_t i = 0; i < list.size(); ++i) {
      out += (i == 0 ? "" : i + 1 == list.size() ? " and " : ", ") + list[i];
    }
    return out;
  };
  if (with.size() > 3 && without.size() < with.size()) {
    return "all but " + join(without) + " need gradients";
  }
  return join(with) + (with.size() == 1 ? " needs a gradient" : " need gradients");
}

}  // namespace ligature::testing
