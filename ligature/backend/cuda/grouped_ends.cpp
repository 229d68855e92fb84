#include "ligature/backend/cuda/grouped_ends.h"

#include <algorithm>

#include "ligature/backend/cuda/launch.h"

namespace ligature::cuda {

Integers::Integers(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kByte:
      type_ = IntType::UInt8;
      break;
    case at::kChar:
      type_ = IntType::Int8;
      break;
    case at::kShort:
      type_ = IntType::Int16;
      break;
    case at::kInt:
      type_ = IntType::Int32;
      break;
    case at::kLong:
      break;
    default:
      held_ = t.to(at::kLong).contiguous();
      return;
  }
  held_ = t.contiguous();
}

DeviceEnds::DeviceEnds(int64_t count, at::Device device)
    : ends_(empty_on({count}, at::kInt, device)), tile_ends_(empty_on({count}, at::kInt, device)) {}

DeviceEnds::DeviceEnds(const Tensor& splits, int64_t rows, Cut cut)
    : DeviceEnds(splits.numel(), splits.device()) {
  const Integers sizes(splits);
  SplitsArgs args;
  args.splits = sizes.data();
  args.type = sizes.type();
  args.count = static_cast<int32_t>(splits.numel());
  args.rows = rows;
  args.cut = cut;
  args.ends = ends_.mutable_data_ptr<int32_t>();
  args.tile_ends = tile_ends_.mutable_data_ptr<int32_t>();
  launch<&launch_group_ends>("group ends", stream_of(splits), args);
}

DeviceEnds DeviceEnds::of(const kernels::Groups& groups, at::Device device, Cut cut) {
  if (!groups.on_host()) {
    LIGATURE_CHECK(groups.splits.device() == device, "[groups] split sizes must be on ",
                   device.str(), " or on the CPU, got ", groups.splits.device().str());
    return DeviceEnds(groups.splits, groups.rows, cut);
  }
  DeviceEnds made(groups.count, device);
  KnownEnds args;
  int32_t tiles = 0;
  for (int64_t first = 0; first < groups.count; first += KnownEnds::kMost) {
    args.count = static_cast<int32_t>(std::min<int64_t>(groups.count - first, KnownEnds::kMost));
    for (int32_t i = 0; i < args.count; ++i) {
      tiles += cut.parts(static_cast<int32_t>(groups.size(first + i)));
      args.ends[i] = static_cast<int32_t>(groups.end(first + i));
      args.tile_ends[i] = tiles;
    }
    args.to_ends = made.ends_.mutable_data_ptr<int32_t>() + first;
    args.to_tile_ends = made.tile_ends_.mutable_data_ptr<int32_t>() + first;
    launch<&launch_known_ends>("group ends", stream_of(made.ends_), args);
  }
  return made;
}

GroupEnds DeviceEnds::groups() const {
  return {ends_.const_data_ptr<int32_t>(), tile_ends_.const_data_ptr<int32_t>(),
          static_cast<int32_t>(ends_.numel())};
}

}  // namespace ligature::cuda
