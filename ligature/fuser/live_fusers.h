// All fusers of the process, so that they hear of fusions that are gone.
#pragma once

#include <mutex>
#include <unordered_set>

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
  std::unordered_set<OperationFuser*> all_;
};

}  // namespace ligature
