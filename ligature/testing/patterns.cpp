#include "ligature/testing/patterns.h"

#include <algorithm>
#include <random>

namespace ligature::testing {

std::vector<Needs> patterns(Needs possible, size_t limit, uint64_t seed) {
  std::vector<size_t> bits;
  for (size_t i = 0; i < 64; ++i) {
    if (has(possible, i)) bits.push_back(i);
  }
  std::vector<Needs> out;
  const auto add = [&](Needs needs) {
    if (out.size() < limit && std::find(out.begin(), out.end(), needs) == out.end()) {
      out.push_back(needs);
    }
  };
  add(possible);
  add(0);
  if (bits.size() < 20 && (size_t{1} << bits.size()) <= limit) {
    for (size_t subset = 0; subset < (size_t{1} << bits.size()); ++subset) {
      Needs needs = 0;
      for (size_t k = 0; k < bits.size(); ++k) {
        if (has(subset, k)) needs |= only(bits[k]);
      }
      add(needs);
    }
    return out;
  }
  for (const size_t bit : bits) add(only(bit));
  for (const size_t bit : bits) add(possible & ~only(bit));
  std::mt19937_64 random(seed);
  for (size_t tries = 0; out.size() < limit && tries < 8 * limit; ++tries) {
    add(random() & possible);
  }
  return out;
}

std::string describe_needs(Needs needs, const std::vector<std::string>& names) {
  if (needs == 0) return "nothing needs gradients";
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
