// Which kinds of device have a backend, and what tensors without memory stand for.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace ligature::kernels {

struct Backend;

namespace detail {
// Not inline: a library with hidden symbols, as the binding, would have one of its own.
extern std::array<const Backend*, at::COMPILE_TIME_MAX_DEVICE_TYPES> backends;
}  // namespace detail

/// The backend of a kind of device, whatever it computes in; null where it is ATen's.
inline const Backend* own_backend(at::DeviceType device) {
  return detail::backends[static_cast<size_t>(device)];
}

/// Where a tensor is, or what one without memory stands for.
at::DeviceType device_behind(const at::Tensor& x);
at::Device device_behind(at::Device device);

/// While it lives, tensors without memory of this thread stand for those of a device: what a plan
/// would run there is asked with them.
class MetaStandsFor {
 public:
  explicit MetaStandsFor(at::DeviceType device);
  ~MetaStandsFor();
  MetaStandsFor(const MetaStandsFor&) = delete;
  MetaStandsFor& operator=(const MetaStandsFor&) = delete;

 private:
  at::DeviceType outer_;
};

}  // namespace ligature::kernels
