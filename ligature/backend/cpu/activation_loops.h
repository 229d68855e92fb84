// The inner loops of the activations over pieces of at most kPiece elements, behind function
// pointers: the choice among kinds is made once per call, and each loop is compiled twice (float,
// double) whatever the tensors' dtypes.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::cpu {

constexpr int64_t kPiece = 512;

/// For plain activations `b` and `db` are null. `y` may be `a` itself.
template <typename C>
struct ActivationLoops {
  using Forward = void (*)(const kernels::ActivationSpec& spec, const C* a, const C* b, C* y,
                           int64_t n);
  using Backward = void (*)(const kernels::ActivationSpec& spec, const C* dy, const C* a,
                            const C* b, C* y, C* da, C* db, int64_t n);
  Forward forward;
  Backward backward;
};

template <typename C>
ActivationLoops<C> activation_loops(kernels::ActivationKind kind);

}  // namespace ligature::cpu
