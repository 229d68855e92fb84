#include "ligature/testing/report.h"

namespace ligature::testing {

std::string Report::text() const {
  constexpr size_t kShown = 20;
  if (failures.empty()) {
    return runs > 0 ? "all of " + std::to_string(runs) + " runs agree"
                    : "nothing was compared: no shapes or no dtypes";
  }
  std::string out = std::to_string(failures.size()) +
                    (failures.size() == 1 ? " failure in " : " failures in ") +
                    std::to_string(runs) + " runs:";
  for (size_t i = 0; i < failures.size() && i < kShown; ++i) out += "\n  " + failures[i];
  if (failures.size() > kShown) {
    out += "\n  ... and " + std::to_string(failures.size() - kShown) + " more";
  }
  return out;
}

}  // namespace ligature::testing
