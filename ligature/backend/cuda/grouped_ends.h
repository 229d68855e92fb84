// Where groups of rows end, on the device.
#pragma once

#include "ligature/backend/cuda/grouped_launch.h"
#include "ligature/kernels/grouped_gemm.h"

namespace ligature::cuda {

using at::Tensor;

/// Integers as kernels read them.
class Integers {
 public:
  explicit Integers(const Tensor& t);
  const void* data() const { return held_.const_data_ptr(); }
  IntType type() const { return type_; }

 private:
  Tensor held_;
  IntType type_ = IntType::Int64;
};

/// Made by one small kernel. Sizes on the host travel in its arguments; those on the device are not
/// read by the host, and count as in grouped_tiles.h whatever they are.
class DeviceEnds {
 public:
  static DeviceEnds of(const kernels::Groups& groups, at::Device device, Cut cut = {});
  /// Of sizes on the device.
  DeviceEnds(const Tensor& splits, int64_t rows, Cut cut = {});

  GroupEnds groups() const;
  const Tensor& ends() const { return ends_; }  ///< int32 [count]

 private:
  DeviceEnds(int64_t count, at::Device device);

  Tensor ends_, tile_ends_;
};

}  // namespace ligature::cuda
