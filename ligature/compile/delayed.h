// Delayed scaling inside a compiled graph: its factors come in as tensors and the largest values go
// out as one, so that the graph, not this library, changes state.
#pragma once

#include <vector>

#include "ligature/recipes/autocast.h"

namespace ligature::compile {

/// While it lives, quantizers of this thread use the factors given and note their largest values
/// here.
class DelayedFactors : public DelayedSource {
 public:
  DelayedFactors(const std::vector<DelayedScalePtr>& known, const std::vector<at::Tensor>& scales);
  ~DelayedFactors() override;
  DelayedFactors(const DelayedFactors&) = delete;
  DelayedFactors& operator=(const DelayedFactors&) = delete;

  at::Tensor scale_of(const DelayedScalePtr& delayed, bool& record) override;
  at::Tensor amax_of(const DelayedScalePtr& delayed) override;

  /// float [number of quantizers]: zero where none was noted.
  const at::Tensor& largest() const { return largest_; }
  /// Makes it -1 where none was noted.
  void mark_unused();
  /// Those that noted something.
  const std::vector<DelayedScalePtr>& met() const { return met_; }

 private:
  size_t find(const DelayedScalePtr& delayed) const;

  const std::vector<DelayedScalePtr>& known_;
  const std::vector<at::Tensor>& scales_;
  at::Tensor largest_;
  std::vector<DelayedScalePtr> met_;
  DelayedSource* before_;
};

}  // namespace ligature::compile
