// One forward run of a plan, whoever asked for it: an eager call or a compiled graph.
#pragma once

#include <optional>
#include <vector>

#include "ligature/fuser/execute.h"
#include "ligature/fuser/tracer.h"

namespace ligature {

class ForwardRun {
 public:
  ForwardRun(const Plan& plan, const Call& call, const GradPlan& grads, Contexts& contexts);

  Value run();

  const std::vector<std::vector<Tensor>>& extra_outputs() const { return extra_outputs_; }
  /// Of every plain tensor in the contexts, when it was saved, in order.
  const std::vector<uint32_t>& versions() const { return versions_; }

 private:
  void check_kwargs() const;
  void check_from(size_t first, const Value& input);
  Value run_step(size_t index, const Value& x);

  const Plan& plan_;
  const Call& call_;
  Contexts& contexts_;
  std::vector<OpArgs> args_;
  std::vector<std::vector<Tensor>> extra_inputs_;
  std::vector<std::vector<Tensor>> extra_outputs_;
  std::vector<uint32_t> versions_;
  std::optional<ForwardTracer> tracer_;
  size_t checked_ = 0;
};

}  // namespace ligature
