// The two interfaces through which operations see low precision: a quantizer builds quantized
// tensors, a quantized tensor can be taken apart for saving and turned back into a plain tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace ligature {

class QuantizedTensor {
 public:
  virtual ~QuantizedTensor() = default;
  /// Name of the format, as a plan shows it on an edge.
  virtual std::string format() const = 0;
  virtual at::IntArrayRef sizes() const = 0;
  /// Dtype of the tensor it stands for.
  virtual at::ScalarType dtype() const = 0;
  virtual at::Device device() const = 0;
  virtual at::Tensor dequantize() const = 0;
  /// The plain tensors it is made of, in a fixed order ...
  virtual std::vector<at::Tensor> tensors() const = 0;
  /// ... and the same quantized tensor made of these (unpacked from saved tensors).
  virtual std::shared_ptr<QuantizedTensor> with_tensors(std::vector<at::Tensor> tensors) const = 0;
};

class Quantizer {
 public:
  virtual ~Quantizer() = default;
  virtual std::string format() const = 0;
  virtual std::shared_ptr<QuantizedTensor> quantize(const at::Tensor& x) const = 0;
};

using QuantizerPtr = std::shared_ptr<const Quantizer>;

/// What a recipe is to a plan: something that can change, and by which plans differ.
class Recipe {
 public:
  virtual ~Recipe() = default;
  /// Equal keys mean equal plans: the type and every field.
  virtual std::string key() const = 0;
};

}  // namespace ligature
