// The choice between the two families of activations.
#include "ligature/backend/cuda/activation_backward.cuh"
#include "ligature/backend/cuda/activation_forward.cuh"

namespace ligature::cuda {

void launch_activation_forward(const ActivationForwardArgs& args, Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  if (is_gated(args.params.kind)) return launch_activation_forward_family<true>(args, stream);
  launch_activation_forward_family<false>(args, stream);
}

ColumnGrid activation_backward_grid(const ActivationBackwardArgs& args, bool sums, int sm_count) {
  const int piece = activation_piece(is_gated(args.params.kind), args.type, args.x, args.dy,
                                     args.dx, args.columns, args.params.interleave);
  return column_grid(args.rows, args.columns, piece, sums, sm_count);
}

void launch_activation_backward(const ActivationBackwardArgs& args, const ColumnGrid& grid,
                                Stream stream) {
  if (args.rows == 0 || args.columns == 0) return;
  if (is_gated(args.params.kind)) {
    return launch_activation_backward_family<true>(args, grid, stream);
  }
  launch_activation_backward_family<false>(args, grid, stream);
}

}  // namespace ligature::cuda
