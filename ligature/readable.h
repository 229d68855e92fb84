// Tensors that come from outside, as kernels read them. The fuser looks at every one of them before
// a kernel is given it.
#pragma once

#include "ligature/kernels/stored.h"

namespace ligature {

class Value;

/// `t` as kernels read it: itself, or, where torch works values out when they are asked for (a
/// negative bit, zeros without memory, a quantized tensor), a tensor that holds them. Throws for
/// any other tensor without memory.
Tensor readable(const Tensor& t, TensorName name);
/// The same, but a quantized value stays one; its parts are looked at.
Value readable(const Value& v, TensorName name);
/// Throws unless `t` has memory that can be written to, by torch's functions at least.
void check_writable(const Tensor& t, TensorName name);

/// The same tensor, or views of one memory.
bool share_memory(const Tensor& a, const Tensor& b);

}  // namespace ligature
