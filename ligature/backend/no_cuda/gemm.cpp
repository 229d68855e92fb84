// See absent.h.
#include "ligature/backend/cuda/gemm.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

bool has_gemm(at::ScalarType) { return false; }

bool runs_gemm(const Tensor&, const Tensor&) { return false; }

Tensor linear_forward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double) {
  refuse("linear_forward");
}

void linear_forward_add_(Tensor&, const Tensor&, const Tensor&, const Tensor&, double) {
  refuse("linear_forward_add_");
}

Tensor linear_input_grad(const Tensor&, const Tensor&, const Tensor&, double) {
  refuse("linear_input_grad");
}

Tensor linear_weight_grad(const Tensor&, const Tensor&, double) { refuse("linear_weight_grad"); }

void linear_weight_grad_into(Tensor&, const Tensor&, const Tensor&, bool, double) {
  refuse("linear_weight_grad_into");
}

Tensor scaled_product(const Tensor&, const Tensor&, const ProductTerms&) {
  refuse("scaled_product");
}

void scaled_product_into(Tensor&, const Tensor&, const Tensor&, bool, const ProductTerms&) {
  refuse("scaled_product_into");
}

QuantizedSupport quantized_support(const QuantizedOperand&, const QuantizedOperand&,
                                   at::ScalarType) {
  return QuantizedSupport::No;
}

bool has_products_of(const Format&, at::Device) { return false; }

Tensor quantized_product(const QuantizedOperand&, const QuantizedOperand&, const ProductTerms&) {
  refuse("quantized_product");
}

void quantized_product_into(Tensor&, const QuantizedOperand&, const QuantizedOperand&, bool,
                            const ProductTerms&) {
  refuse("quantized_product_into");
}

}  // namespace ligature::cuda
