// Where tests run: on a GPU when there is one, as operations are made there by default too.
#pragma once

#include <torch/torch.h>

inline at::TensorOptions on_device(at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions(dtype).device(torch::cuda::is_available() ? at::kCUDA : at::kCPU);
}
