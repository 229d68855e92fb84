#include "ligature/kernels/backend.h"

#include <string_view>

#include "ligature/backend/cpu/activation.h"
#include "ligature/backend/cpu/bias.h"
#include "ligature/backend/cpu/bias_activation.h"
#include "ligature/backend/cpu/content_hash.h"
#include "ligature/backend/cpu/dropout.h"
#include "ligature/backend/cpu/gemm.h"
#include "ligature/backend/cpu/grouped_gemm.h"
#include "ligature/backend/cpu/norm.h"
#include "ligature/backend/cpu/quantize.h"
#include "ligature/backend/cpu/quantize_rows.h"
#include "ligature/backend/cpu/routing.h"
#include "ligature/backend/cpu/vector_math.h"

#define LIGATURE_TEXT_OF_EXPANDED(...) #__VA_ARGS__
#define LIGATURE_TEXT_OF(...) LIGATURE_TEXT_OF_EXPANDED(__VA_ARGS__)

namespace ligature::cpu {
namespace {

// The kernels' attribute names the processors they are compiled for; the loader takes the first
// that fits.
const char* processor() {
  constexpr std::string_view clones = LIGATURE_TEXT_OF(LIGATURE_SIMD);
  constexpr std::string_view known = R"(("arch=x86-64-v4", "arch=x86-64-v3", "default"))";
  static_assert(clones.empty() || clones.find(known) != clones.npos,
                "teach processor() the processors that LIGATURE_SIMD names");
#if defined(__x86_64__)
  if (!clones.empty() && __builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  return !clones.empty() && __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3" : "x86-64";
#else
  return "the compiler's default";
#endif
}

const kernels::Backend kBackend{
    .name = "cpu",
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
    .has_dropout = [](at::ScalarType dtype) { return dtype != at::kDouble; },
    .dropout_forward = dropout_forward,
    .dropout_backward = dropout_backward,
    .gemm = gemm,
    .gemm_name = gemm_name,
    .grouped_gemm = grouped_gemm,
    .grouped_gemm_name = grouped_gemm_name,
    .grouped_bias_grad = grouped_bias_grad,
    .grouped_scale_grad = grouped_scale_grad,
    .route = route,
    .dispatch_rows = dispatch_rows,
    .combine_rows = combine_rows,
    .combine_weights_grad = combine_weights_grad,
    .quantize = [](const Tensor& x, const QuantizeArgs& args) { return cpu::quantize(x, args); },
    .update_amax = [](const Tensor& x, Tensor& amax) { update_amax(x, amax); },
    .update_quantized_amax = [](const QuantizedMatrix& q, const Format& format,
                                Tensor& amax) { update_amax(q, format, amax); },
    .dequantize = dequantize,
    .expand = expand,
    .transpose = transpose,
    .hadamard = hadamard,
    .layer_norm_forward_quantize = layer_norm_forward_quantize,
    .rms_norm_forward_quantize = rms_norm_forward_quantize,
    .activation_forward_quantize = activation_forward_quantize,
    .activation_backward_quantize = activation_backward_quantize,
    .has_bias_activation = [](at::ScalarType dtype) { return dtype != at::kHalf; },
    .bias_activation_forward = bias_activation_forward,
    .content_hash = content_hash,
    .processor = processor,
};
[[maybe_unused]] const auto* const before = kernels::register_backend(at::kCPU, &kBackend);

}  // namespace
}  // namespace ligature::cpu
