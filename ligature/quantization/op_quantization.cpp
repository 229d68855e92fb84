#include "ligature/quantization/op_quantization.h"

#include "ligature/ops/prepare.h"

namespace ligature {
namespace {

// Writes through `.data` do not count as a new version: a few values tell of those, too.
uint64_t sample(const Tensor& weight) {
  if (!weight.is_cpu() || !weight.is_contiguous() || weight.numel() == 0) return 0;
  const auto* bytes = static_cast<const uint8_t*>(weight.const_data_ptr());
  const int64_t size = weight.element_size();
  const int64_t n = weight.numel();
  const int64_t count = std::min<int64_t>(n, 64);
  uint64_t hash = 1469598103934665603ULL;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + (n - 1) * i / std::max<int64_t>(count - 1, 1) * size, size);
    hash = (hash ^ word) * 1099511628211ULL;
  }
  return hash;
}

// Delayed scaling: was it made with the factor that holds now? Without a change of the weight that
// would be forever the first one, which is chosen from nothing.
bool has_factor_of(const QuantizedTensor& made, const Quantizer& quantizer) {
  if (quantizer.delayed == nullptr) return true;
  const auto& part = made.rowwise().defined() ? made.rowwise() : made.columnwise();
  return part.scale.item<float>() == 1.0f / quantizer.delayed_scale().item<float>();
}

}  // namespace

bool WeightCache::holds(const Tensor& weight, Usage usage) const {
  if (quantized_ == nullptr || weight.is_inference()) return false;
  const auto alive = weight_.lock();
  return alive.get() == weight.unsafeGetTensorImpl() && version_ == weight._version() &&
         data_ == weight.const_data_ptr() && (usage_.rowwise || !usage.rowwise) &&
         (usage_.columnwise || !usage.columnwise) && sample_ == sample(weight);
}

QuantizedPtr WeightCache::get(const Tensor& weight, const Quantizer& quantizer, Usage usage) {
  if (weight.is_meta()) return quantizer.quantize(weight, usage);
  std::lock_guard<std::mutex> lock(mutex_);
  if (holds(weight, usage) && has_factor_of(*quantized_, quantizer)) return quantized_;
  QuantizedPtr made = quantizer.quantize(weight, usage);
  if (weight.is_inference()) return made;
  weight_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
      weight.getIntrusivePtr());
  version_ = weight._version();
  data_ = weight.const_data_ptr();
  sample_ = sample(weight);
  usage_ = usage;
  quantized_ = made;
  return made;
}

void WeightCache::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  quantized_ = nullptr;
}

Value quantize_to(const Value& x, const Target& target, at::ScalarType dtype) {
  if (!target) return x.is_quantized() ? x : Value(prepare(x, dtype));
  const Usage usage = target.quantizer->usage_for(target.usage, x.device());
  if (x.is_quantized()) {
    const QuantizedTensor& q = *x.quantized();
    const bool enough = q.format_tag().orientations_agree() ||
                        ((!usage.rowwise || q.rowwise().defined()) &&
                         (!usage.columnwise || q.columnwise().defined()));
    if (q.format_tag() == target.quantizer->format_tag() && enough) return x;
  }
  return target.quantizer->quantize(prepare(x, dtype), usage);
}

}  // namespace ligature
