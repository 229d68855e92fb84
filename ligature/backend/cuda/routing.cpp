// The torch side of routing: memory and launches.
#include "ligature/backend/cuda/routing.h"

#include <limits>

#include "ligature/backend/cuda/grouped_ends.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/routing_launch.h"

namespace ligature::cuda {
namespace {

/// The halves of a routing map.
struct Map {
  int64_t tokens = 0, top_k = 0, slots = 0;
  Tensor held;
  const int32_t* slot_of_row = nullptr;
  const int32_t* row_of_slot = nullptr;

  explicit Map(const Tensor& map)
      : tokens(map.size(1)), top_k(map.size(2)), slots(tokens * top_k), held(map.contiguous()) {
    slot_of_row = held.const_data_ptr<int32_t>();
    row_of_slot = slot_of_row + slots;
  }
};

}  // namespace

Routing route(const Tensor& experts_of, int64_t experts) {
  const DeviceGuard guard(experts_of.device());
  LIGATURE_CHECK(experts_of.numel() <= std::numeric_limits<int32_t>::max() &&
                     experts <= std::numeric_limits<int32_t>::max(),
                 "[route] there must be fewer than 2^31 slots and experts, got ",
                 experts_of.numel(), " and ", experts);
  const Integers numbers(experts_of);
  RouteArgs args;
  args.grid = route_grid(static_cast<int32_t>(experts_of.numel()));
  args.experts = static_cast<int32_t>(experts);
  args.experts_of = numbers.data();
  args.type = numbers.type();
  Routing routing;
  routing.splits = empty_on({experts}, at::kLong, experts_of.device());
  routing.map =
      empty_on({2, experts_of.size(0), experts_of.size(1)}, at::kInt, experts_of.device());
  const Tensor counts = empty_on({experts, args.grid.warps}, at::kInt, experts_of.device());
  args.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  args.splits = static_cast<int64_t*>(routing.splits.mutable_data_ptr());
  args.slot_of_row = static_cast<int32_t*>(routing.map.mutable_data_ptr());
  args.row_of_slot = args.slot_of_row + args.grid.slots;
  const Stream stream = stream_of(experts_of);
  launch<&launch_route_counts>("route: counts", stream, args);
  launch<&launch_route_places>("route: places", stream, args);
  const DeviceEnds ends(routing.splits, args.grid.slots);
  args.groups = ends.groups();
  launch<&launch_route_rows>("route: rows", stream, args);
  return routing;
}

Tensor dispatch_rows(const Tensor& x_, const Tensor& map_) {
  const DeviceGuard guard(x_.device());
  const Tensor x = x_.contiguous();
  const Map map(map_);
  Tensor y = empty_on({map.slots, x.size(1)}, x.scalar_type(), x.device());
  GatherArgs args;
  args.rows = map.slots;
  args.row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  args.x_rows = x.size(0);
  args.x = x.const_data_ptr();
  args.index = map.slot_of_row;
  args.divisor = static_cast<int32_t>(map.top_k);
  args.y = y.mutable_data_ptr();
  launch<&launch_gather_rows>("dispatch_rows", stream_of(x), args);
  return y;
}

Tensor combine_rows(const Tensor& x_, const Tensor& map_, const Tensor& weights_) {
  const DeviceGuard guard(x_.device());
  const Tensor x = x_.contiguous();
  const Map map(map_);
  const Tensor weights = weights_.defined() ? serve(weights_).contiguous() : weights_;
  Tensor y = empty_on({map.tokens, x.size(1)}, x.scalar_type(), x.device());
  CombineArgs args;
  args.tokens = map.tokens;
  args.top_k = map.top_k;
  args.columns = x.size(1);
  args.x_rows = x.size(0);
  args.x = x.const_data_ptr();
  args.row_of_slot = map.row_of_slot;
  args.weights = data_of(weights);
  if (weights.defined()) args.weights_type = type_of(weights);
  args.y = y.mutable_data_ptr();
  args.type = type_of(x);
  launch<&launch_combine_rows>("combine_rows", stream_of(x), args);
  return y;
}

Tensor combine_weights_grad(const Tensor& dy_, const Tensor& x_, const Tensor& map_) {
  const DeviceGuard guard(x_.device());
  const Tensor x = x_.contiguous(), dy = cast(dy_, x.scalar_type()).contiguous();
  const Map map(map_);
  Tensor dweights = empty_on({map.tokens, map.top_k}, at::kFloat, x.device());
  CombineGradArgs args;
  args.tokens = map.tokens;
  args.top_k = map.top_k;
  args.columns = x.size(1);
  args.x_rows = x.size(0);
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.row_of_slot = map.row_of_slot;
  args.dweights = static_cast<float*>(dweights.mutable_data_ptr());
  args.type = type_of(x);
  launch<&launch_combine_weights_grad>("combine_weights_grad", stream_of(x), args);
  return dweights;
}

}  // namespace ligature::cuda
