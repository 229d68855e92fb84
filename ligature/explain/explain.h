// What a fuser does and why: its plan as plain data, and the same as text, as JSON and as a
// picture.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ligature/explain/trace.h"
#include "ligature/fuser/observer.h"

namespace ligature {

/// A tensor that a caller gives, or would give.
struct ExplainedInput {
  TracedValue value;
  std::string device;
  bool requires_grad = false;
};

struct ExplainedParameter {
  std::string name;
  TracedValue value;
  bool requires_grad = false;
};

/// Where an extra input comes from, or where an extra output goes to.
struct ExplainedBranch {
  std::string channel;              ///< empty without one
  std::optional<size_t> caller;     ///< index among the caller's extra inputs or outputs
  std::optional<size_t> operation;  ///< of an input: the operation that gives it
  std::vector<size_t> consumers;    ///< of an output: the operations that take it
  std::string what;                 ///< of an input: what the operation says that it is
  std::string device;               ///< where that lives
};

struct ExplainedOperation {
  std::string name;
  std::string label;
  std::vector<ExplainedParameter> parameters;
  std::vector<ExplainedBranch> extra_inputs;
  std::vector<ExplainedBranch> extra_outputs;
  bool runs_in_backward = false;
};

struct ExplainedStep {
  std::string op;
  bool fused = false;
  bool python = false;  ///< written in Python
  size_t first = 0;     ///< the basic operations it covers
  size_t count = 0;
  TracedStep trace;
  int64_t saved_bytes() const;
};

struct ExplainedFusion {
  std::string pass;
  std::string fusion;
  size_t position = 0;           ///< of the first basic operation
  std::vector<std::string> ops;  ///< what it covers, or the operation it was tried at
  bool taken = false;
  std::string reason;  ///< why it was not taken
};

/// A collective of one call.
struct ExplainedTransfer {
  std::string direction;  ///< "forward" or "backward"
  size_t step = 0;        ///< that starts it
  std::string op, collective, group, backend, format;
  int64_t ranks = 1;
  int64_t bytes = 0;       ///< from each rank
  std::string awaited_at;  ///< the kernel after which it is awaited; empty: the one that starts it
  int64_t measured = 0;    ///< how often one was awaited in this process so far,
  double hidden = 0;       ///< and the share of its time in which something else was done
};

/// One fuser, or a module between fusers that runs as it is.
struct ExplainedPart {
  std::string name;    ///< where it is in the model
  std::string module;  ///< the class of a module that is no fuser; empty for a fuser

  ExplainedInput input;
  std::vector<ExplainedInput> extra_inputs;
  std::string autocast;  ///< dtype, or empty
  std::string recompute;
  std::string recipe;  ///< empty without one
  bool training = true;
  bool gradients = false;  ///< backward will run

  std::vector<ExplainedOperation> ops;
  std::vector<ExplainedStep> forward;
  std::vector<ExplainedStep> backward;  ///< in forward order; they run from the last to the first
  std::vector<ExplainedFusion> considered;
  std::string note;  ///< what could not be told, and why
  /// How often the host waits for the device in one call; none where no operation can make it wait.
  std::optional<int64_t> host_syncs;
  std::vector<ExplainedTransfer> communication;

  bool is_fuser() const { return module.empty(); }
  int64_t saved_bytes() const;
  /// Of the caller's inputs that backward keeps alive.
  int64_t held_input_bytes() const;
  /// The name, where it has one, and what it is made of.
  std::string title() const;
};

struct Explanation {
  std::vector<ExplainedPart> parts;

  /// For people, in a terminal.
  std::string text() const;
  /// For programs. `indent` < 0: on one line.
  std::string json(int indent = -1) const;
  /// A picture that stands by itself: no scripts, no outside references.
  std::string svg() const;

  /// What is kept for backward besides inputs and parameters.
  int64_t saved_bytes() const;
  /// Names of the fused operations that run, forward and backward, each once.
  std::vector<std::string> fusions() const;
};

/// What differs between two plans.
struct PlanDiff {
  struct Line {
    char sign;  ///< ' ' in both, '-' in the first alone, '+' in the second alone
    std::string text;
  };
  struct Part {
    std::string name;
    std::vector<Line> situation;
    std::vector<Line> forward;
    std::vector<Line> backward;
    std::vector<std::string> reasons;  ///< why a fusion of one plan is not in the other
    int64_t saved_before = 0;
    int64_t saved_after = 0;
    bool differs() const;
  };
  std::vector<Part> parts;

  bool differs() const;
  std::string text() const;
  std::string json(int indent = -1) const;
};

PlanDiff diff(const Explanation& before, const Explanation& after);

/// An explanation of one fuser, and the outputs of the traced call, without memory.
struct ExplainedCall {
  ExplainedPart part;
  std::vector<Tensor> outputs;
  RunObserverPtr seen;
};

/// The plan as data, with what a trace of it saw.
ExplainedPart explain_plan(const Plan& plan, const Trace& trace);

/// "1.5 KiB".
std::string bytes_string(int64_t bytes);
/// "float32 [64, 256]"; "none" for no value.
std::string to_string(const TracedValue& value);

}  // namespace ligature
