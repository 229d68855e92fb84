#include "ligature/backend/cpu/gemm.h"

#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/product.h"

namespace ligature::cpu {
namespace {

using at::Tensor;
using kernels::GemmDesc;
using kernels::LinearGemm;

/// An operand as it is, or as a copy would be.
Matrix operand(const Tensor& t) {
  if (!needs_copy(t)) return Matrix(t);
  Matrix m;
  m.dtype = t.scalar_type();
  m.columns = t.size(-1);
  m.rows = kernels::row_count(t);
  return m.copied();
}

Product product_of(const GemmDesc& d) {
  const Matrix a = operand(d.a), b = operand(d.b);
  const Matrix add(d.accumulate ? *d.out : d.add);
  switch (d.kind) {
    case LinearGemm::Forward:
      return {a, b, operand(d.bias), add, d.alpha};
    case LinearGemm::InputGrad:
      return {a, b.transposed(), {}, add, d.alpha};
    case LinearGemm::WeightGrad:
      break;
  }
  return {a.transposed(), b.transposed(), {}, add, d.alpha};
}

Tensor new_result(const GemmDesc& d) {
  if (d.kind == LinearGemm::WeightGrad) {
    return new_tensor({d.a.size(-1), d.b.size(-1)}, d.a.scalar_type());
  }
  at::DimVector shape(d.a.sizes());
  shape.back() = d.b.size(d.kind == LinearGemm::Forward ? 0 : 1);
  return new_tensor(shape, d.a.scalar_type());
}

bool pays(const GemmDesc& d, const Product& product) {
  return d.out == nullptr ? runs_multiply(product)
                          : runs_multiply(product, Matrix::of_result(*d.out));
}

}  // namespace

Tensor gemm(const GemmDesc& d) {
  const Product product = product_of(d);
  if (!pays(d, product)) return {};
  if (needs_copy(d.a) || needs_copy(d.b) || needs_copy(d.bias)) {
    const Tensor a = d.a.contiguous(), b = needs_copy(d.b) ? d.b.contiguous() : d.b,
                 bias = d.bias.defined() ? d.bias.contiguous() : d.bias;
    return gemm({d.kind, a, b, bias, d.add, d.alpha, d.out, d.accumulate});
  }
  if (!has_memory(product)) return {};
  Tensor out = d.out == nullptr ? new_result(d) : *d.out;
  multiply(product, Matrix::of_result(out));
  return out;
}

const char* gemm_name(const GemmDesc& d) { return pays(d, product_of(d)) ? "cpu" : nullptr; }

}  // namespace ligature::cpu
