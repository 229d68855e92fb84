// The state of torch in which a check runs, whatever the caller's is.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

#include "ligature/testing/run.h"

namespace ligature::testing {

class CheckScope {
 public:
  explicit CheckScope(const CheckOptions& options);
  ~CheckScope();
  CheckScope(const CheckScope&) = delete;
  CheckScope& operator=(const CheckScope&) = delete;

 private:
  c10::InferenceMode no_inference_{false};
  c10::AutoGradMode with_grad_{true};
  KeepRandomState random_;
  at::DeviceType device_;
  bool autocast_before_ = false;
  at::ScalarType autocast_dtype_before_ = at::kBFloat16;
};

/// The options with everything filled in that has a default.
CheckOptions complete_options(CheckOptions options);

/// Moves the parameters away from initial values such as zero and one, which hide mistakes.
void randomize_parameters(const Subject& subject, uint64_t seed);

}  // namespace ligature::testing
