// See activation_recompute_scaled.cuh.
#include <algorithm>

#include "ligature/backend/cuda/activation_recompute_scaled.cuh"

namespace ligature::cuda {

ColumnGrid activation_recompute_scaled_grid(const ActivationRecomputeScaledArgs& args, bool sums,
                                            int sm_count) {
  const bool gated = is_gated(args.params.kind);
  const auto piece = [&](const void* y, const void* dx) {
    return activation_piece(gated, args.type, args.x, y, dx, args.columns, args.params.interleave);
  };
  const int both = std::min(piece(args.y, args.dx), piece(args.dy, nullptr));
  return column_grid(args.rows, args.columns, both, sums, sm_count);
}

void launch_activation_recompute_scaled_plain(const ActivationRecomputeScaledArgs& args,
                                              const ColumnGrid& grid, Stream stream) {
  launch_activation_recompute_scaled_family<false>(args, grid, stream);
}

}  // namespace ligature::cuda
