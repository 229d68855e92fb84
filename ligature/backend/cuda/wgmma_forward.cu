// A linear layer and the gated activation behind it.
#include "ligature/backend/cuda/wgmma_gemm.cuh"

namespace ligature::cuda {
namespace {

using Alone = WgmmaTile<WgmmaForm::Forward, 1, 3, 0, true>;
using Pair = WgmmaTile<WgmmaForm::Forward, 2, 3, 0, true>;
using SwiGLU = ActivationFunctor<Activation::SwiGLU>;
using GEGLU = ActivationFunctor<Activation::GEGLU>;

template <typename F>
bool launch(const GatedLinearArgs& args, int sm_count, Stream stream) {
  const GatedChoice choice = choose_gated(GatedLinear::Forward, args, sm_count);
  if (choice.tile == GatedTile::Alone) return launch_wgmma<Alone, F>(args, sm_count, stream);
  return launch_wgmma<Pair, F>(args, sm_count, stream);
}

}  // namespace

bool has_gated_forward() { return has_wgmma_code<Alone, SwiGLU>(); }

bool launch_gated_forward(const GatedLinearArgs& args, int sm_count, Stream stream) {
  if (args.params.kind == Activation::GEGLU) return launch<GEGLU>(args, sm_count, stream);
  return launch<SwiGLU>(args, sm_count, stream);
}

}  // namespace ligature::cuda
