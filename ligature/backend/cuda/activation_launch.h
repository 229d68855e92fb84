// The launches of the activation and bias kernels. No torch here.
#pragma once

#include "ligature/backend/cuda/activation_params.h"
#include "ligature/backend/cuda/column_grid.h"
#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

struct ActivationForwardArgs {
  int64_t rows = 0, columns = 0;  // of y; x has twice as many columns where the kind is gated
  const void* x = nullptr;
  const void* scales = nullptr;  // [rows], may be null
  void* y = nullptr;             // may be x unless gated
  Type type = Type::Float32;     // of x and y
  Type scales_type = Type::Float32;
  ActivationParams params;
};

void launch_activation_forward(const ActivationForwardArgs& args, Stream stream);

struct ActivationBackwardArgs {
  int64_t rows = 0, columns = 0;  // of dy
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* scales = nullptr;  // [rows], may be null
  void* dx = nullptr;
  float* dbias_partials = nullptr;    // [grid.down, columns of x], null: not wanted
  float* dscales_partials = nullptr;  // [rows, grid.warps_across], null: not wanted
  Type type = Type::Float32;          // of dy, x and dx
  Type scales_type = Type::Float32;
  ActivationParams params;
};

/// `sums`: partial sums will be wanted.
ColumnGrid activation_backward_grid(const ActivationBackwardArgs& args, bool sums, int sm_count);

void launch_activation_backward(const ActivationBackwardArgs& args, const ColumnGrid& grid,
                                Stream stream);

struct BiasArgs {
  int64_t rows = 0, columns = 0;
  const void* x = nullptr;
  const void* b = nullptr;
  void* y = nullptr;
  float* partials = nullptr;  // [grid.down, columns]
  Type type = Type::Float32, b_type = Type::Float32;
};

/// y = x + b.
void launch_bias_forward(const BiasArgs& args, Stream stream);

ColumnGrid bias_backward_grid(const BiasArgs& args, int sm_count);
/// The sums over each block's rows of x.
void launch_bias_backward(const BiasArgs& args, const ColumnGrid& grid, Stream stream);

}  // namespace ligature::cuda
