// A plan run forward and backward without autograd: shows what is in the contexts, and the
// gradients of each step before autograd casts, expands or drops them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ligature/fuser/backward_run.h"
#include "ligature/testing/run.h"

namespace ligature::testing {

class DirectRun : private RunObserver {
 public:
  DirectRun(std::shared_ptr<const Plan> plan, const Subject& subject, const Data& data,
            const Needs& needs, uint64_t seed);

  void forward();
  void backward();

  const Contexts& contexts() const { return *contexts_; }
  const GradFlags& flags(size_t op) const { return grads_.flags[op]; }
  const Plan& plan() const { return *plan_; }
  const Tensor& extra_input(size_t op, size_t slot) const { return extra_inputs_[op][slot]; }

  /// Called before each step of forward, when it is set.
  std::function<void(const PlanStep&, const Value&, ArgsList)> before_step;
  /// What went into each basic operation that begins a step.
  std::vector<std::optional<ValueMeta>> inputs;

  /// What a step of backward gave.
  struct StepGradients {
    PlanStep step;
    Value grad_output;
    std::vector<std::vector<Tensor>> grad_extra_outputs;
    FuserBackwardResult result;
  };
  std::vector<StepGradients> backward_steps;
  /// Saved tensors that backward overwrote: "saved tensor 0 of BasicLinear".
  std::vector<std::string> overwritten;

 private:
  const kernels::KernelLog* before_forward(size_t step, const Value& input, ArgsList args) override;
  const kernels::KernelLog* before_backward(size_t step, const Value& grad_output,
                                            GradList grad_extra_outputs) override;
  void after_backward(const PlanStep& step, size_t index,
                      const FuserBackwardResult& result) override;

  std::shared_ptr<const Plan> plan_;
  const Subject& subject_;
  const Data& data_;
  uint64_t seed_;
  Call call_;
  GradPlan grads_;
  std::shared_ptr<Contexts> contexts_;
  std::vector<std::vector<Tensor>> extra_inputs_;
  std::vector<std::vector<Tensor>> extra_outputs_;
  ForwardShapes shapes_;
  at::ScalarType output_dtype_ = at::kFloat;
};

/// Gradients that nobody needs: none may be given, or one that is passed on and cost nothing, or
/// any.
enum class Unneeded { None, PassedOn, Any };

/// What is wrong with the gradients that the steps gave: missing, not needed, of another dtype or
/// shape. `inputs`: of every basic operation.
std::vector<std::string> complaints(const DirectRun& run, const Subject& subject,
                                    const std::vector<std::optional<ValueMeta>>& inputs,
                                    Unneeded allowed);

/// How the contexts that one forward left differ from those of another.
std::vector<std::string> context_differences(const DirectRun& actual, const DirectRun& expected,
                                             const Subject& subject, ContextMatch match,
                                             double tolerance);

}  // namespace ligature::testing
