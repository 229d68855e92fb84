// For builds without the CUDA backend: its functions are there, so that nothing else has to ask how
// it was built, and each of them refuses. cuda::runs() keeps them from being called.
#pragma once

#include "ligature/check.h"

namespace ligature::cuda {

[[noreturn]] inline void refuse(const char* function) {
  LIGATURE_CHECK_STATE(false, "[", function,
                       "] the CUDA backend is not in this build; build with -DLIGATURE_CUDA=ON");
}

}  // namespace ligature::cuda
