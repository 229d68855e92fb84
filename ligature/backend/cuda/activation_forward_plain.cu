// See activation_forward.cuh.
#include "ligature/backend/cuda/activation_forward.cuh"

template void ligature::cuda::launch_activation_forward_family<false>(const ActivationForwardArgs&,
                                                                      Stream);
