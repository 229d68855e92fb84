#include "ligature/distributed/filler.h"

#include <utility>

#include "ligature/kernels/run_context.h"

namespace ligature::distributed {

Filler* Filler::current() { return kernels::run_context().filler; }

void Filler::fill(const Transfer& transfer) {
  while (!jobs_.empty() && !transfer.done()) {
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    job();
  }
}

void Filler::finish() {
  while (!jobs_.empty()) {
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    job();
  }
}

Tensor Filler::made_for(const void* owner) const {
  const auto found = made_.find(owner);
  return found != made_.end() ? found->second : Tensor();
}

PendingValue Filler::take_ahead(const void* owner) {
  const auto found = ahead_.find(owner);
  if (found == ahead_.end()) return {};
  PendingValue gather = std::move(found->second);
  ahead_.erase(found);
  return gather;
}

FillerScope::FillerScope(Filler& filler)
    : outer_(std::exchange(kernels::run_context().filler, &filler)) {}

FillerScope::~FillerScope() { kernels::run_context().filler = outer_; }

const std::vector<Tensor>& wait_filled(Transfer& transfer) {
  if (Filler* filler = Filler::current()) filler->fill(transfer);
  return transfer.wait();
}

}  // namespace ligature::distributed
