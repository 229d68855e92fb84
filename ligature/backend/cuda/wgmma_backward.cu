// The gradient of a linear layer's input, and of the gated activation before it.
#include "ligature/backend/cuda/wgmma_gemm.cuh"

namespace ligature::cuda {
namespace {

using Pair = WgmmaTile<WgmmaForm::Backward, 2, 3, 0, true>;
using Skewed = WgmmaTile<WgmmaForm::Backward, 2, 4, 2, false>;
using Both = WgmmaTile<WgmmaForm::BackwardBoth, 2, 3, 0, true>;
using SwiGLU = ActivationFunctor<Activation::SwiGLU>;
using GEGLU = ActivationFunctor<Activation::GEGLU>;

template <typename F>
bool launch(const GatedLinearArgs& args, int sm_count, Stream stream) {
  if (args.activated != nullptr) return launch_wgmma<Both, F>(args, sm_count, stream);
  const GatedChoice choice = choose_gated(GatedLinear::Backward, args, sm_count);
  if (choice.tile == GatedTile::Skewed) return launch_wgmma<Skewed, F>(args, sm_count, stream);
  return launch_wgmma<Pair, F>(args, sm_count, stream);
}

}  // namespace

bool has_gated_backward() { return has_wgmma_code<Pair, SwiGLU>(); }

bool launch_gated_backward(const GatedLinearArgs& args, int sm_count, Stream stream) {
  if (args.params.kind == Activation::GEGLU) return launch<GEGLU>(args, sm_count, stream);
  return launch<SwiGLU>(args, sm_count, stream);
}

}  // namespace ligature::cuda
