// What the tests of the CUDA kernels share: sizes that take every path, inputs that do not begin
// where vectors of 16 bytes may, and the turn of a test that needs much of the GPU's memory.
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "kernel_test_support.h"
#include "ligature/backend/cuda/runs.h"
#include "tolerance.h"

#define SKIP_WITHOUT_GPU()                                         \
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU"; \
  if (!ligature::cuda::computes_in(at::kFloat)) GTEST_SKIP() << "built without CUDA"

inline const at::Device kGpu(at::kCUDA, 0);

struct Size {
  int64_t rows, columns;
};

/// One value, odd sizes, every number of warps that holds a row, rows too long to be held, no rows.
inline std::vector<Size> cuda_sizes() {
  return {{1, 1},      {3, 7},     {64, 256},  {37, 512},  {70, 1024},  {1000, 1023},
          {300, 2048}, {40, 4096}, {33, 4097}, {20, 8192}, {16, 16384}, {5, 40000},
          {3, 40001},  {0, 64},    {700, 8},   {4000, 24}};
}

inline std::vector<at::ScalarType> cuda_dtypes() { return {at::kFloat, at::kBFloat16, at::kHalf}; }

/// A tensor of random values that begins one value behind an aligned address.
inline at::Tensor unaligned(const at::Tensor& t) {
  const at::Tensor room = at::empty({t.numel() + 1}, t.options());
  at::Tensor view = room.narrow(0, 1, t.numel()).view(t.sizes());
  view.copy_(t);
  return view;
}

inline at::Tensor gpu_random(at::IntArrayRef shape, at::ScalarType dtype, bool aligned = true) {
  const at::Tensor t =
      at::randn(shape, at::TensorOptions(at::kFloat).device(kGpu)).to(dtype).contiguous();
  return aligned ? t : unaligned(t);
}

/// While it lives, no other process on this machine has one, nor the fixture of the Python tests
/// that takes the same lock: what needs many GB of the GPU runs alone. Torch's cache is emptied
/// before and after.
class LargeMemory {
 public:
  LargeMemory() {
    const std::string path = std::filesystem::temp_directory_path() / "ligature-large-tests.lock";
    // A file of another user in a shared folder may be opened, but not with O_CREAT.
    file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0) file_ = open(path.c_str(), O_RDONLY | O_CREAT | O_CLOEXEC, 0644);
    if (file_ < 0 || flock(file_, LOCK_EX) != 0) ADD_FAILURE() << "cannot lock " << path;
    at::accelerator::emptyCache();
  }
  ~LargeMemory() {
    at::accelerator::emptyCache();
    if (file_ >= 0) close(file_);
  }
  LargeMemory(const LargeMemory&) = delete;
  LargeMemory& operator=(const LargeMemory&) = delete;

 private:
  int file_;
};
