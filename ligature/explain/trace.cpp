#include "ligature/explain/trace.h"

namespace ligature {

TracedValue TracedValue::of(const ValueMeta& meta) {
  return {dtype_name(meta.dtype),
          {meta.sizes.begin(), meta.sizes.end()},
          meta.numel() * static_cast<int64_t>(c10::elementSize(meta.dtype))};
}

TracedValue TracedValue::of(const Value& value) {
  if (!value.defined()) return {};
  TracedValue out = of(ValueMeta::of(value));
  if (!value.is_quantized()) return out;
  out.format = value.quantized()->format();
  out.bytes = 0;
  for (const Tensor& part : value.quantized()->tensors()) out.bytes += part.nbytes();
  return out;
}

}  // namespace ligature
