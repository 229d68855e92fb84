// Held launches: each is a function of plain arguments, kept as bytes, so that what is held can be
// compared with what was launched before. See launch_scope.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ligature/backend/cuda/types.h"
#include "ligature/check.h"

namespace ligature::cuda {

using at::Tensor;

/// Right after a launch: `name` is the kernel's as a message should name it.
void check_launch(const char* name);

/// Launch(args..., stream) and the look at its error; a result is whether it could be launched.
template <auto Launch, typename... Args>
void launch_now(const char* name, Stream stream, const Args&... args) {
  if constexpr (std::is_same_v<decltype(Launch(args..., stream)), bool>) {
    const bool launched = Launch(args..., stream);
    LIGATURE_CHECK_STATE(launched, "[", name, "] the driver refused to describe the operands");
  } else {
    Launch(args..., stream);
  }
  check_launch(name);
}

class LaunchQueue {
 public:
  /// This thread's, or null where launches are not held.
  static LaunchQueue* current() { return current_; }

  template <auto Launch, typename... Args>
  void add(const char* name, Stream stream, const Args&... args) {
    static_assert((std::is_trivially_copyable_v<Args> && ...), "arguments are kept as bytes");
    using Held = std::tuple<Args...>;
    static_assert(alignof(Held) <= kAlignment);
    if (stream != stream_) change_stream(stream);
    Held* held = new (place(sizeof(Held), &run<Launch, Args...>, name)) Held(args...);
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    // Equal arguments have equal bytes.
    std::apply([](Args&... arg) { (__builtin_clear_padding(&arg), ...); }, *held);
#endif
#endif
    static_cast<void>(held);
  }

  void hold(const Tensor& tensor) { memory_.push_back(tensor); }

  std::shared_ptr<const std::atomic<bool>> when_launched();

  /// Launches everything, and lets go of its memory.
  void flush();

 private:
  friend class LaunchScope;
  friend class LaunchPause;
  static constexpr size_t kAlignment = 16;

  using Run = void (*)(const std::byte* arguments, const char* name, Stream stream);
  struct Item {
    Run run;
    const char* name;
    size_t offset;
  };

  template <auto Launch, typename... Args>
  static void run(const std::byte* arguments, const char* name, Stream stream) {
    std::apply([&](const Args&... args) { launch_now<Launch, Args...>(name, stream, args...); },
               *std::launder(reinterpret_cast<const std::tuple<Args...>*>(arguments)));
  }

  /// Zeroed memory for the arguments of one more launch.
  void* place(size_t size, Run function, const char* name);
  void change_stream(Stream stream);
  void launch_all(Stream stream) const;
  bool replay();

  static thread_local LaunchQueue* current_;
  std::vector<Item> items_;
  std::vector<std::byte> bytes_;  ///< of functions and arguments, one after the other
  std::vector<Tensor> memory_;
  std::shared_ptr<std::atomic<bool>> launched_;  ///< what when_launched() gave since
  Stream stream_ = nullptr;
  int device_ = 0;
};

/// Launch(args..., stream), now or with the others of an open LaunchScope.
template <auto Launch, typename... Args>
void launch(const char* name, Stream stream, const Args&... args) {
  if (LaunchQueue* queue = LaunchQueue::current()) {
    queue->add<Launch, Args...>(name, stream, args...);
  } else {
    launch_now<Launch, Args...>(name, stream, args...);
  }
}

/// While held launches become part of a graph: `capture` stands for `real`, whose memory library
/// calls use.
struct CaptureStreams {
  Stream capture = nullptr, real = nullptr;
};
const CaptureStreams& capture_streams();

}  // namespace ligature::cuda
