// The functions that graphs call, through torch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "ligature/compile/flat.h"

namespace ligature::compile {

using ForwardOp = std::vector<Tensor>(const Tensor& input, at::TensorList params,
                                      at::TensorList extra_inputs, at::TensorList scales,
                                      const Tensor& owner, int64_t fuser, int64_t call,
                                      int64_t structure);
using BackwardOp = std::vector<Tensor>(const c10::List<std::optional<Tensor>>& grads,
                                       at::TensorList kept, const Tensor& owner,
                                       c10::SymIntArrayRef sizes, int64_t fuser, int64_t call,
                                       int64_t structure);

/// Those for calls that are closed (FlatCall::is_closed), or for others.
const c10::TypedOperatorHandle<ForwardOp>& forward_op(bool closed);
const c10::TypedOperatorHandle<BackwardOp>& backward_op(bool closed);

}  // namespace ligature::compile
