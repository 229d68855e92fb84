// Tasks of about the same size for all threads. Each thread begins with a part of its own, the same
// one in every call, so that it finds in its caches what it had there; one that is done helps the
// others, so that nobody waits for a thread that began late or was interrupted. Which thread runs a
// task must not matter to the result.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace ligature::cpu {

class SharedTasks {
 public:
  /// At most as many threads as there are, each with `least` tasks or more.
  SharedTasks(int64_t count, int64_t least)
      : threads_(std::clamp<int64_t>(count / std::max<int64_t>(least, 1), 1,
                                     std::min<int64_t>(at::get_num_threads(), kMaxThreads))) {
    for (int64_t t = 0; t < threads_; ++t) {
      parts_[t].range = pack(t * count / threads_, (t + 1) * count / threads_);
    }
  }

  /// Calls f(next) in each thread, where next() gives the number of a task, or -1 when none is
  /// left.
  template <typename F>
  void run(const F& f) {
    at::parallel_for(0, threads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        f([&] { return take(t); });
      }
    });
  }

 private:
  static constexpr int64_t kMaxThreads = 64;

  /// Tasks [begin, end), which fit in 32 bits each.
  struct alignas(64) Part {
    std::atomic<uint64_t> range{0};
  };

  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }

  /// A thread takes its own tasks from the front, those of others from the back.
  int64_t take(int64_t own) {
    for (int64_t i = 0; i < threads_; ++i) {
      std::atomic<uint64_t>& range = parts_[(own + i) % threads_].range;
      uint64_t seen = range.load(std::memory_order_relaxed);
      for (;;) {
        const int64_t begin = static_cast<int64_t>(seen >> 32);
        const int64_t end = static_cast<int64_t>(seen & 0xffffffff);
        if (begin >= end) break;
        const uint64_t left = i == 0 ? pack(begin + 1, end) : pack(begin, end - 1);
        if (range.compare_exchange_weak(seen, left, std::memory_order_relaxed)) {
          return i == 0 ? begin : end - 1;
        }
      }
    }
    return -1;
  }

  int64_t threads_;
  std::array<Part, kMaxThreads> parts_;
};

}  // namespace ligature::cpu
