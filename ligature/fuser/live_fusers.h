// All fusers of the process, so that they hear of fusions that are gone.
#pragma once

#include <condition_variable>
#include <mutex>
#include <unordered_map>

namespace ligature {

class OperationFuser;

class LiveFusers {
 public:
  static LiveFusers& get();
  void add(OperationFuser* fuser);
  void remove(OperationFuser* fuser);

 private:
  LiveFusers();
  void drop_stale_plans();

  std::mutex mutex_;
  std::condition_variable idle_;
  std::unordered_map<OperationFuser*, int> all_;  ///< and how often each is being looked at
};

}  // namespace ligature
