// A piece of a step that is captured as graphs of its own, forward and backward apart. Neither
// graph holds the end of the step, so the update of delayed scaling stays outside: it comes where
// the caller's context, or the backward pass, ends, as if the operations had been called.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ligature/quantized/quantized_tensor.h"
#include "ligature/recipes/autocast.h"

namespace ligature {

class WeightCache;

/// Weights that one graph quantizes and others read. They live as long as this.
class CapturedWeights {
 public:
  QuantizedPtr get(const std::shared_ptr<const WeightCache>& of,
                   const std::function<QuantizedPtr()>& make);

 private:
  std::mutex mutex_;
  std::unordered_map<std::shared_ptr<const WeightCache>, QuantizedPtr> made_;
};

class CapturedPart : public std::enable_shared_from_this<CapturedPart> {
 public:
  /// From `begin` to `end` delayed scaling is not updated, in no thread: what would have been is
  /// noted here. One part at a time.
  void begin();
  void end();
  /// Largest values of what ran meanwhile, and was not captured, are put back.
  void forget();

  /// Its graph ran. Now it is the caller's context that updates; without one it is done at once.
  void ran_forward() const;
  /// Its graph ran in a backward pass, which updates.
  void ran_backward() const;

  /// Null: each run of the graph quantizes its weights.
  std::shared_ptr<CapturedWeights> weights;

  static std::shared_ptr<CapturedPart> recorded();
  void meet(const DelayedScalePtr& delayed);
  void leave_update(const AmaxReduction& reduce);
  QuantizedPtr weight(const std::shared_ptr<const WeightCache>& of,
                      const std::function<QuantizedPtr()>& make) const;

 private:
  struct Met {
    DelayedScalePtr delayed;
    at::Tensor amax;  // before; undefined in a graph
  };
  mutable std::mutex mutex_;
  std::vector<Met> met_;
  AmaxReduction reduce_;
};

}  // namespace ligature
