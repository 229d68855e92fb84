// Steps that fused operations share: what a fused forward leaves in the contexts of the basic
// operations it covers, and a GEMM that adds what it is given.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/kernels/gemm.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"

namespace ligature {

/// Room for `n` basic operations.
FuserForwardResult fused_forward_result(Value output, size_t n);
FuserBackwardResult fused_backward_result(size_t n);

/// Saves what `op` would have saved alone, if it runs in backward.
void save_basic_op(BasicOperation& op, OperationContext& ctx, const Value& input, ToSave to_save,
                   const OpArgs& args);

/// The operands of a linear followed by a bias, which may be null.
LinearFwdArgs linear_bias_args(const BasicLinearImpl& linear, const BiasImpl* bias,
                               const Value& input, const OpArgs& linear_args,
                               const OpArgs* bias_args, bool pieces = false);

/// Is one kernel for the linear of `fwd` and the activation after it, in the format of `target`,
/// faster than the two one after the other?
bool activation_in_gemm_pays(const LinearFwdArgs& fwd, const kernels::ActivationSpec& spec,
                             const Target& target, bool need_z);

struct LinearActivation {
  Tensor z;  ///< of the linear; may be undefined where it was not asked for
  Value a;
};
/// Runs it.
LinearActivation activation_in_gemm(const LinearFwdArgs& fwd, const kernels::ActivationSpec& spec,
                                    const Target& target, bool need_z);

/// The same for the input's gradient of a linear and the gradient of the activation before it,
/// whose input was `z`.
bool activation_grad_in_gemm_pays(const LinearBwdArgs& args, const Value& z,
                                  const kernels::ActivationSpec& spec);

/// Is the gradient of the bias after a linear left to the linear's backward? Where the device may
/// have it with the weight's, and it is the same as the bias' own.
bool leaves_bias_grad(const OperationContext& linear, const OperationContext& bias,
                      const Value& grad_output);

/// The linear of `fwd`, then `add` with `extra`: in one GEMM where the result is the same as that
/// of the two one after the other.
Tensor linear_forward_add(LinearFwdArgs fwd, const AddExtraInputImpl& add, const Tensor& extra);

/// Why a fusion does not cover a linear that is spread over ranks in one of these ways: what it
/// would do to the result has to wait until the ranks' parts are added up. Empty where it does.
std::string why_not_parallel(at::ArrayRef<OpPtr> ops, bool column, bool row);

/// In-place addition into the memory of an input that the linear before it saves. Version counters
/// catch it between two steps, but not inside one.
void check_input_survives(const Value& input, const OpArgs& linear_args,
                          const AddExtraInputImpl& add, const Tensor& extra);

}  // namespace ligature
