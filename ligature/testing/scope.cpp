#include "ligature/testing/scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>

#include "ligature/options.h"

namespace ligature::testing {

CheckScope::CheckScope(const CheckOptions& options)
    : random_(*options.device), device_(options.device->type()) {
  if (!at::autocast::is_autocast_available(device_)) return;
  autocast_before_ = at::autocast::is_autocast_enabled(device_);
  autocast_dtype_before_ = at::autocast::get_autocast_dtype(device_);
  at::autocast::set_autocast_enabled(device_, options.autocast.has_value());
  if (options.autocast) at::autocast::set_autocast_dtype(device_, *options.autocast);
}

CheckScope::~CheckScope() {
  if (!at::autocast::is_autocast_available(device_)) return;
  at::autocast::set_autocast_enabled(device_, autocast_before_);
  at::autocast::set_autocast_dtype(device_, autocast_dtype_before_);
}

CheckOptions complete_options(CheckOptions options) {
  // An empty tensor there knows the index of the device, which a name may leave out.
  const at::Device device = options.device.value_or(ParameterOptions().tensor_options().device());
  options.device = at::empty({0}, at::TensorOptions().device(device)).device();
  LIGATURE_CHECK(options.tolerance > 0, "tolerance must be positive, got ", options.tolerance);
  LIGATURE_CHECK(options.max_patterns > 0, "max_patterns must be positive, got 0");
  if (options.dtypes.empty()) {
    if (options.recipe == nullptr) options.dtypes.emplace_back(at::kDouble);
    options.dtypes.insert(options.dtypes.end(), {at::kFloat, at::kBFloat16});
  }
  for (const Dtypes& dtypes : options.dtypes) {
    for (const at::ScalarType dtype : {dtypes.input, dtypes.params}) {
      LIGATURE_CHECK_TYPE(at::isFloatingType(dtype), "dtypes must be floating, got ",
                          c10::toString(dtype));
      LIGATURE_CHECK_TYPE(options.recipe == nullptr || dtype != at::kDouble,
                          "dtypes must be float32, bfloat16 or float16 under a recipe, got Double");
    }
  }
  return options;
}

void randomize_parameters(const Subject& subject, uint64_t seed) {
  at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + 17);
  for (const auto& params : subject.params) {
    for (Tensor param : params) {
      if (!at::isFloatingType(param.scalar_type())) continue;
      const Tensor noise = at::rand(param.sizes(), generator, at::TensorOptions(at::kDouble)) - 0.5;
      param.add_(noise.to(param.options()));
    }
  }
}

}  // namespace ligature::testing
