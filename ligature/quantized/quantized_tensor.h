// A tensor in a low-precision format: bytes, scales, and what it stands for. One type for all
// formats, told apart by a tag.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ligature/kernels/quantize.h"

namespace ligature {

class Quantizer;
using QuantizerPtr = std::shared_ptr<const Quantizer>;

class QuantizedTensor {
 public:
  QuantizedTensor(Format format, std::vector<int64_t> sizes, at::ScalarType dtype,
                  kernels::QuantizedPair parts, QuantizerPtr quantizer = nullptr);

  /// Name of the format, as a plan shows it on an edge.
  std::string format() const { return format_.name(); }
  const Format& format_tag() const { return format_; }
  at::IntArrayRef sizes() const { return sizes_; }
  /// Dtype of the tensor it stands for.
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }
  int64_t rows() const;
  int64_t columns() const { return sizes_.back(); }
  int64_t bytes() const;
  /// Are its parts inference tensors? Then what stands for it or for a view of it is one, too.
  bool is_inference() const;

  const kernels::QuantizedPair& parts() const { return parts_; }
  const kernels::QuantizedMatrix& rowwise() const { return parts_.rowwise; }
  const kernels::QuantizedMatrix& columnwise() const { return parts_.columnwise; }
  /// What made it and can make it anew; null when taken from a file.
  const QuantizerPtr& quantizer() const { return quantizer_; }
  void set_quantizer(QuantizerPtr quantizer) { quantizer_ = std::move(quantizer); }

  /// The values, from row-wise data where there is some, rounded once.
  at::Tensor dequantize(std::optional<at::ScalarType> dtype = std::nullopt) const;

  /// The plain tensors it is made of, in a fixed order ...
  std::vector<at::Tensor> tensors() const;
  /// ... and the same quantized tensor made of these (unpacked from saved tensors).
  std::shared_ptr<QuantizedTensor> with_tensors(std::vector<at::Tensor> tensors) const;
  /// Itself without memory, for with_tensors later.
  std::shared_ptr<QuantizedTensor> shell() const;

  /// The same data under another shape with the same last dimension; as another dtype; only one
  /// orientation of it. Memory is shared.
  std::shared_ptr<QuantizedTensor> view(std::vector<int64_t> sizes) const;
  std::shared_ptr<QuantizedTensor> with_dtype(at::ScalarType dtype) const;
  std::shared_ptr<QuantizedTensor> only(bool rowwise, bool columnwise) const;
  /// Every tensor through `f`: a copy, a move to another device.
  std::shared_ptr<QuantizedTensor> map(const std::function<at::Tensor(const at::Tensor&)>& f) const;

  /// Adds an orientation that can be made from the other; refuses where it cannot.
  void make_usage(bool rowwise, bool columnwise);
  /// Writes the values of another tensor in the same format and layout into this one's memory.
  void copy_from(const QuantizedTensor& other);

 private:
  Format format_;
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_;
  at::Device device_ = at::kCPU;
  kernels::QuantizedPair parts_;
  QuantizerPtr quantizer_;
  uint8_t present_ = 0;  // which of the six tensors there are, also in a shell
};

using QuantizedPtr = std::shared_ptr<QuantizedTensor>;

/// The quantized tensor behind a torch tensor that only stands for one; null for any other.
QuantizedPtr quantized_of(const at::Tensor& tensor);
/// Makes `wrapper` stand for it.
void attach_quantized(const at::Tensor& wrapper, QuantizedPtr quantized);

/// A torch tensor that stands for it: shape, dtype and a place in the autograd graph, but no
/// memory. Torch's functions take it (torch_functions.cpp). A language binding may make its own
/// kind.
at::Tensor wrap_quantized(const QuantizedPtr& quantized);
void set_quantized_wrapper(std::function<at::Tensor(const QuantizedPtr&)> wrapper);

/// The values of a weight before it was quantized, on the CPU; undefined where they were not kept
/// (QuantizedModelInit) or were dropped.
at::Tensor high_precision_init_val(const at::Tensor& weight);
void set_high_precision_init_val(const at::Tensor& weight, at::Tensor values);
void clear_high_precision_init_val(const at::Tensor& weight);

}  // namespace ligature
