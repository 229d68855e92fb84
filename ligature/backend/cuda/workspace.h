// Memory that library calls use while they run. Calls of one stream follow each other, so each
// stream has one piece for all of them; a graph that is captured has its own, for as long as it
// lives.
#pragma once

#include <ATen/core/TensorBase.h>

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

/// Bytes that are there for every call on this device.
size_t workspace_limit(int device);

bool is_capturing(Stream stream);

/// `bytes`: no more than the limit; 0 gives null. `keep` is to be held until the call is queued.
void* workspace(int device, Stream stream, size_t bytes, bool capturing, at::TensorBase& keep);

}  // namespace ligature::cuda
