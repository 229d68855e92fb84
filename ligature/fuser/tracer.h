// Writes a trace while a plan's forward runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ligature/fuser/execute.h"

namespace ligature {

/// The same tensor, or views of one memory.
bool share_memory(const Tensor& a, const Tensor& b);

/// Knows every tensor by where it came from, so that it can tell what a saved one is.
class ForwardTracer {
 public:
  ForwardTracer(const Plan& plan, const Call& call);

  void begin();
  const kernels::KernelLog* log() const { return log_.get(); }
  void end(size_t index, const Value& input, const FuserForwardResult& result,
           const Contexts& contexts);

 private:
  struct Known {
    Tensor tensor;
    std::string what;
    bool ours;  // made by a step: its memory is there for backward alone
    bool counted = false;
  };

  void know(const Tensor& tensor, std::string what, bool ours);
  TracedSave saved(size_t op, const Value& value);

  const Plan& plan_;
  Trace& trace_;
  std::unique_ptr<kernels::KernelLog> log_;
  std::vector<Known> known_;
};

}  // namespace ligature
