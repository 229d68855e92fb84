// The plain tensors that a quantized tensor is made of, when they come from outside: a file, a
// checkpoint, a user. Kernels read and write their memory, so they are checked first.
#pragma once

#include <optional>

#include "ligature/quantized/quantized_tensor.h"

namespace ligature {

struct PartLayout {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;

  bool fits(const at::Tensor& part) const {
    return part.scalar_type() == dtype && part.sizes() == at::IntArrayRef(sizes);
  }
};

/// One orientation as it is stored.
struct SideLayout {
  PartLayout data;
  PartLayout scale;
  std::optional<PartLayout> amax;  ///< NVFP4 only
};

SideLayout rowwise_layout(const Format& format, at::IntArrayRef sizes);
SideLayout columnwise_layout(const Format& format, at::IntArrayRef sizes);

/// What this tensor would have to be for kernels to use its memory, and what it is: "dense, got a
/// sparse tensor". Empty when they can.
std::string why_unusable(const at::Tensor& part);

/// Why these cannot be the parts of one tensor: several devices, or memory that two of them share
/// though a write into one must not reach the other. `name_of` names one of the six (row-wise data,
/// scale, amax, column-wise ...).
std::string why_not_together(const kernels::QuantizedPair& parts,
                             const std::function<std::string(size_t)>& name_of);

}  // namespace ligature
