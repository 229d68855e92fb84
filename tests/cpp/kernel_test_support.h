// What the kernel tests share: the devices and dtypes they run over, and random tensors.
#pragma once

#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

inline std::vector<at::Device> test_devices() {
  std::vector<at::Device> devices{at::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA, 0);
  return devices;
}

inline std::vector<at::ScalarType> test_dtypes() {
  return {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
}

/// One row, no rows, odd sizes, three dimensions, and enough for several threads; `n` is the last
/// dimension.
inline std::vector<std::vector<int64_t>> test_shapes(int64_t n) {
  return {{1, n}, {0, n}, {n}, {7, n}, {2, 3, n}, {1200, n}};
}

inline at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype,
                                at::Device device = at::kCPU, double scale = 1.0) {
  return (at::randn(shape, at::kDouble) * scale).to(device, dtype);
}

/// A float64 leaf on the CPU with the values of `t`, for references made with autograd.
inline at::Tensor reference_leaf(const at::Tensor& t) {
  return t.detach().to(at::kCPU, at::kDouble).clone().requires_grad_(true);
}

inline at::Tensor reference(const at::Tensor& t) { return t.detach().to(at::kCPU, at::kDouble); }

inline std::string describe(const std::string& what, at::Device device, at::ScalarType dtype,
                            at::IntArrayRef shape) {
  std::ostringstream out;
  out << what << " " << device << " " << c10::toString(dtype) << " " << shape;
  return out.str();
}

/// Runs f(device, dtype) for every combination, each from the same seed.
template <typename F>
void for_each_device_and_dtype(const F& f) {
  for (const at::Device device : test_devices()) {
    for (const at::ScalarType dtype : test_dtypes()) {
      torch::manual_seed(1);
      f(device, dtype);
    }
  }
}

/// Runs with another number of threads while it lives.
class WithThreads {
 public:
  explicit WithThreads(int threads) : before_(at::get_num_threads()) {
    at::set_num_threads(threads);
  }
  ~WithThreads() { at::set_num_threads(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  int before_;
};
