// The update of delayed scaling, for many tensors at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ligature::kernels {

using at::Tensor;

/// What delayed scaling has of one tensor.
struct DelayedState {
  Tensor history, amax, scale;
  float max_value;
  bool overwrite = false;  ///< graphs read this scale: the new one is written over it
  Tensor noted;            ///< float [1]: below 0 where nothing is to be changed; may be undefined
};

/// Has the device of `amax` one call for many states?
bool has_update_delayed(const Tensor& amax);

/// Moves each amax into its history and gives the new scales; all states are on one device. They
/// are new tensors where nothing else is asked for, except in a graph that is captured: that reads
/// the same memory each time it runs, so there scales are overwritten.
std::vector<Tensor> update_delayed(const std::vector<DelayedState>& states, int64_t margin,
                                   bool most_recent);

}  // namespace ligature::kernels
