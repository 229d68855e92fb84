// Random numbers from torch's generator of a device, also in a graph: each run of it draws new
// ones.
#pragma once

#include <c10/core/Device.h>

#include "ligature/backend/cuda/random_state.h"

namespace ligature::cuda {

/// Moves the generator's offset on by `count`, a multiple of 4.
RandomState draw(at::Device device, uint64_t count);

}  // namespace ligature::cuda
