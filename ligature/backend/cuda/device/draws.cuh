// Which random words round a tensor to NVFP4: those of its seed, or, in a graph, those of torch's
// generator as it stands when the graph runs.
#pragma once

#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {

/// Element i of an orientation's matrix has word i % 4 of the counter `first` + i / 4.
struct Draws {
  uint64_t seed, first, stream;
};

/// `stream`: 0 for row-wise data, 1 for column-wise data.
__device__ __forceinline__ Draws seeded_draws(const QuantizePlan& plan, uint32_t stream) {
  return {plan.seed, plan.offset, stream};
}

/// Other kernels that draw from the generator have its offset in the counter and a thread's number
/// in the stream, far below 2^63: no words are used twice.
__device__ __forceinline__ Draws generator_draws(const QuantizePlan& plan, uint32_t stream) {
  const uint64_t offset = static_cast<uint64_t>(*plan.generator.offset_at) + plan.generator.offset;
  return {static_cast<uint64_t>(*plan.generator.seed_at), plan.offset,
          uint64_t{1} << 63 | offset / 4 * 2 | stream};
}

__device__ __forceinline__ Draws draws_of(const QuantizePlan& plan, uint32_t stream) {
  return plan.generator.seed_at == nullptr ? seeded_draws(plan, stream)
                                           : generator_draws(plan, stream);
}

}  // namespace ligature::cuda
