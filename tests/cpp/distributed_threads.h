// Ranks as threads of one process: a backend of torch.distributed that copies between them, counts
// what travels, and brings delays and faults on request.
#pragma once

#include <torch/torch.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

/// One kind of collective, as one rank entered it.
struct Entered {
  std::string name;
  std::vector<at::Tensor> in;
  std::vector<at::Tensor> out;
  c10d::ReduceOp::RedOpType how = c10d::ReduceOp::SUM;
};

class ThreadWork final : public c10d::Work {
 public:
  explicit ThreadWork(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  bool isCompleted() override {
    const std::lock_guard<std::mutex> lock(own_);
    return arrived_ && std::chrono::steady_clock::now() >= at_;
  }
  bool wait(std::chrono::milliseconds) override {
    std::unique_lock<std::mutex> lock(own_);
    TORCH_CHECK(changed_.wait_for(lock, timeout_, [&] { return arrived_; }),
                "a peer did not come within ", timeout_.count(), " ms");
    if (error_) std::rethrow_exception(error_);
    const auto at = at_;
    lock.unlock();
    std::this_thread::sleep_until(at);
    return true;
  }
  void arrive(std::chrono::steady_clock::time_point at, std::exception_ptr error = nullptr) {
    const std::lock_guard<std::mutex> lock(own_);
    arrived_ = true;
    at_ = at;
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  std::mutex own_;
  std::condition_variable changed_;
  bool arrived_ = false;
  std::chrono::steady_clock::time_point at_;
  std::exception_ptr error_;
  std::chrono::milliseconds timeout_;
};

/// Where the threads of a group meet. Their n-th collectives belong together.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}

  double seconds_per_byte = 0, latency = 0;  ///< of each transfer, one after the other
  std::chrono::milliseconds timeout{10'000};
  int64_t fails_at = -1;  ///< this collective fails on every rank

  c10::intrusive_ptr<c10d::Work> enter(int rank, int64_t number, Entered entered) {
    auto work = c10::make_intrusive<ThreadWork>(timeout);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& meeting = meetings_[number];
    meeting[rank] = {std::move(entered), work};
    for (const at::Tensor& t : meeting[rank].first.in)
      bytes[rank] += static_cast<int64_t>(t.nbytes());
    names[rank].push_back(meeting[rank].first.name);
    if (static_cast<int>(meeting.size()) < size_) return work;
    std::exception_ptr error;
    try {
      TORCH_CHECK(number != fails_at, "the link is down");
      exchange(meeting);
    } catch (...) {
      error = std::current_exception();
    }
    int64_t largest = 0;
    for (const at::Tensor& t : meeting[0].first.in) largest += static_cast<int64_t>(t.nbytes());
    const double span = latency + seconds_per_byte * static_cast<double>(largest);
    const auto now = std::chrono::steady_clock::now();
    busy_until_ = std::max(busy_until_, now) +
                  std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                      std::chrono::duration<double>(span));
    for (auto& [_, item] : meeting) item.second->arrive(busy_until_, error);
    meetings_.erase(number);
    return work;
  }

  std::map<int, int64_t> bytes;                   ///< that each rank gave
  std::map<int, std::vector<std::string>> names;  ///< collectives of each rank, in order

 private:
  using All = std::map<int, std::pair<Entered, c10::intrusive_ptr<ThreadWork>>>;

  void exchange(All& all) const {
    const std::string& name = all[0].first.name;
    for (const auto& [rank, item] : all) {
      TORCH_CHECK(item.first.name == name && item.first.in.size() == all[0].first.in.size(),
                  "ranks called ", name, " and ", item.first.name);
      for (size_t i = 0; i < item.first.in.size(); ++i) {
        TORCH_CHECK(item.first.in[i].sizes() == all[0].first.in[i].sizes(),
                    "sizes differ: ", item.first.in[i].sizes(), " and ",
                    all[0].first.in[i].sizes());
      }
    }
    const size_t count = all[0].first.in.size();
    for (size_t i = 0; i < count; ++i) {
      std::vector<at::Tensor> parts;
      for (auto& [rank, item] : all) parts.push_back(item.first.in[i]);
      if (name == "all_gather") {
        const at::Tensor whole = at::cat(parts);
        for (auto& [rank, item] : all) item.first.out[i].view({-1}).copy_(whole.view({-1}));
      } else if (name == "all_to_all") {
        for (auto& [rank, item] : all) {
          std::vector<at::Tensor> mine;
          for (const at::Tensor& part : parts) mine.push_back(part.view({-1}).chunk(size_)[rank]);
          item.first.out[i].view({-1}).copy_(at::cat(mine));
        }
      } else {
        at::Tensor sum = parts[0].clone();
        for (size_t r = 1; r < parts.size(); ++r) {
          all[0].first.how == c10d::ReduceOp::MAX ? sum.copy_(at::maximum(sum, parts[r]))
                                                  : sum.add_(parts[r]);
        }
        for (auto& [rank, item] : all) {
          item.first.out[i].copy_(name == "all_reduce" ? sum : sum.chunk(size_)[rank]);
        }
      }
    }
  }

  const int size_;
  std::mutex mutex_;
  std::map<int64_t, All> meetings_;
  std::chrono::steady_clock::time_point busy_until_{};
};

class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<Meeting> meeting, int rank, int size)
      : Backend(rank, size), meeting_(std::move(meeting)) {}
  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return enter({"all_reduce", tensors, tensors, options.reduceOp});
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions&) override {
    return enter({"all_gather", {in}, {out}});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
      const c10d::AllgatherOptions&) override {
    return enter({"all_gather", ins, outs});
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                      const c10d::ReduceScatterOptions&) override {
    return enter({"reduce_scatter", {in}, {out}});
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in,
                                               std::vector<int64_t>&, std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override {
    return enter({"all_to_all", {in}, {out}});
  }

 private:
  c10::intrusive_ptr<c10d::Work> enter(Entered entered) {
    return meeting_->enter(getRank(), number_++, std::move(entered));
  }
  std::shared_ptr<Meeting> meeting_;
  int64_t number_ = 0;
};

/// Runs `f(rank)` on so many threads, which are the ranks of the group "ranks". What they throw is
/// given back, "" for nothing.
inline std::vector<std::string> run_ranks(int size, const std::function<void(int)>& f,
                                          std::shared_ptr<Meeting> meeting = nullptr) {
  if (meeting == nullptr) meeting = std::make_shared<Meeting>(size);
  c10d::set_thread_isolation_mode(true);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
        group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM,
                          c10::make_intrusive<ThreadBackend>(meeting, rank, size));
        group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
        c10d::register_process_group("ranks", group);
        f(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
      c10d::unregister_all_process_groups();
    });
  }
  for (auto& thread : threads) thread.join();
  c10d::set_thread_isolation_mode(false);
  return errors;
}
