// Collectives: one function each, over lists of tensors that travel together. Each starts and gives
// what is awaited later; nothing ever writes into what it is given. Tensors without memory give
// results of the right shape, and nothing travels.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "ligature/distributed/group.h"

namespace ligature::distributed {

using at::Tensor;

/// Who asks, and what for: for errors and for pictures of a plan.
struct Purpose {
  std::string op;      ///< the operation's label
  std::string format;  ///< of what travels; empty: the tensors' dtype
};

/// How one place in a plan has communicated so far, in seconds; of transfers that were awaited.
struct TransferTimes {
  int64_t count = 0;
  double in_flight = 0;  ///< from the start to the end, as far as it was seen
  double waited = 0;     ///< of that, how long somebody did nothing but wait
};

/// A collective under way. Copies are the same one.
class Transfer {
 public:
  class State;
  Transfer() = default;
  explicit Transfer(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool started() const { return state_ != nullptr; }
  /// Has all of it arrived?
  bool done() const;
  /// Waits for it, once, and gives the results. What went wrong is told with the operation, the
  /// collective, the group, the rank, the shape and the timeout.
  const std::vector<Tensor>& wait();
  const Tensor& wait_one() { return wait()[0]; }

 private:
  std::shared_ptr<State> state_;
};

/// The tensors of all ranks, joined along their first dimension in the order of the ranks. Any
/// dtype: they travel as bytes.
Transfer all_gather(const GroupPtr& group, std::vector<Tensor> shards, const Purpose& purpose);
/// The sum over all ranks. `own`: the tensor is this call's own and may hold the result.
Transfer all_reduce(const GroupPtr& group, const Tensor& x, const Purpose& purpose,
                    bool own = false);
/// This rank's part along the first dimension of the sum over all ranks.
Transfer reduce_scatter(const GroupPtr& group, const Tensor& x, const Purpose& purpose);
/// Raises a float tensor to the largest over all ranks, element by element, at once.
void all_reduce_max(const GroupPtr& group, Tensor& x, const Purpose& purpose);

/// Refuses a first dimension that the ranks cannot share evenly.
void check_divides(const std::string& op, const char* what, at::IntArrayRef sizes,
                   const Group& group);

/// Of every transfer with this operation's label and collective that this process awaited.
TransferTimes transfer_times(const std::string& op, const std::string& collective);
void forget_transfer_times();

/// One entry per collective and per stretch of computation of this process while recording is on,
/// for timelines: seconds since recording began.
struct TimelineEntry {
  std::string name;
  std::string op;
  double begin = 0, end = 0;
  double wait_begin = 0, wait_end = 0;
  int64_t bytes = 0;
};
void record_timeline(bool on);
std::vector<TimelineEntry> timeline();

}  // namespace ligature::distributed
