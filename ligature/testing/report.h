// What a check found.
#pragma once

#include <string>
#include <vector>

namespace ligature::testing {

struct Report {
  size_t runs = 0;                    ///< how many cases were compared
  std::vector<std::string> failures;  ///< which case failed, what, and by how much

  /// Nothing is wrong, and something was compared.
  explicit operator bool() const { return failures.empty() && runs > 0; }
  /// For people: one line when all is well, else the failures, the first ones in full.
  std::string text() const;
};

}  // namespace ligature::testing
