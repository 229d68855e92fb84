// See activation_recompute.cuh.
#include "ligature/backend/cuda/activation_recompute.cuh"

namespace ligature::cuda {

ColumnGrid activation_recompute_grid(const ActivationRecomputeArgs& args, bool sums, int sm_count) {
  const bool gated = is_gated(args.params.kind);
  const auto piece = [&](const void* y, const void* dx) {
    return activation_piece(gated, args.type, args.x, y, dx, args.columns, args.params.interleave);
  };
  const int both =
      piece(args.y, args.dx) > 1 && piece(args.dy, nullptr) > 1 ? piece(args.y, args.dx) : 1;
  return column_grid(args.rows, args.columns, both, sums, sm_count);
}

void launch_activation_recompute_plain(const ActivationRecomputeArgs& args, const ColumnGrid& grid,
                                       Stream stream) {
  launch_activation_recompute_family<false>(args, grid, stream);
}

}  // namespace ligature::cuda
