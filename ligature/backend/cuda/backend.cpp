#include "ligature/kernels/backend.h"

#include <memory>

#include "ligature/backend/cuda/activated_linear.h"
#include "ligature/backend/cuda/activation.h"
#include "ligature/backend/cuda/activation_recompute.h"
#include "ligature/backend/cuda/bias.h"
#include "ligature/backend/cuda/dropout.h"
#include "ligature/backend/cuda/gated_linear.h"
#include "ligature/backend/cuda/gemm.h"
#include "ligature/backend/cuda/grouped_gemm.h"
#include "ligature/backend/cuda/launch_scope.h"
#include "ligature/backend/cuda/norm.h"
#include "ligature/backend/cuda/quantize.h"
#include "ligature/backend/cuda/routing.h"
#include "ligature/backend/cuda/runs.h"

namespace ligature::cuda {
namespace {

// ---- kernels with a cast: which arguments one kernel takes

std::optional<NormQuantized> layer_norm_quantize(const Tensor& x, const Tensor& w, const Tensor& b,
                                                 double eps, bool zero_centered_gamma,
                                                 at::ScalarType out_dtype,
                                                 const QuantizeArgs& args) {
  if (!fuses_norm(x, w, b, out_dtype, args)) return std::nullopt;
  return norm_forward_quantize(x, w, b, eps, zero_centered_gamma, true, args);
}

std::optional<NormQuantized> rms_norm_quantize(const Tensor& x, const Tensor& w, double eps,
                                               bool zero_centered_gamma, at::ScalarType out_dtype,
                                               const QuantizeArgs& args) {
  if (!fuses_norm(x, w, {}, out_dtype, args)) return std::nullopt;
  return norm_forward_quantize(x, w, {}, eps, zero_centered_gamma, false, args);
}

std::optional<QuantizedPair> activation_quantize(const Tensor& x, const ActivationSpec& spec,
                                                 const Tensor& scales, const QuantizeArgs& args) {
  if (!fuses_activation(x, spec, scales, args)) return std::nullopt;
  return cuda::activation_forward_quantize(x, spec, scales, args);
}

std::optional<ActivationBackwardQuantized> activation_gradient_quantize(
    const Tensor& dy, const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
    bool need_dscales, bool need_dbias, const QuantizeArgs& args) {
  if (!fuses_activation_backward(dy, x, spec, scales, args)) return std::nullopt;
  return cuda::activation_backward_quantize(dy, x, spec, scales, need_dscales, need_dbias, args);
}

// ---- GEMMs with an epilogue

using kernels::Epilogue;
using kernels::GemmDesc;

bool has_epilogue(Epilogue epilogue, const ActivationSpec* activation, at::ScalarType dtype,
                  at::Device device) {
  switch (epilogue) {
    case Epilogue::Activation:
      return kernels::is_gated(activation->kind) ? has_gated_linear(*activation, dtype, device)
                                                 : has_activated_linear(*activation, dtype);
    case Epilogue::ActivationGrad:
      return kernels::is_gated(activation->kind) && has_gated_linear(*activation, dtype, device);
    case Epilogue::BiasGrad:
      return has_weight_bias_grad(dtype);
    case Epilogue::None:
      break;
  }
  return false;
}

bool pays(const GemmDesc& d) {
  switch (d.epilogue) {
    case Epilogue::Activation:
      if (!kernels::is_gated(d.activation->kind)) {
        return runs_activated_forward(d.a, d.b, d.bias, *d.activation, d.need_z);
      }
      return !d.bias.defined() && runs_gated_linear(d.a, d.b, *d.activation, false);
    case Epilogue::ActivationGrad:
      return kernels::is_gated(d.activation->kind) &&
             runs_gated_linear(d.a, d.b, *d.activation, true);
    case Epilogue::BiasGrad:
      return runs_weight_bias_grad(d.a, d.b);
    case Epilogue::None:
      break;
  }
  return false;
}

kernels::GemmResult gemm_with_epilogue(const GemmDesc& d) {
  kernels::GemmResult out;
  if (d.epilogue == Epilogue::BiasGrad) {
    auto both = linear_weight_bias_grad(d.a, d.b);
    out.y = std::move(both.dw);
    out.dbias = std::move(both.dbias);
  } else if (d.epilogue == Epilogue::ActivationGrad) {
    auto both = linear_gated_backward(d.a, d.b, *d.z, *d.activation, d.need_activated, d.over_z);
    out.y = std::move(both.dz);
    out.activated = std::move(both.a);
  } else if (kernels::is_gated(d.activation->kind)) {
    LIGATURE_CHECK(!d.bias.defined(), "[linear_gated_forward] takes no bias");
    auto both = linear_gated_forward(d.a, d.b, *d.activation);
    out.y = std::move(both.a);
    out.z = std::move(both.z);
  } else {
    auto both = linear_activated_forward(d.a, d.b, d.bias, *d.activation, d.need_z);
    out.y = std::move(both.y);
    out.z = std::move(both.z);
  }
  return out;
}

// ---- launches: one LaunchScope per direction, on the heap where launches are held

void* begin(const Tensor& input) {
  if (holds_launches()) return nullptr;
  auto scope = std::make_unique<LaunchScope>(input);
  return holds_launches() ? scope.release() : nullptr;
}

void* pause() { return holds_launches() ? new LaunchPause() : nullptr; }

constexpr kernels::Launches kLaunches{
    .begin = begin,
    .finish = [](void* held) { static_cast<LaunchScope*>(held)->finish(); },
    .abandon = [](void* held) { delete static_cast<LaunchScope*>(held); },
    .pause = pause,
    .resume = [](void* paused) { delete static_cast<LaunchPause*>(paused); },
    .holds = holds_launches,
    .hold_memory = hold_memory,
    .when_launched = when_launched,
    .is_on = launch_graphs,
    .set_on = set_launch_graphs,
    .counts = launch_counts,
};

constexpr kernels::QuantizedGemms kQuantizedGemms{
    .has = has_products_of,
    .support = quantized_support,
    .run = quantized_product,
    .run_into = quantized_product_into,
    .supports_plain = runs_gemm,
    .run_plain = scaled_product,
    .run_plain_into = scaled_product_into,
    .supports_gated = takes_gated_codes,
    .gated_pays = runs_gated_codes,
    .run_gated = linear_gated_forward_quantize,
};

const kernels::Backend kBackend{
    .name = "cuda",
    .computes_in = computes_in,
    .fast_bfloat16 = true,
    .layer_norm_forward = layer_norm_forward,
    .rms_norm_forward = rms_norm_forward,
    .layer_norm_apply = layer_norm_apply,
    .rms_norm_apply = rms_norm_apply,
    .layer_norm_backward = layer_norm_backward,
    .rms_norm_backward = rms_norm_backward,
    .l2_normalization_forward = l2_normalization_forward,
    .l2_normalization_backward = l2_normalization_backward,
    .activation_forward = activation_forward,
    .activation_forward_ = activation_forward_,
    .activation_backward = activation_backward,
    .activation_recompute = activation_recompute,
    .activation_recompute_scaled = activation_recompute_scaled,
    .bias_forward = bias_forward,
    .bias_backward = bias_backward,
    .has_dropout = computes_in,
    .dropout_forward = dropout_forward,
    .dropout_backward = dropout_backward,
    .gemm = gemm,
    .gemm_name = gemm_name,
    .grouped_gemm = grouped_gemm,
    .grouped_note =
        "the kernels for groups of rows and for routing have been compiled, and not been "
        "run on a GPU yet",
    .grouped_gemm_name = grouped_gemm_name,
    .grouped_bias_grad = grouped_bias_grad,
    .grouped_scale_grad = grouped_scale_grad,
    .route = route,
    .dispatch_rows = dispatch_rows,
    .combine_rows = combine_rows,
    .combine_weights_grad = combine_weights_grad,
    .quantize = quantize,
    .update_amax = [](const Tensor& x, Tensor& amax) { update_amax(x, amax); },
    .update_quantized_amax = [](const QuantizedMatrix& q, const Format& format,
                                Tensor& amax) { update_amax(q, format, amax); },
    .dequantize = dequantize,
    .expand = expand,
    .transpose = transpose,
    .hadamard = hadamard,
    .update_delayed = update_delayed,
    .layer_norm_forward_quantize = layer_norm_quantize,
    .rms_norm_forward_quantize = rms_norm_quantize,
    .activation_forward_quantize = activation_quantize,
    .activation_backward_quantize = activation_gradient_quantize,
    .has_epilogue = has_epilogue,
    .pays = pays,
    .gemm_with_epilogue = gemm_with_epilogue,
    .quantized_gemms = &kQuantizedGemms,
    .is_captured = [](at::Device device) { return is_captured(device); },
    .launches = &kLaunches,
};
[[maybe_unused]] const auto* const before = kernels::register_backend(at::kCUDA, &kBackend);

}  // namespace
}  // namespace ligature::cuda
