// Where torch's generator of a device stands, as kernels take it. No torch here.
#pragma once

#include <cstdint>

namespace ligature::cuda {

/// While a graph is captured the two numbers are known only when it runs: then they lie in memory,
/// and `offset` is what the graph has drawn before.
struct RandomState {
  uint64_t seed = 0, offset = 0;
  const int64_t* seed_at = nullptr;
  const int64_t* offset_at = nullptr;
};

}  // namespace ligature::cuda
