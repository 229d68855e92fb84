// The launches of the dropout kernels. No torch here.
#pragma once

#include "ligature/backend/cuda/random_state.h"
#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

/// By how much one forward moves the generator's offset on.
constexpr uint64_t kDropoutDraws = 8;

struct DropoutArgs {
  int64_t count = 0;
  const void* x = nullptr;    // or dy
  void* y = nullptr;          // or dx
  uint8_t* mask = nullptr;    // 1 where a value is kept; read by the backward
  Type type = Type::Float32;  // of x and y
  double p = 0.0;             // in [0, 1)
};

void launch_dropout_forward(const DropoutArgs& args, const RandomState& state, Stream stream);
void launch_dropout_backward(const DropoutArgs& args, Stream stream);

}  // namespace ligature::cuda
