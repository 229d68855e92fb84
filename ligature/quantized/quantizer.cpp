#include "ligature/quantized/quantizer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"
#include "ligature/kernels/run_context.h"
#include "ligature/meta.h"
#include "ligature/readable.h"

namespace ligature {
namespace {

std::string name_of_values() { return "a tensor to be quantized"; }

uint64_t random_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

}  // namespace

DelayedSource* DelayedSource::current() { return kernels::run_context().delayed; }
DelayedSource* DelayedSource::exchange(DelayedSource* source) {
  return std::exchange(kernels::run_context().delayed, source);
}

void DelayedScale::set_scale(at::Tensor value) {
  if (graph_scale.defined()) {
    if (!graph_scale.is_same(value)) graph_scale.copy_(value);
    value = graph_scale;
  }
  scale = std::move(value);
  ++updates;
}

Quantizer::Quantizer(Format format, Usage usage_) : usage(usage_), format_(format) {
  const std::string why = format_.why_not();
  LIGATURE_CHECK(why.empty(), why);
}

std::string Quantizer::why_not(const at::Tensor& x) const {
  const at::ScalarType dtype = x.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
    return "low precision takes float32, bfloat16 or float16, got " + to_string(ValueMeta::of(x));
  }
  if (x.dim() == 0) return "low precision takes tensors of one or more dimensions, got []";
  return "";
}

Usage Quantizer::usage_for(Usage wanted, at::Device given) const {
  const at::Device device = kernels::device_behind(given);
  if (!format_.orientations_agree() || (!wanted.rowwise && !wanted.columnwise)) return wanted;
  if (kernels::has_quantized_gemm(format_, device)) return wanted;
  return {true, false};
}

kernels::QuantizeArgs Quantizer::args(Usage wanted, at::Device device) const {
  LIGATURE_CHECK(wanted.rowwise || wanted.columnwise, "a quantizer for ", format(),
                 " was asked for neither orientation");
  kernels::QuantizeArgs out;
  out.format = format_;
  out.rowwise = wanted.rowwise;
  out.columnwise = wanted.columnwise;
  if (device.is_meta()) return out;
  out.reduce_amax = reduce_amax;
  if (format_.scaling == Scaling::Delayed) {
    DelayedSource* delayed_source = DelayedSource::current();
    LIGATURE_CHECK_STATE(delayed != nullptr && delayed->scale.defined(),
                         "a quantizer of delayed scaling has no scale");
    bool record = true;
    out.scale =
        delayed_source != nullptr ? delayed_source->scale_of(delayed, record) : delayed->scale;
    if (record) {
      out.amax = delayed_source != nullptr ? delayed_source->amax_of(delayed) : delayed->amax;
    }
  }
  // A graph draws when it runs, from the device's generator.
  if (format_.stochastic_rounding && !kernels::is_captured(device)) out.seed = random_seed();
  return out;
}

QuantizedPtr Quantizer::assemble(kernels::QuantizedPair parts, at::IntArrayRef sizes,
                                 at::ScalarType dtype) const {
  return std::make_shared<QuantizedTensor>(format_, sizes.vec(), dtype, std::move(parts),
                                           shared_from_this());
}

QuantizedPtr Quantizer::quantize(const at::Tensor& x, Usage wanted) const {
  const at::Tensor read = is_readable(x) ? x : readable(x, name_of_values);
  const std::string why = why_not(read);
  LIGATURE_CHECK_TYPE(why.empty(), why);
  const at::Tensor plain = read.is_contiguous() ? read : read.contiguous();
  return assemble(kernels::quantize(plain, args(wanted, x.device())), x.sizes(), x.scalar_type());
}

QuantizedPtr Quantizer::fit(const at::Tensor& x, Usage wanted) const {
  if (format_.scaling != Scaling::Delayed) return quantize(x, wanted);
  const std::string why = why_not(x);
  LIGATURE_CHECK_TYPE(why.empty(), why);
  const auto recipe = delayed != nullptr ? delayed->recipe.load() : nullptr;
  // A margin below zero would cut values off.
  const int64_t margin = recipe != nullptr ? std::clamp<int64_t>(margin_of(*recipe), 0, 99) : 0;
  kernels::QuantizeArgs how;
  how.format = format_;
  how.rowwise = wanted.rowwise;
  how.columnwise = wanted.columnwise;
  how.fit_to = std::ldexp(max_value(format_.element), -static_cast<int>(margin));
  const at::Tensor plain = x.is_contiguous() ? x : x.contiguous();
  return assemble(kernels::quantize(plain, how), x.sizes(), x.scalar_type());
}

void Quantizer::update(const at::Tensor& x, QuantizedTensor& to) const {
  LIGATURE_CHECK(x.sizes() == to.sizes(), "wanted a tensor of shape ", sizes_string(to.sizes()),
                 ", got ", sizes_string(x.sizes()));
  const Usage present{to.rowwise().defined(), to.columnwise().defined()};
  const bool own_scale = delayed != nullptr && delayed->recipe;
  const at::Tensor here = x.to(to.device());
  const QuantizedPtr made = own_scale ? fit(here, present) : quantize(here, present);
  to.copy_from(*made->with_dtype(to.dtype()));
}

QuantizedPtr Quantizer::make_empty(at::IntArrayRef sizes, at::ScalarType dtype,
                                   at::Device device) const {
  const at::Tensor zeros = at::zeros(sizes, at::TensorOptions(dtype).device(device));
  const std::string why = why_not(zeros);
  LIGATURE_CHECK_TYPE(why.empty(), why);
  kernels::QuantizeArgs empty;
  empty.format = format_;
  empty.rowwise = usage.rowwise;
  empty.columnwise = usage.columnwise;
  if (format_.scaling == Scaling::Delayed) empty.scale = delayed->scale;
  return assemble(kernels::quantize(zeros, empty), sizes, dtype);
}

at::Tensor Quantizer::delayed_scale() const {
  if (format_.scaling != Scaling::Delayed) return {};
  bool record = false;
  DelayedSource* delayed_source = DelayedSource::current();
  return delayed_source != nullptr ? delayed_source->scale_of(delayed, record) : delayed->scale;
}

QuantizerPtr Quantizer::again(const at::Tensor& scale) const {
  if (format_.scaling != Scaling::Delayed) return shared_from_this();
  auto made = copy();
  made->delayed = std::make_shared<DelayedScale>();
  made->delayed->scale = scale;
  return made;
}

// Undefined where nothing is to be noted.
at::Tensor Quantizer::noted_amax() const {
  if (format_.scaling != Scaling::Delayed) return {};
  bool record = true;
  DelayedSource* delayed_source = DelayedSource::current();
  if (delayed_source != nullptr) delayed_source->scale_of(delayed, record);
  if (!record) return {};
  return delayed_source != nullptr ? delayed_source->amax_of(delayed) : delayed->amax;
}

void Quantizer::calibrate(const at::Tensor& x) const {
  if (x.is_meta()) return;
  if (at::Tensor amax = noted_amax(); amax.defined()) {
    const at::Tensor read = readable(x, name_of_values);
    kernels::update_amax(read.is_contiguous() ? read : read.contiguous(), amax);
  }
}

void Quantizer::calibrate(const QuantizedTensor& x) const {
  if (x.device().is_meta()) return;
  at::Tensor amax = noted_amax();
  if (!amax.defined()) return;
  if (!x.format_tag().per_tensor()) return kernels::update_amax(x.dequantize(), amax);
  const bool rows = x.rowwise().defined();
  kernels::update_amax(rows ? x.rowwise() : x.columnwise(), x.format_tag(),
                       rows ? x.columns() : x.rows(), amax);
}

std::shared_ptr<Quantizer> make_delayed_quantizer(Element element, int64_t history,
                                                  at::Device device) {
  LIGATURE_CHECK_STATE(!kernels::is_captured(device),
                       "what delayed scaling remembers cannot be made while a CUDA graph is "
                       "captured, since each run of the graph would make it anew; run a step with "
                       "this recipe before");
  const c10::InferenceMode no_inference(false);  // it changes from step to step
  Format format;
  format.scaling = Scaling::Delayed;
  format.element = element;
  auto made = std::make_shared<Quantizer>(format);
  // A model on the meta device remembers nothing yet; its state goes where the model will go.
  const auto options = at::TensorOptions(at::kFloat).device(device.is_meta() ? at::kCPU : device);
  made->delayed = std::make_shared<DelayedScale>();
  made->delayed->scale = at::full({1}, 1.0f, options);
  made->delayed->amax = at::zeros({1}, options);
  made->delayed->history = at::zeros({history}, options);
  made->delayed->max_value = max_value(element);
  return made;
}

}  // namespace ligature
