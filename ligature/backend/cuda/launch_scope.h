// Launches of small pipelines go out together. A launch costs the host several microseconds, a CUDA
// graph of all launches of one direction little more than one of them. So while a LaunchScope is
// open on a thread the backend's launches are held; when it ends they are launched, as a graph
// where the very same launches, with the same memory, were seen before. Memory that a held launch
// uses is held with it. Anything that could observe intermediate results, any ATen call or a user's
// operation, flushes them first.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>

#include "ligature/kernels/launches.h"

namespace ligature::cuda {

using at::Tensor;

class LaunchScope {
 public:
  /// Launches are held where `input` is small and on a GPU, and its stream is not being captured.
  explicit LaunchScope(const Tensor& input);
  ~LaunchScope();
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;

  /// Launches what is held and ends the scope; what goes wrong is told here.
  void finish();

 private:
  bool open_ = false, excluded_ = false;
};

/// Holds nothing while it lives, and first launches what is held: for code that is not ours.
class LaunchPause {
 public:
  explicit LaunchPause(bool launch = true);
  ~LaunchPause();
  LaunchPause(const LaunchPause&) = delete;
  LaunchPause& operator=(const LaunchPause&) = delete;

 private:
  void* paused_ = nullptr;
};

/// Are this thread's launches being held?
bool holds_launches();

/// Becomes true when everything that this thread holds so far is launched; null where nothing is
/// held.
std::shared_ptr<const std::atomic<bool>> when_launched();

/// Keeps a tensor's memory until everything held so far is launched.
void hold_memory(const Tensor& tensor);

/// On unless LIGATURE_LAUNCH_GRAPHS=0 is set.
void set_launch_graphs(bool on);
bool launch_graphs();

using kernels::LaunchCounts;
LaunchCounts launch_counts();

}  // namespace ligature::cuda
