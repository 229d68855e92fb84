#include "ligature/kernels/delayed.h"

#include "ligature/kernels/backend.h"

namespace ligature::kernels {

bool has_update_delayed(const Tensor& amax) { return backend_for(amax).update_delayed != nullptr; }

std::vector<Tensor> update_delayed(const std::vector<DelayedState>& states, int64_t margin,
                                   bool most_recent) {
  if (states.empty()) return {};
  return backend_for(states.front().amax).update_delayed(states, margin, most_recent);
}

}  // namespace ligature::kernels
