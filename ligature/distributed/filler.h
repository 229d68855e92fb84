// Work that nobody waits for yet, to be done while a collective is under way.
#pragma once

#include <deque>
#include <functional>
#include <unordered_map>

#include "ligature/distributed/gather_value.h"

namespace ligature::distributed {

class Filler {
 public:
  using Job = std::function<void()>;

  /// Of this thread; null where nobody collects work.
  static Filler* current();

  void add(Job job) { jobs_.push_back(std::move(job)); }
  /// Does what there is, the oldest first, until all of it has arrived.
  void fill(const Transfer& transfer);
  /// Does the rest.
  void finish();
  size_t waiting() const { return jobs_.size(); }

  /// What a job made for an operation, and who asks for it in the end.
  void deliver(const void* owner, Tensor made) { made_[owner] = std::move(made); }
  Tensor made_for(const void* owner) const;

  /// A gather that was started ahead of the step that awaits it.
  void start_ahead(const void* owner, PendingValue gather) { ahead_[owner] = std::move(gather); }
  /// Not started where there is none.
  PendingValue take_ahead(const void* owner);

 private:
  std::deque<Job> jobs_;
  std::unordered_map<const void*, PendingValue> ahead_;
  std::unordered_map<const void*, Tensor> made_;
};

/// While it lives, `filler` collects the work of this thread.
class FillerScope {
 public:
  explicit FillerScope(Filler& filler);
  ~FillerScope();
  FillerScope(const FillerScope&) = delete;
  FillerScope& operator=(const FillerScope&) = delete;

 private:
  Filler* outer_;
};

/// Waits for it, doing what this thread's filler has meanwhile.
const std::vector<Tensor>& wait_filled(Transfer& transfer);

}  // namespace ligature::distributed
