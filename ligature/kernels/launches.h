// Launches of small pipelines go out together. On a device where a launch costs the host several
// microseconds its backend holds those of one direction and launches them when the direction ends.
// Memory that a held launch uses is held with it. Anything that could observe intermediate results
// flushes them first. Without such a backend these are a look at one pointer.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace ligature::kernels {

using at::Tensor;

/// Of this process so far.
struct LaunchCounts {
  int64_t graphs = 0;    ///< that were made
  int64_t replayed = 0;  ///< times that one was launched
  int64_t single = 0;    ///< held launches that went out one by one
};

/// What a backend does for the classes below.
struct Launches {
  void* (*begin)(const Tensor& input) = nullptr;  ///< null: nothing is held
  void (*finish)(void* held) = nullptr;           ///< launches; what goes wrong is told here
  void (*abandon)(void* held) = nullptr;          ///< after finish, or instead of it; throws not
  void* (*pause)() = nullptr;                     ///< null: nothing was held
  void (*resume)(void* paused) = nullptr;
  bool (*holds)() = nullptr;
  void (*hold_memory)(const Tensor& tensor) = nullptr;
  std::shared_ptr<const std::atomic<bool>> (*when_launched)() = nullptr;
  bool (*is_on)() = nullptr;  ///< are they held at all?
  void (*set_on)(bool on) = nullptr;
  LaunchCounts (*counts)() = nullptr;
};

namespace detail {
extern const Launches* launches;
}

/// One direction of a pipeline. `input`: what it begins with.
class LaunchScope {
 public:
  explicit LaunchScope(const Tensor& input) {
    if (detail::launches != nullptr) held_ = detail::launches->begin(input);
  }
  ~LaunchScope() {
    if (held_ != nullptr) detail::launches->abandon(held_);
  }
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;

  /// Launches what is held and ends the scope; what goes wrong is told here.
  void finish() {
    if (held_ != nullptr) detail::launches->finish(held_);
  }

 private:
  void* held_ = nullptr;
};

/// Holds nothing while it lives, and first launches what is held: for code that is not ours.
class LaunchPause {
 public:
  LaunchPause() {
    if (detail::launches != nullptr) paused_ = detail::launches->pause();
  }
  ~LaunchPause() {
    if (paused_ != nullptr) detail::launches->resume(paused_);
  }
  LaunchPause(const LaunchPause&) = delete;
  LaunchPause& operator=(const LaunchPause&) = delete;

 private:
  void* paused_ = nullptr;
};

/// Are this thread's launches being held?
inline bool holds_launches() { return detail::launches != nullptr && detail::launches->holds(); }

/// Keeps a tensor's memory until everything held so far is launched.
inline void hold_memory(const Tensor& tensor) {
  if (detail::launches != nullptr) detail::launches->hold_memory(tensor);
}

/// Becomes true when everything that this thread holds so far is launched; null where nothing is
/// held.
inline std::shared_ptr<const std::atomic<bool>> when_launched() {
  return detail::launches != nullptr ? detail::launches->when_launched() : nullptr;
}

inline LaunchCounts launch_counts() {
  return detail::launches != nullptr ? detail::launches->counts() : LaunchCounts{};
}

}  // namespace ligature::kernels
