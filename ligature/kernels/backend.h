// A backend is a table of functions: what one kind of device computes kernels with. This is the one
// place that chooses one. A function that is null is work that the backend has no kernel for; the
// kernels then do it another way, or refuse it. Each backend fills in its table in a folder of its
// own below backend/ and registers it there, so nothing else knows which ones a build has.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ligature/check.h"
#include "ligature/kernels/activation.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/bias_activation.h"
#include "ligature/kernels/delayed.h"
#include "ligature/kernels/devices.h"
#include "ligature/kernels/dropout.h"
#include "ligature/kernels/gemm.h"
#include "ligature/kernels/grouped_gemm.h"
#include "ligature/kernels/launches.h"
#include "ligature/kernels/native_gemm.h"
#include "ligature/kernels/norm.h"
#include "ligature/kernels/quantize.h"
#include "ligature/kernels/routing.h"

namespace ligature::kernels {

struct Backend {
  const char* name = "";
  /// In which dtypes it computes; the rest is ATen's. Null: in all.
  bool (*computes_in)(at::ScalarType dtype) = nullptr;
  /// Is it much faster in bfloat16 than in float32, so that emulated GEMMs use it?
  bool fast_bfloat16 = false;

  // Every backend has these.
  decltype(&kernels::layer_norm_forward) layer_norm_forward = nullptr;
  decltype(&kernels::rms_norm_forward) rms_norm_forward = nullptr;
  decltype(&kernels::layer_norm_apply) layer_norm_apply = nullptr;
  decltype(&kernels::rms_norm_apply) rms_norm_apply = nullptr;
  decltype(&kernels::layer_norm_backward) layer_norm_backward = nullptr;
  decltype(&kernels::rms_norm_backward) rms_norm_backward = nullptr;
  decltype(&kernels::l2_normalization_forward) l2_normalization_forward = nullptr;
  decltype(&kernels::l2_normalization_backward) l2_normalization_backward = nullptr;
  decltype(&kernels::activation_forward) activation_forward = nullptr;
  decltype(&kernels::activation_forward_) activation_forward_ = nullptr;
  decltype(&kernels::activation_backward) activation_backward = nullptr;
  decltype(&kernels::activation_recompute) activation_recompute = nullptr;
  /// With scales, and in `dscales` their gradients where they are wanted. Null: forward and
  /// backward one after the other.
  decltype(&kernels::activation_recompute_scaled) activation_recompute_scaled = nullptr;
  decltype(&kernels::bias_forward) bias_forward = nullptr;
  decltype(&kernels::bias_backward) bias_backward = nullptr;

  // p below 1, and at least one element. Null, or a dtype that has none: torch's.
  bool (*has_dropout)(at::ScalarType dtype) = nullptr;
  decltype(&kernels::dropout_forward) dropout_forward = nullptr;
  decltype(&kernels::dropout_backward) dropout_backward = nullptr;

  /// Undefined for operands that it does not take; those are ATen's.
  Tensor (*gemm)(const GemmDesc& desc) = nullptr;
  /// Who would make it, for tensors without memory too; null for operands that it does not take.
  const char* (*gemm_name)(const GemmDesc& desc) = nullptr;

  // Rows in groups; null, or false for operands that it does not take: one group after the other,
  // which the host has to know.
  bool (*grouped_gemm)(const GroupedGemmDesc& desc) = nullptr;
  /// What explain() says of them and of routing; null for nothing.
  const char* grouped_note = nullptr;
  const char* (*grouped_gemm_name)(const GroupedGemmDesc& desc) = nullptr;
  decltype(&kernels::grouped_bias_grad) grouped_bias_grad = nullptr;
  decltype(&kernels::grouped_scale_grad) grouped_scale_grad = nullptr;

  // Routing; null: ATen's.
  decltype(&kernels::route) route = nullptr;
  decltype(&kernels::dispatch_rows) dispatch_rows = nullptr;
  decltype(&kernels::combine_rows) combine_rows = nullptr;
  decltype(&kernels::combine_weights_grad) combine_weights_grad = nullptr;

  // Low precision.
  decltype(&kernels::quantize) quantize = nullptr;
  void (*update_amax)(const Tensor& x, Tensor& amax) = nullptr;
  void (*update_quantized_amax)(const QuantizedMatrix& q, const Format& format,
                                Tensor& amax) = nullptr;
  /// Into `out`, [rows, columns].
  void (*dequantize)(const Tensor& out, const QuantizedMatrix& q, const Format& format) = nullptr;
  void (*expand)(const Tensor& out, const QuantizedMatrix& q, const Format& format) = nullptr;
  decltype(&kernels::transpose) transpose = nullptr;
  decltype(&kernels::hadamard) hadamard = nullptr;
  /// All states in one call; null: one after the other, by ATen.
  decltype(&kernels::update_delayed) update_delayed = nullptr;

  // A kernel and the cast of its result in one; has nothing for arguments that it does not take.
  std::optional<NormQuantized> (*layer_norm_forward_quantize)(const Tensor& x, const Tensor& w,
                                                              const Tensor& b, double eps,
                                                              bool zero_centered_gamma,
                                                              at::ScalarType out_dtype,
                                                              const QuantizeArgs& args) = nullptr;
  std::optional<NormQuantized> (*rms_norm_forward_quantize)(const Tensor& x, const Tensor& w,
                                                            double eps, bool zero_centered_gamma,
                                                            at::ScalarType out_dtype,
                                                            const QuantizeArgs& args) = nullptr;
  std::optional<QuantizedPair> (*activation_forward_quantize)(const Tensor& x,
                                                              const ActivationSpec& spec,
                                                              const Tensor& scales,
                                                              const QuantizeArgs& args) = nullptr;
  std::optional<ActivationBackwardQuantized> (*activation_backward_quantize)(
      const Tensor& dy, const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
      bool need_dscales, bool need_dbias, const QuantizeArgs& args) = nullptr;

  // A bias and the activation behind it.
  bool (*has_bias_activation)(at::ScalarType dtype) = nullptr;
  decltype(&kernels::bias_activation_forward) bias_activation_forward = nullptr;

  // GEMMs with an epilogue (kernels/gemm.h). Null: it has none.
  decltype(&kernels::has_epilogue) has_epilogue = nullptr;
  decltype(&kernels::pays) pays = nullptr;
  decltype(&kernels::gemm_with_epilogue) gemm_with_epilogue = nullptr;

  /// GEMMs of quantized operands; null: they are emulated.
  const QuantizedGemms* quantized_gemms = nullptr;

  /// Of memory that the host can read.
  uint64_t (*content_hash)(const void* memory, size_t bytes) = nullptr;
  /// For which processors its code is compiled, as far as they are told apart when it is loaded.
  const char* (*processor)() = nullptr;

  /// Is the device's current stream being captured into a graph?
  bool (*is_captured)(at::Device device) = nullptr;
  /// Launches that are held and go out together.
  const Launches* launches = nullptr;
};

/// Makes `backend` the one of a kind of device, or none with null, and gives the one before. It has
/// to outlive every call.
const Backend* register_backend(at::DeviceType device, const Backend* backend);

/// Composites of ATen calls, for every device that has no backend of its own.
const Backend& aten_backend();

inline const Backend& backend_for(at::DeviceType device, at::ScalarType dtype) {
  const Backend* own = own_backend(device);
  const bool serves = own != nullptr && (own->computes_in == nullptr || own->computes_in(dtype));
  return serves ? *own : aten_backend();
}

/// The backend that computes with `x`. A tensor without memory is the meta backend's.
inline const Backend& backend_for(const Tensor& x) {
  return backend_for(x.device().type(), x.scalar_type());
}

/// The backend that would compute with `x`, were it where it stands for.
inline const Backend& backend_behind(const Tensor& x) {
  return backend_for(device_behind(x), x.scalar_type());
}

/// Is the device's current stream being captured into a graph?
inline bool is_captured(at::Device device) {
  const Backend* own = own_backend(device.type());
  return own != nullptr && own->is_captured != nullptr && own->is_captured(device);
}
inline bool is_captured(const Tensor& x) { return is_captured(x.device()); }

/// Every bit of the memory counts.
inline uint64_t content_hash(const void* memory, size_t bytes) {
  return own_backend(at::kCPU)->content_hash(memory, bytes);
}

/// How an error says that a device has no backend: it names what to build.
std::string why_no_backend(at::DeviceType device);

/// The backend's function for `x`; throws where it has none.
template <class F>
F own_kernel(const char* op, const Tensor& x, F Backend::* function) {
  const F found = backend_for(x).*function;
  LIGATURE_CHECK_STATE(found != nullptr, "[", op, "] ", why_no_backend(x.device().type()));
  return found;
}

}  // namespace ligature::kernels
