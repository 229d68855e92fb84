// The one place that knows which backend serves which tensor.
#pragma once

#include "ligature/backend/cuda/runs.h"

/// Calls `function` of the backend that serves `x`, with the arguments after it. The headers of the
/// backends aten, cpu and cuda are the caller's to include. A tensor without memory is none of
/// theirs: look for it first.
#define LIGATURE_DISPATCH(x, function, ...)                  \
  ((x).is_cpu()                ? cpu::function(__VA_ARGS__)  \
   : ::ligature::cuda::runs(x) ? cuda::function(__VA_ARGS__) \
                               : aten::function(__VA_ARGS__))
