#include "ligature/compile/delayed.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ligature/check.h"

namespace ligature::compile {

DelayedFactors::DelayedFactors(const std::vector<DelayedScalePtr>& known,
                               const std::vector<at::Tensor>& scales)
    : known_(known), scales_(scales), before_(DelayedSource::current()) {
  LIGATURE_CHECK(scales.size() == known.size(), "delayed scaling has ", known.size(),
                 " factors here, got ", scales.size());
  if (known.empty()) return;
  largest_ = at::zeros({static_cast<int64_t>(known.size())}, scales.front().options());
  DelayedSource::exchange(this);
}

DelayedFactors::~DelayedFactors() { DelayedSource::exchange(before_); }

size_t DelayedFactors::find(const DelayedScalePtr& delayed) const {
  return std::find(known_.begin(), known_.end(), delayed) - known_.begin();
}

at::Tensor DelayedFactors::scale_of(const DelayedScalePtr& delayed, bool& record) {
  const size_t index = find(delayed);
  if (index == known_.size()) return delayed->scale;
  // What runs again in a checkpoint has the factors of the first run.
  if (is_recomputing() && before_ != nullptr) return before_->scale_of(delayed, record);
  record = record && !is_recomputing();
  if (record && std::find(met_.begin(), met_.end(), delayed) == met_.end()) met_.push_back(delayed);
  return scales_[index];
}

void DelayedFactors::mark_unused() {
  for (size_t i = 0; i < known_.size(); ++i) {
    if (std::find(met_.begin(), met_.end(), known_[i]) != met_.end()) continue;
    largest_.narrow(0, static_cast<int64_t>(i), 1).fill_(-1);
  }
}

at::Tensor DelayedFactors::amax_of(const DelayedScalePtr& delayed) {
  const size_t index = find(delayed);
  if (index == known_.size()) return delayed->amax;
  return largest_.narrow(0, static_cast<int64_t>(index), 1);
}

}  // namespace ligature::compile
