// The torch side of the products with a gated activation: which tensors they take, memory and
// launches.
#include "ligature/backend/cuda/gated_linear.h"

#include "ligature/backend/cuda/activation.h"
#include "ligature/backend/cuda/gemm_tensor.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/wgmma_launch.h"
#include "ligature/kernels/devices.h"

namespace ligature::cuda {
namespace {

/// Also a tensor without memory that stands for one here: what a plan would run is asked with it.
bool readable(const Tensor& t) {
  const bool here = t.is_cuda() || (t.is_meta() && kernels::device_behind(t) == at::kCUDA);
  return here && t.scalar_type() == at::kBFloat16 && t.is_contiguous() && !t.is_neg();
}

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

GatedLinearArgs args_of(const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                        bool backward) {
  GatedLinearArgs args;
  args.k = x.size(-1);
  args.rows = args.k == 0 ? 0 : x.numel() / args.k;
  args.units = backward ? w.size(1) : w.size(0) / 2;
  if (!x.is_meta()) args.x = x.const_data_ptr();
  if (!w.is_meta()) args.w = w.const_data_ptr();
  args.params = params_of(spec);
  return args;
}

void check_taken(const char* op, const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                 bool backward) {
  LIGATURE_CHECK(takes_gated_linear(x, w, spec, backward), "[", op,
                 "] operands must be what its kernels take, got ", x.scalar_type(), " of shape ",
                 x.sizes(), " and ", w.scalar_type(), " of shape ", w.sizes(), " for ",
                 kernels::activation_name(spec.kind));
}

}  // namespace

bool has_gated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device) {
  const bool kind =
      spec.kind == kernels::ActivationKind::SwiGLU || spec.kind == kernels::ActivationKind::GEGLU;
  if (!kind || spec.glu_interleave_size != 0 || dtype != at::kBFloat16) return false;
  const DeviceGuard guard(device);
  return has_gated_forward() && has_gated_backward();
}

bool takes_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                        bool backward) {
  if (!readable(x) || !readable(w) || x.device() != w.device() || x.dim() == 0 || w.dim() != 2 ||
      x.size(-1) != w.size(backward ? 0 : 1) || (!backward && w.size(0) % 2 != 0)) {
    return false;
  }
  const DeviceGuard guard(place_of(x));
  const GatedLinearArgs args = args_of(x, w, spec, backward);
  return backward ? gated_backward_fits(args) : gated_forward_fits(args);
}

bool runs_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                       bool backward) {
  if (!takes_gated_linear(x, w, spec, backward)) return false;
  const int count = at::cuda::getDeviceProperties(place_of(x).index())->multiProcessorCount;
  return choose_gated(backward ? GatedLinear::Backward : GatedLinear::Forward,
                      args_of(x, w, spec, backward), count)
      .pays;
}

GatedForward linear_gated_forward(const Tensor& x, const Tensor& w, const ActivationSpec& spec) {
  check_taken("linear_gated_forward", x, w, spec, false);
  const DeviceGuard guard(x.device());
  GatedForward result{empty_rows(x, w.size(0)), empty_rows(x, w.size(0) / 2)};
  GatedLinearArgs args = args_of(x, w, spec, false);
  args.out = result.z.mutable_data_ptr();
  args.activated = result.a.mutable_data_ptr();
  launch<&launch_gated_forward>("linear_gated_forward", stream_of(x), args, sm_count(x));
  return result;
}

GatedBackward linear_gated_backward(const Tensor& dy, const Tensor& w, const Tensor& z_,
                                    const ActivationSpec& spec, bool need_a, bool over_z) {
  check_taken("linear_gated_backward", dy, w, spec, true);
  LIGATURE_CHECK_TYPE(z_.scalar_type() == dy.scalar_type() && z_.device() == dy.device(),
                      "[linear_gated_backward] z must be ", dy.scalar_type(), " on ", dy.device(),
                      ", got ", z_.scalar_type(), " on ", z_.device());
  const DeviceGuard guard(dy.device());
  const bool in_place = readable(z_) && aligned(z_);
  const Tensor z = in_place ? z_ : z_.clone(at::MemoryFormat::Contiguous);
  GatedBackward result;
  result.dz = over_z || !in_place ? z : empty_rows(dy, 2 * w.size(1));
  if (need_a) result.a = empty_rows(dy, w.size(1));
  GatedLinearArgs args = args_of(dy, w, spec, true);
  args.z = z.const_data_ptr();
  args.out = result.dz.mutable_data_ptr();
  args.activated = mutable_data_of(result.a);
  launch<&launch_gated_backward>("linear_gated_backward", stream_of(dy), args, sm_count(dy));
  return result;
}

}  // namespace ligature::cuda
