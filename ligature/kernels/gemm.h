// The GEMMs of a linear layer, each described once: operands, what is added, where the result goes
// and what else the same kernel makes of it. Weights are [out, in] as in torch.nn.Linear, so each
// GEMM reads its operands in place: transposes are views which BLAS takes as flags.
#pragma once

#include <ATen/core/Tensor.h>

#include "ligature/kernels/activation.h"

namespace ligature::kernels {

using at::Tensor;

/// Which of a linear layer's GEMMs.
enum class LinearGemm : uint8_t {
  Forward,    ///< a b^T
  InputGrad,  ///< a b
  WeightGrad  ///< a^T b
};

/// What one kernel makes besides. Not every device and size has such kernels, and they are not
/// faster everywhere: has_epilogue() and pays() tell, and there is no other way to compute it
/// behind gemm_with_epilogue().
enum class Epilogue : uint8_t {
  None,
  Activation,      ///< of Forward: the activation of z = a b^T + bias, and z where it is wanted
  ActivationGrad,  ///< of InputGrad: the activation's gradient at z for a b, which is rounded as if
                   ///< it had been written; and the activation of z where it is wanted
  BiasGrad,        ///< of WeightGrad: the sums of `a` over its rows too
};

/// One GEMM, as a backend is given it: alpha times the product, plus bias and add.
struct GemmDesc {
  LinearGemm kind;
  const Tensor& a;
  const Tensor& b;
  const Tensor& bias;  ///< may be undefined, and so may `add`
  const Tensor& add;
  double alpha = 1.0;
  Tensor* out = nullptr;    ///< where the result goes; null for a new tensor
  bool accumulate = false;  ///< it is added to what is in `out`

  Epilogue epilogue = Epilogue::None;
  const ActivationSpec* activation = nullptr;  ///< of the two epilogues that have one
  const Tensor* z = nullptr;                   ///< of ActivationGrad
  bool need_z = false;                         ///< of Activation
  bool need_activated = false;                 ///< of ActivationGrad
  bool over_z = false;                         ///< ActivationGrad may write its result over z
};

/// What a GEMM with an epilogue gives.
struct GemmResult {
  Tensor y;          ///< the activation, the gradient of z, or the weight's gradient
  Tensor z;          ///< of Activation, where it was wanted
  Tensor activated;  ///< of ActivationGrad, where it was wanted
  Tensor dbias;      ///< of BiasGrad, in the operands' dtype
};

/// All dimensions but the last.
int64_t row_count(const Tensor& t);

/// Has the device GEMMs with this epilogue in this dtype which are faster at some size?
/// `activation` may be null for BiasGrad.
bool has_epilogue(Epilogue epilogue, const ActivationSpec* activation, at::ScalarType dtype,
                  at::Device device);
/// Is there a kernel for this GEMM with its epilogue, and is it faster than one after the other?
/// Tensors without memory are asked as those that they stand for.
bool pays(const GemmDesc& desc);
GemmResult gemm_with_epilogue(const GemmDesc& desc);

/// y = alpha * x w^T + bias + add, with x [..., k], w [m, k], bias [m], add and y [..., m].
Tensor linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias = {},
                      const Tensor& add = {}, double alpha = 1.0);

/// y += alpha * x w^T + bias, in place.
void linear_forward_add_(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias = {},
                         double alpha = 1.0);

/// dx = alpha * dy w + add, with dy [..., m], w [m, k], add and dx [..., k].
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, const Tensor& add = {},
                         double alpha = 1.0);

/// dw = alpha * dy^T x, [m, k].
Tensor linear_weight_grad(const Tensor& dy, const Tensor& x, double alpha = 1.0);

/// out = alpha * dy^T x, or out += alpha * dy^T x. `out` may be float32 while the operands are
/// bfloat16 or half; nothing is then rounded to the operands' type.
void linear_weight_grad_into(Tensor& out, const Tensor& dy, const Tensor& x, bool accumulate,
                             double alpha = 1.0);

// The same with an epilogue, for operands for which it pays.

/// The activation of x w^T + bias.
GemmDesc activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                           const ActivationSpec& activation, bool need_z);
/// The activation's gradient at z for dy w.
GemmDesc activated_input_grad(const Tensor& dy, const Tensor& w, const Tensor& z,
                              const ActivationSpec& activation, bool need_activated, bool over_z);
/// dy^T x and the sums of dy over its rows.
GemmDesc weight_and_bias_grad(const Tensor& dy, const Tensor& x);

}  // namespace ligature::kernels
