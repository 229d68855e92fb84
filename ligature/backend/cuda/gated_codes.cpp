// The torch side of the products of FP8 operands with a gated activation.
#include "ligature/backend/cuda/activation.h"
#include "ligature/backend/cuda/gated_linear.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/quantize.h"
#include "ligature/backend/cuda/quantize_launch.h"
#include "ligature/backend/cuda/wgmma_launch.h"

namespace ligature::cuda {
namespace {

bool is_read(const QuantizedOperand& q) {
  return q.format.per_tensor() && q.format.element == Element::E4M3 &&
         q.matrix.data.is_contiguous();
}

GatedLinearArgs args_of(const QuantizedOperand& x, const QuantizedOperand& w,
                        const ActivationSpec& spec) {
  GatedLinearArgs args;
  args.rows = x.rows;
  args.units = w.rows / 2;
  args.k = x.k;
  args.params = params_of(spec);
  if (x.matrix.data.is_meta()) return args;
  args.x = x.matrix.data.const_data_ptr();
  args.w = w.matrix.data.const_data_ptr();
  args.codes.x_scale = x.matrix.scale.const_data_ptr<float>();
  args.codes.w_scale = w.matrix.scale.const_data_ptr<float>();
  return args;
}

}  // namespace

bool takes_gated_codes(const QuantizedOperand& x, const QuantizedOperand& w,
                       const ActivationSpec& spec, const Format& to) {
  if (!is_read(x) || !is_read(w) || x.k != w.k || w.rows % 2 != 0 || !to.per_tensor() ||
      to.element != Element::E4M3) {
    return false;
  }
  const DeviceGuard guard(place_of(x.matrix.data));
  return gated_codes_fit(args_of(x, w, spec));
}

bool runs_gated_codes(const QuantizedOperand& x, const QuantizedOperand& w,
                      const ActivationSpec& spec, const Format& to) {
  const int count =
      at::cuda::getDeviceProperties(place_of(x.matrix.data).index())->multiProcessorCount;
  return choose_gated(GatedLinear::ForwardCodes, args_of(x, w, spec), count).pays &&
         takes_gated_codes(x, w, spec, to);
}

GatedForwardQuantized linear_gated_forward_quantize(const QuantizedOperand& x,
                                                    const QuantizedOperand& w,
                                                    const ActivationSpec& spec,
                                                    const QuantizeArgs& to, bool need_z) {
  const Tensor& codes = x.matrix.data;
  const at::Device device = codes.device();
  const DeviceGuard guard(device);
  const Stream stream = stream_of(codes);
  GatedLinearArgs args = args_of(x, w, spec);
  GatedForwardQuantized result;
  if (need_z) result.z = empty_on({x.rows, w.rows}, at::kBFloat16, device);
  args.out = mutable_data_of(result.z);
  Tensor a;  // where its largest value has to be known before it is cast
  result.a = quantize_by(args.rows, args.units, codes, to, [&](const QuantizePlan& plan) {
    if (a.defined()) {
      launch<&launch_quantize>("quantize", stream, a.const_data_ptr(), Type::BFloat16, plan);
      return;
    }
    args.codes.amax = plan.amax;
    if (plan.find_amax) {
      a = empty_on({args.rows, args.units}, at::kBFloat16, device);
      args.activated = a.mutable_data_ptr();
    } else {
      args.codes.factor = plan.factor;
      args.codes.rowwise = plan.rowwise.data;
      args.codes.columnwise = plan.columnwise.data;
      args.codes.scale = static_cast<float*>(plan.rowwise.data != nullptr ? plan.rowwise.scale
                                                                          : plan.columnwise.scale);
    }
    launch<&launch_gated_codes>("linear_gated_forward_quantize", stream, args, sm_count(codes));
  });
  return result;
}

}  // namespace ligature::cuda
