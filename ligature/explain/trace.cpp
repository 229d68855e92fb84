#include "ligature/explain/trace.h"

namespace ligature {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kBool:
      return "bool";
    case at::kByte:
      return "uint8";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    default:
      return c10::toString(dtype);
  }
}

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
