// The launch of the activations backward that also gives the forward's output. No torch here.
#pragma once

#include "ligature/backend/cuda/activation_params.h"
#include "ligature/backend/cuda/column_grid.h"
#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

struct ActivationRecomputeArgs {
  int64_t rows = 0, columns = 0;  // of dy; x has twice as many columns where the kind is gated
  const void* dy = nullptr;
  const void* x = nullptr;
  void* y = nullptr;                // may be dy
  void* dx = nullptr;               // may be x
  float* dbias_partials = nullptr;  // [grid.down, columns of x], null: not wanted
  Type type = Type::Float32;        // of all of them
  ActivationParams params;
};

/// `sums`: partial sums will be wanted.
ColumnGrid activation_recompute_grid(const ActivationRecomputeArgs& args, bool sums, int sm_count);

void launch_activation_recompute_plain(const ActivationRecomputeArgs& args, const ColumnGrid& grid,
                                       Stream stream);
void launch_activation_recompute_gated(const ActivationRecomputeArgs& args, const ColumnGrid& grid,
                                       Stream stream);

/// The same with a scale per row: y = scales * act(x).
struct ActivationRecomputeScaledArgs {
  int64_t rows = 0, columns = 0;
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* scales = nullptr;       // [rows]
  void* y = nullptr;                  // may be dy
  void* dx = nullptr;                 // may be x
  float* dscales_partials = nullptr;  // [rows, grid.warps_across], null: not wanted
  Type type = Type::Float32;          // of dy, x, y and dx
  Type scales_type = Type::Float32;
  ActivationParams params;
};

/// `sums`: dscales will be wanted.
ColumnGrid activation_recompute_scaled_grid(const ActivationRecomputeScaledArgs& args, bool sums,
                                            int sm_count);

void launch_activation_recompute_scaled_plain(const ActivationRecomputeScaledArgs& args,
                                              const ColumnGrid& grid, Stream stream);
void launch_activation_recompute_scaled_gated(const ActivationRecomputeScaledArgs& args,
                                              const ColumnGrid& grid, Stream stream);

}  // namespace ligature::cuda
