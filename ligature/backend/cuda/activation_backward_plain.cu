// See activation_backward.cuh.
#include "ligature/backend/cuda/activation_backward.cuh"

template void ligature::cuda::launch_activation_backward_family<false>(
    const ActivationBackwardArgs&, const ColumnGrid&, Stream);
