// The launches of the routing kernels; rows are gathered by launch_gather_rows. No torch here.
#pragma once

#include "ligature/backend/cuda/grouped_launch.h"

namespace ligature::cuda {

/// Which slot goes to which row, as a stable counting sort of the slots by their expert: each warp
/// counts its own slots, the counts become places, and each warp puts its slots there. Between the
/// second and the third launch the splits become groups.
struct RouteArgs {
  RouteGrid grid;
  int32_t experts = 0;
  const void* experts_of = nullptr;  // [slots]
  IntType type = IntType::Int64;
  int32_t* counts = nullptr;       // [experts, warps]; then how many rows other warps have before
  int64_t* splits = nullptr;       // [experts]
  GroupEnds groups;                // from splits, before rows are placed
  int32_t* slot_of_row = nullptr;  // [slots]
  int32_t* row_of_slot = nullptr;  // [slots]
};
void launch_route_counts(const RouteArgs& args, Stream stream);
void launch_route_places(const RouteArgs& args, Stream stream);
void launch_route_rows(const RouteArgs& args, Stream stream);

/// y[t] = the sum over k of weights[t, k] * x[row of slot t, k].
struct CombineArgs {
  int64_t tokens = 0, top_k = 0, columns = 0, x_rows = 0;
  const void* x = nullptr;
  const int32_t* row_of_slot = nullptr;
  const void* weights = nullptr;  // [tokens, top_k]; may be null
  void* y = nullptr;
  Type type = Type::Float32, weights_type = Type::Float32;
};
void launch_combine_rows(const CombineArgs& args, Stream stream);

/// dweights[t, k] = dy[t] . x[row of slot t, k].
struct CombineGradArgs {
  int64_t tokens = 0, top_k = 0, columns = 0, x_rows = 0;
  const void* dy = nullptr;
  const void* x = nullptr;
  const int32_t* row_of_slot = nullptr;
  float* dweights = nullptr;
  Type type = Type::Float32;  // of dy and x
};
void launch_combine_weights_grad(const CombineGradArgs& args, Stream stream);

}  // namespace ligature::cuda
