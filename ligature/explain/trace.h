// What one call of a plan did, step by step: the kernels, the formats between steps, what was
// saved. It holds no tensors. A trace is made by running the plan on tensors without memory; where
// an operation in a host language is part of the plan, the real calls are traced.
#pragma once

#include <string>
#include <vector>

#include "ligature/kernels/log.h"
#include "ligature/meta.h"

namespace ligature {

struct TracedValue {
  std::string format;  ///< a dtype ("bfloat16") or a low-precision format; empty: no value
  std::vector<int64_t> sizes;
  int64_t bytes = 0;

  static TracedValue of(const Value& value);
  static TracedValue of(const ValueMeta& meta);
};

/// One tensor that forward keeps for backward.
struct TracedSave {
  size_t op = 0;     ///< the basic operation in whose context it is
  std::string what;  ///< "input", "weight", "extra input", "output of Bias" or "made by forward"
  TracedValue value;
  bool counted = false;  ///< memory that is held for this alone: no input, no parameter, not twice
};

struct TracedStep {
  bool ran = false;
  std::vector<kernels::KernelCall> kernels;
  TracedValue input;   ///< in backward: the gradient of its output
  TracedValue output;  ///< in backward: the gradient of its input
  std::vector<TracedSave> saved;
};

struct Trace {
  Trace(size_t forward_steps, size_t backward_steps)
      : forward(forward_steps), backward(backward_steps) {}

  std::vector<TracedStep> forward;
  std::vector<TracedStep> backward;
};

}  // namespace ligature
