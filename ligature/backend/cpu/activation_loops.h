// The inner loops of the activations over pieces of a tensor, behind function
// pointers: the choice among kinds is made once per call, and each loop is compiled for three types
// (float, double, bfloat16) whatever the tensors' dtypes.
#pragma once

#include "ligature/backend/cpu/typed_io.h"
#include "ligature/kernels/activation.h"

namespace ligature::cpu {

/// What a backward reads and writes. For plain activations `b` and `db` are null. `da` may be `a`
/// itself, `db` `b`, and `y`, the forward's result, `dy`.
template <typename T>
struct BackwardPiece {
  const T* dy;
  const T* a;
  const T* b;
  T* da;
  T* db;
  T* y = nullptr;                     // for backward_again
  ComputeType<T>* da_sums = nullptr;  // for backward_sums: da and db, not rounded, are added
  ComputeType<T>* db_sums = nullptr;
};

template <typename T>
struct ActivationLoops {
  /// `b` is null for plain activations. `y` may be `a` itself.
  using Forward = void (*)(const kernels::ActivationSpec& spec, const T* a, const T* b, T* y,
                           int64_t n);
  using Backward = void (*)(const kernels::ActivationSpec& spec, const BackwardPiece<T>& piece,
                            int64_t n);
  Forward forward;
  Backward backward;
  Backward backward_recompute;  ///< gives y too
  Backward backward_sums;       ///< adds to the sums too
};

template <typename T>
ActivationLoops<T> activation_loops(kernels::ActivationKind kind);

}  // namespace ligature::cpu
