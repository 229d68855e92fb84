#include "ligature/distributed/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ligature/check.h"
#include "ligature/kernels/launches.h"
#include "ligature/kernels/log.h"
#include "ligature/meta.h"

namespace ligature::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kGroupsTimeout = -1;  // the one that the group was made with

double seconds(Clock::duration span) { return std::chrono::duration<double>(span).count(); }

// ---- the backend's functions, by the names of their operators: those of C++ change between
// versions of torch

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

WorkPtr call_all_gather(Tensor& out, Tensor& in, const GroupHandle& group) {
  static const auto op =
      operator_of<std::tuple<Tensor, WorkPtr>(Tensor&, Tensor&, const GroupHandle&, bool, int64_t)>(
          "c10d::_allgather_base_");
  return std::get<1>(op.call(out, in, group, true, kGroupsTimeout));
}

WorkPtr call_all_gather(const std::vector<Tensor>& outs, const std::vector<Tensor>& ins,
                        const GroupHandle& group) {
  static const auto op =
      operator_of<WorkPtr(at::TensorList, at::TensorList, const GroupHandle&, bool)>(
          "c10d::allgather_into_tensor_coalesced_");
  return op.call(outs, ins, group, true);
}

WorkPtr call_all_reduce(const Tensor& x, const GroupHandle& group, c10d::ReduceOp::RedOpType how) {
  static const auto op = operator_of<std::tuple<std::vector<Tensor>, WorkPtr>(
      at::TensorList, const GroupHandle&, const c10::intrusive_ptr<c10d::ReduceOp>&,
      const std::optional<Tensor>&, bool, int64_t)>("c10d::allreduce_");
  return std::get<1>(op.call({x}, group, c10::make_intrusive<c10d::ReduceOp>(how), std::nullopt,
                             true, kGroupsTimeout));
}

WorkPtr call_reduce_scatter(Tensor& out, Tensor& in, const GroupHandle& group) {
  static const auto op = operator_of<std::tuple<Tensor, WorkPtr>(
      Tensor&, Tensor&, const GroupHandle&, const c10::intrusive_ptr<c10d::ReduceOp>&, bool,
      int64_t)>("c10d::_reduce_scatter_base_");
  return std::get<1>(op.call(out, in, group,
                             c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM), true,
                             kGroupsTimeout));
}

WorkPtr call_all_to_all(Tensor& out, Tensor& in, const GroupHandle& group) {
  static const auto op =
      operator_of<WorkPtr(Tensor&, Tensor&, const GroupHandle&, std::vector<int64_t>,
                          std::vector<int64_t>, bool, int64_t)>("c10d::alltoall_base_");
  return op.call(out, in, group, {}, {}, true, kGroupsTimeout);
}

// ---- what is known of transfers that were awaited

struct Records {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, TransferTimes> times;
  bool on = false;
  Clock::time_point began;
  std::vector<TimelineEntry> timeline;
};

Records& records() {
  static auto* all = new Records;
  return *all;
}

std::string sizes_of(at::TensorList tensors) {
  std::string text;
  for (const Tensor& t : tensors) {
    text +=
        (text.empty() ? "" : ", ") + sizes_string(t.sizes()) + " " + c10::toString(t.scalar_type());
  }
  return text;
}

int64_t bytes_of(at::TensorList tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const Tensor& t) {
                           return sum + t.numel() * static_cast<int64_t>(t.element_size());
                         });
}

}  // namespace

class Transfer::State {
 public:
  State(GroupPtr group, const char* collective, Purpose purpose, const std::vector<Tensor>& given)
      : group_(std::move(group)),
        collective_(collective),
        purpose_(std::move(purpose)),
        what_(sizes_of(given)),
        bytes_(bytes_of(given)),
        cpu_(given[0].is_cpu()) {
    if (purpose_.format.empty()) purpose_.format = dtype_name(given[0].scalar_type());
    // Whatever the backend reads has to be launched.
    if (!cpu_ && !given[0].is_meta()) paused_.emplace();
    note(false);
  }

  /// Starts; what `call` throws is told as if it came from waiting.
  template <class F>
  void start(F&& call) {
    started_ = Clock::now();
    try {
      call(process_group(*group_), works_);
    } catch (const std::exception& error) {
      fail(error);
    }
    paused_.reset();
    if (!group_->options().overlap) wait();
  }

  /// Without memory nothing travels: a trace shows what is done meanwhile.
  bool done() const {
    if (!awaited_ && !results.empty() && results[0].is_meta()) return false;
    for (const WorkPtr& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }

  const std::vector<Tensor>& wait() {
    if (awaited_) return results;
    note(true);
    const auto asked = Clock::now();
    try {
      for (const WorkPtr& work : works_) {
        if (!work->wait()) fail(std::runtime_error("it was aborted"));
      }
    } catch (const std::exception& error) {
      fail(error);
    }
    if (!works_.empty() && cpu_) record(asked, Clock::now());
    works_.clear();
    keep.clear();
    awaited_ = true;
    if (finish) results = std::exchange(finish, nullptr)(std::move(results));
    return results;
  }

  std::vector<Tensor> keep;     // what the backend reads
  std::vector<Tensor> results;  // what it writes
  std::function<std::vector<Tensor>(std::vector<Tensor>)> finish;

 private:
  void note(bool awaited) const {
    if (!kernels::is_log_open()) return;
    kernels::note_collective(
        (awaited ? "await " : "") + collective_, group_->alone() ? "none" : backend_name(*group_),
        {purpose_.op, group_->name(), group_->size(), bytes_, purpose_.format, awaited});
  }

  [[noreturn]] void fail(const std::exception& error) {
    works_.clear();
    awaited_ = true;
    std::string why = error.what();
    if (const auto stop = why.find("\nException raised from"); stop != std::string::npos) {
      why.resize(stop);
    }
    LIGATURE_CHECK_STATE(false, "[", purpose_.op, "] ", collective_, " of ", what_, " over ",
                         describe(*group_), ", failed after ", seconds(Clock::now() - started_),
                         " s: ", why,
                         "; another rank may have ended, be late beyond the group's timeout, or "
                         "compute something else. This group cannot be used any more");
  }

  void record(Clock::time_point asked, Clock::time_point arrived) const {
    Records& all = records();
    const std::lock_guard<std::mutex> lock(all.mutex);
    TransferTimes& times = all.times[{purpose_.op, collective_}];
    ++times.count;
    times.in_flight += seconds(arrived - started_);
    times.waited += seconds(arrived - asked);
    if (!all.on || all.timeline.size() >= 100'000) return;
    all.timeline.push_back({collective_, purpose_.op, seconds(started_ - all.began),
                            seconds(arrived - all.began), seconds(asked - all.began),
                            seconds(arrived - all.began), bytes_});
  }

  const GroupPtr group_;
  const std::string collective_;
  Purpose purpose_;
  const std::string what_;
  const int64_t bytes_;
  const bool cpu_;
  std::optional<kernels::LaunchPause> paused_;
  std::vector<WorkPtr> works_;
  Clock::time_point started_;
  bool awaited_ = false;
};

bool Transfer::done() const { return state_ == nullptr || state_->done(); }

const std::vector<Tensor>& Transfer::wait() {
  LIGATURE_CHECK_STATE(state_ != nullptr, "no transfer was started");
  return state_->wait();
}

namespace {

using StatePtr = std::shared_ptr<Transfer::State>;

Tensor plain(const Tensor& x) { return x.detach().contiguous(); }

Tensor as_bytes(const Tensor& x) { return x.view({-1}).view(at::kByte); }

at::DimVector times(at::IntArrayRef sizes, int64_t ranks) {
  at::DimVector out(sizes);
  out[0] *= ranks;
  return out;
}

/// The rows of all ranks for this one, summed up in their order.
Tensor sum_in_order(const Tensor& parts) {
  const at::ScalarType dtype = parts.scalar_type();
  const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  Tensor sum = parts.select(0, 0).to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t rank = 1; rank < parts.size(0); ++rank) sum.add_(parts.select(0, rank));
  return sum.to(dtype);
}

bool is_ordered(const Group& group) { return group.options().reduction == Reduction::Ordered; }

}  // namespace

void check_divides(const std::string& op, const char* what, at::IntArrayRef sizes,
                   const Group& group) {
  LIGATURE_CHECK(!sizes.empty() && sizes[0] % group.size() == 0, "[", op, "] ", what,
                 " must have a first dimension that the ", group.size(), " ranks of group '",
                 group.name(), "' can share evenly, got ", sizes_string(sizes));
}

Transfer all_gather(const GroupPtr& group, std::vector<Tensor> shards, const Purpose& purpose) {
  for (Tensor& shard : shards) {
    LIGATURE_CHECK(shard.dim() > 0, "[", purpose.op,
                   "] a tensor without dimensions cannot be gathered");
    shard = plain(shard);
  }
  auto state = std::make_shared<Transfer::State>(group, "all_gather", purpose, shards);
  if (group->alone()) {
    state->results = std::move(shards);
    return Transfer(std::move(state));
  }
  for (const Tensor& shard : shards) {
    state->results.push_back(at::empty(times(shard.sizes(), group->size()), shard.options()));
  }
  if (shards[0].is_meta()) return Transfer(std::move(state));
  state->keep = std::move(shards);
  state->start([&](const GroupHandle& handle, std::vector<WorkPtr>& works) {
    std::vector<Tensor> ins, outs;
    for (size_t i = 0; i < state->keep.size(); ++i) {
      if (state->keep[i].numel() == 0) continue;
      ins.push_back(as_bytes(state->keep[i]));
      outs.push_back(as_bytes(state->results[i]));
    }
    if (ins.size() == 1) {
      works.push_back(call_all_gather(outs[0], ins[0], handle));
    } else if (!ins.empty()) {
      works.push_back(call_all_gather(outs, ins, handle));
    }
  });
  return Transfer(std::move(state));
}

Transfer reduce_scatter(const GroupPtr& group, const Tensor& given, const Purpose& purpose) {
  const Tensor x = plain(given);
  check_divides(purpose.op, "what is scattered", x.sizes(), *group);
  auto state =
      std::make_shared<Transfer::State>(group, "reduce_scatter", purpose, std::vector<Tensor>{x});
  if (group->alone()) {
    state->results = {x};
    return Transfer(std::move(state));
  }
  const int64_t ranks = group->size();
  at::DimVector sizes(x.sizes());
  sizes[0] /= ranks;
  const bool ordered = is_ordered(*group);
  at::DimVector parts(sizes);
  parts.insert(parts.begin(), ranks);
  state->results = {at::empty(ordered ? parts : sizes, x.options())};
  if (ordered) {
    state->finish = [](std::vector<Tensor> got) { return std::vector{sum_in_order(got[0])}; };
  }
  if (x.is_meta() || x.numel() == 0) return Transfer(std::move(state));
  state->keep = {x};
  state->start([&](const GroupHandle& handle, std::vector<WorkPtr>& works) {
    Tensor in = x, out = state->results[0];
    if (ordered) in = as_bytes(in), out = as_bytes(out);
    works.push_back(ordered ? call_all_to_all(out, in, handle)
                            : call_reduce_scatter(out, in, handle));
  });
  return Transfer(std::move(state));
}

namespace {

/// As a scatter and a gather of equal parts, each summed up in order by the rank that it is of.
Transfer all_reduce_ordered(const GroupPtr& group, const Tensor& x, const Purpose& purpose) {
  const int64_t ranks = group->size();
  const int64_t missing = (ranks - x.numel() % ranks) % ranks;
  Tensor flat = x.view({-1});
  if (missing > 0) flat = at::cat({flat, at::zeros({missing}, x.options())});
  auto state =
      std::make_shared<Transfer::State>(group, "all_reduce", purpose, std::vector<Tensor>{x});
  state->results = {at::empty({ranks, flat.numel() / ranks}, x.options())};
  state->finish = [group, purpose, sizes = x.sizes().vec(), numel = x.numel()](auto parts) {
    Transfer all = all_gather(group, {sum_in_order(parts[0])}, purpose);
    return std::vector{all.wait_one().narrow(0, 0, numel).view(sizes)};
  };
  if (x.is_meta() || x.numel() == 0) {
    state->finish = nullptr;
    state->results = {x};
    return Transfer(std::move(state));
  }
  state->keep = {flat};
  state->start([&](const GroupHandle& handle, std::vector<WorkPtr>& works) {
    Tensor in = as_bytes(flat), out = as_bytes(state->results[0]);
    works.push_back(call_all_to_all(out, in, handle));
  });
  return Transfer(std::move(state));
}

}  // namespace

Transfer all_reduce(const GroupPtr& group, const Tensor& given, const Purpose& purpose, bool own) {
  Tensor x = plain(given);
  if (!group->alone() && is_ordered(*group)) return all_reduce_ordered(group, x, purpose);
  auto state =
      std::make_shared<Transfer::State>(group, "all_reduce", purpose, std::vector<Tensor>{x});
  if (!group->alone() && !own && x.is_alias_of(given)) x = x.clone();
  state->results = {x};
  if (group->alone() || x.is_meta() || x.numel() == 0) return Transfer(std::move(state));
  state->start([&](const GroupHandle& handle, std::vector<WorkPtr>& works) {
    works.push_back(call_all_reduce(x, handle, c10d::ReduceOp::SUM));
  });
  return Transfer(std::move(state));
}

void all_reduce_max(const GroupPtr& group, Tensor& x, const Purpose& purpose) {
  if (group->alone() || x.is_meta()) return;
  auto state =
      std::make_shared<Transfer::State>(group, "all_reduce_max", purpose, std::vector<Tensor>{x});
  Tensor values = plain(x);
  state->start([&](const GroupHandle& handle, std::vector<WorkPtr>& works) {
    works.push_back(call_all_reduce(values, handle, c10d::ReduceOp::MAX));
  });
  state->wait();
  if (!values.is_same(x)) x.copy_(values);
}

TransferTimes transfer_times(const std::string& op, const std::string& collective) {
  const std::lock_guard<std::mutex> lock(records().mutex);
  const auto found = records().times.find({op, collective});
  return found != records().times.end() ? found->second : TransferTimes();
}

void forget_transfer_times() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  records().times.clear();
}

void record_timeline(bool on) {
  Records& all = records();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.on = on;
  if (!on) return;
  all.began = Clock::now();
  all.timeline.clear();
}

std::vector<TimelineEntry> timeline() {
  const std::lock_guard<std::mutex> lock(records().mutex);
  return records().timeline;
}

}  // namespace ligature::distributed
