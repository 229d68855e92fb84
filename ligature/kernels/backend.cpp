#include "ligature/kernels/backend.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "ligature/kernels/run_context.h"

namespace ligature::kernels {

// Both are there before any backend registers itself.
constinit std::array<const Backend*, at::COMPILE_TIME_MAX_DEVICE_TYPES> detail::backends{};
constinit const Launches* detail::launches = nullptr;

const Backend* register_backend(at::DeviceType device, const Backend* backend) {
  if (backend != nullptr && backend->launches != nullptr) detail::launches = backend->launches;
  return std::exchange(detail::backends[static_cast<size_t>(device)], backend);
}

at::DeviceType device_behind(const Tensor& x) {
  return x.is_meta() ? run_context().meta_is : x.device().type();
}

at::Device device_behind(at::Device device) {
  if (!device.is_meta()) return device;
  const at::DeviceType type = run_context().meta_is;
  return type != at::kMeta ? at::Device(type) : device;
}

MetaStandsFor::MetaStandsFor(at::DeviceType device)
    : outer_(std::exchange(run_context().meta_is, device)) {}
MetaStandsFor::~MetaStandsFor() { run_context().meta_is = outer_; }

std::string why_no_backend(at::DeviceType device) {
  const std::string name = c10::DeviceTypeName(device, /*lower_case=*/true);
  std::string option = name;
  std::transform(option.begin(), option.end(), option.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return "this build has no backend for " + name + " tensors; one is built with -DLIGATURE_" +
         option + "=ON where Ligature has it";
}

}  // namespace ligature::kernels
