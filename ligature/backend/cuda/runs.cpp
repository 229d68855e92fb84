#include "ligature/backend/cuda/runs.h"

namespace ligature::cuda {

bool computes_in(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

}  // namespace ligature::cuda
