// A linear layer of FP8 operands and the gated activation behind it.
#include "ligature/backend/cuda/wgmma_gemm.cuh"

namespace ligature::cuda {
namespace {

using Codes = WgmmaTile<WgmmaForm::ForwardCodes, 2, 3, 0, true>;
using Cast = WgmmaTile<WgmmaForm::ForwardCast, 2, 3, 0, true>;
using SwiGLU = ActivationFunctor<Activation::SwiGLU>;
using GEGLU = ActivationFunctor<Activation::GEGLU>;

template <typename F>
bool launch(const GatedLinearArgs& args, int sm_count, Stream stream) {
  if (args.codes.factor != nullptr) return launch_wgmma<Cast, F>(args, sm_count, stream);
  return launch_wgmma<Codes, F>(args, sm_count, stream);
}

}  // namespace

bool has_gated_codes() { return has_wgmma_code<Cast, SwiGLU>(); }

bool launch_gated_codes(const GatedLinearArgs& args, int sm_count, Stream stream) {
  if (args.params.kind == Activation::GEGLU) return launch<GEGLU>(args, sm_count, stream);
  return launch<SwiGLU>(args, sm_count, stream);
}

}  // namespace ligature::cuda
