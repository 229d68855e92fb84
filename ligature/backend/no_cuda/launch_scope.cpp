#include "ligature/backend/cuda/launch_scope.h"

namespace ligature::cuda {

LaunchScope::LaunchScope(const Tensor&) {}
LaunchScope::~LaunchScope() = default;
void LaunchScope::finish() { open_ = false; }

LaunchPause::LaunchPause(bool) {}
LaunchPause::~LaunchPause() = default;

bool holds_launches() { return false; }
std::shared_ptr<const std::atomic<bool>> when_launched() { return nullptr; }
void hold_memory(const Tensor&) {}

void set_launch_graphs(bool) {}
bool launch_graphs() { return false; }
LaunchCounts launch_counts() { return {}; }

}  // namespace ligature::cuda
