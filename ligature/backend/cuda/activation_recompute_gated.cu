// See activation_recompute.cuh.
#include "ligature/backend/cuda/activation_recompute.cuh"

void ligature::cuda::launch_activation_recompute_gated(const ActivationRecomputeArgs& args,
                                                       const ColumnGrid& grid, Stream stream) {
  launch_activation_recompute_family<true>(args, grid, stream);
}
