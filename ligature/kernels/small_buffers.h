// The small buffers of one direction of a pipeline lie in one allocation. Taking memory and giving
// it back costs the host as much as a small kernel, and a step in low precision wants dozens of
// pieces: factors, statistics, data in two orientations. While a run is open on a thread, what
// kernels make for the steps of that run alone are views of one piece, as large as the last run of
// the same plan needed; what goes to the caller, or outlives the run's graph, is not asked for
// here. A compiled graph opens no run: what its functions return may not share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "ligature/base/small_bytes.h"

namespace ligature {

using at::Tensor;

class SmallBufferRun {
 public:
  /// `bytes`: of the run before, and of this one from when it ends.
  explicit SmallBufferRun(SmallBytes& bytes);
  ~SmallBufferRun();
  SmallBufferRun(const SmallBufferRun&) = delete;
  SmallBufferRun& operator=(const SmallBufferRun&) = delete;

  /// Larger ones are by themselves: they are held for as long as any other of the run.
  static constexpr int64_t kLargest = int64_t{64} << 10;
  /// All together.
  static constexpr int64_t kLimit = int64_t{512} << 10;
  static constexpr int64_t kAlignment = 256;

 private:
  friend Tensor take_small(at::IntArrayRef, at::IntArrayRef, at::ScalarType, at::Device);

  SmallBytes& bytes_;
  SmallBufferRun* outer_;
  Tensor memory_;
  int64_t used_ = 0, wanted_ = 0, count_ = 0;
};

/// Buffers are by themselves while it lives: for what stays, and for code that is not ours.
class OwnBuffers {
 public:
  OwnBuffers();
  ~OwnBuffers();
  OwnBuffers(const OwnBuffers&) = delete;
  OwnBuffers& operator=(const OwnBuffers&) = delete;

 private:
  SmallBufferRun* paused_;
};

/// A tensor in the memory of this thread's run, not filled in; undefined where there is no run, or
/// no room in it. `strides`: empty for row-major.
Tensor take_small(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                  at::Device device);

/// take_small, or memory of its own.
Tensor empty_small(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace ligature
