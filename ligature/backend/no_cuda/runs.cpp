#include "ligature/backend/cuda/runs.h"

namespace ligature::cuda {

bool computes_in(at::ScalarType) { return false; }

}  // namespace ligature::cuda
