// See activation_recompute_scaled.cuh.
#include "ligature/backend/cuda/activation_recompute_scaled.cuh"

void ligature::cuda::launch_activation_recompute_scaled_gated(
    const ActivationRecomputeScaledArgs& args, const ColumnGrid& grid, Stream stream) {
  launch_activation_recompute_scaled_family<true>(args, grid, stream);
}
