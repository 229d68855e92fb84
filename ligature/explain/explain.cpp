#include "ligature/explain/explain.h"

#include <algorithm>
#include <cstdio>

#include "ligature/distributed/collectives.h"

namespace ligature {
namespace {

std::vector<ExplainedStep> explain_steps(const std::vector<PlanStep>& steps,
                                         const std::vector<TracedStep>& traced) {
  std::vector<ExplainedStep> out;
  for (size_t k = 0; k < steps.size(); ++k) {
    const PlanStep& step = steps[k];
    ExplainedStep& explained = out.emplace_back();
    explained.op = step.op->name();
    explained.fused = step.op->is_fused_op();
    explained.python = step.op->is_python_op();
    explained.first = step.first;
    explained.count = step.count;
    explained.trace = traced[k];
  }
  return out;
}

ExplainedOperation explain_operation(const Plan& plan, size_t index) {
  const BasicOperation& op = *plan.basic_ops[index];
  const Wiring& wiring = *plan.wiring;
  ExplainedOperation out;
  out.name = op.name();
  out.label = op.label() == op.name() ? "" : op.label();
  out.runs_in_backward = index >= plan.first_backward_op;
  for (size_t j = 0; j < wiring.inputs[index].size(); ++j) {
    const Wiring::Input& input = wiring.inputs[index][j];
    ExplainedBranch& branch = out.extra_inputs.emplace_back();
    branch.channel = op.extra_input_channel(j);
    branch.what = op.describe_extra_input(j);
    if (input.caller != Wiring::kNone) branch.caller = input.caller;
    if (input.producer != Wiring::kNone) branch.operation = input.producer;
  }
  for (size_t j = 0; j < wiring.outputs[index].size(); ++j) {
    ExplainedBranch& branch = out.extra_outputs.emplace_back();
    branch.channel = op.extra_output_channel(j);
    const size_t caller = wiring.outputs[index][j].caller;
    if (caller != Wiring::kNone) branch.caller = caller;
    for (size_t other = 0; other < wiring.inputs.size(); ++other) {
      for (const Wiring::Input& input : wiring.inputs[other]) {
        if (input.producer == index && input.output == j) branch.consumers.push_back(other);
      }
    }
  }
  return out;
}

std::vector<ExplainedFusion> explain_considered(const Plan& plan) {
  std::vector<ExplainedFusion> out;
  for (const auto& report : plan.reports) {
    size_t offset = 0;  // the backward pass sees only what runs in backward
    if (report.pass == Pass::Backward) {
      for (const PlanStep& step : plan.backward) {
        if (step.first + step.count <= plan.first_backward_op) offset = step.first + step.count;
      }
    }
    for (const Consideration& c : report.considered) {
      ExplainedFusion& fusion = out.emplace_back();
      fusion.pass = pass_name(report.pass);
      fusion.fusion = c.fusion;
      fusion.position = c.position + offset;
      fusion.taken = c.reason.empty();
      fusion.reason = c.reason;
      for (size_t i = fusion.position; i < fusion.position + c.count; ++i) {
        if (i < plan.basic_ops.size()) fusion.ops.push_back(plan.basic_ops[i]->name());
      }
    }
  }
  return out;
}

}  // namespace

std::string bytes_string(int64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  const char* units[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f %s" : "%.0f %s", value, units[unit]);
  return text;
}

std::string to_string(const TracedValue& value) {
  return value.format.empty() ? "none" : value.format + " " + sizes_string(value.sizes);
}

int64_t ExplainedStep::saved_bytes() const {
  int64_t bytes = 0;
  for (const TracedSave& save : trace.saved) bytes += save.counted ? save.value.bytes : 0;
  return bytes;
}

int64_t ExplainedPart::saved_bytes() const {
  int64_t bytes = 0;
  for (const ExplainedStep& step : forward) bytes += step.saved_bytes();
  return bytes;
}

int64_t ExplainedPart::held_input_bytes() const {
  int64_t bytes = 0;
  std::vector<std::string> seen;
  for (const ExplainedStep& step : forward) {
    for (const TracedSave& save : step.trace.saved) {
      const bool is_input = save.what == "input" || save.what.rfind("extra input", 0) == 0;
      if (!is_input || std::find(seen.begin(), seen.end(), save.what) != seen.end()) continue;
      seen.push_back(save.what);
      bytes += save.value.bytes;
    }
  }
  return bytes;
}

std::string ExplainedPart::title() const {
  std::string what = module;
  for (const auto& op : ops) what += (what.empty() ? "" : ", ") + op.name;
  return name.empty() ? what : name + ": " + what;
}

int64_t Explanation::saved_bytes() const {
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += part.saved_bytes();
  return bytes;
}

std::vector<std::string> Explanation::fusions() const {
  std::vector<std::string> out;
  for (const auto& part : parts) {
    for (const auto* steps : {&part.forward, &part.backward}) {
      for (const auto& step : *steps) {
        const bool known = std::find(out.begin(), out.end(), step.op) != out.end();
        if (step.fused && !known) out.push_back(step.op);
      }
    }
  }
  return out;
}

namespace {

bool has_emulated(const Trace& trace) {
  const auto emulated = [](const TracedStep& step) {
    return std::any_of(step.kernels.begin(), step.kernels.end(),
                       [](const kernels::KernelCall& call) { return call.backend == "emulated"; });
  };
  return std::any_of(trace.forward.begin(), trace.forward.end(), emulated) ||
         std::any_of(trace.backward.begin(), trace.backward.end(), emulated);
}

/// Nothing where no operation can make the host wait: none takes what it may have to read.
std::optional<int64_t> host_syncs(const Plan& plan, const Trace& trace) {
  const auto may_wait = [](const BasicOpPtr& op) {
    for (size_t i = 0; i < op->num_extra_inputs(); ++i) {
      if (op->extra_input_may_be_elsewhere(i)) return true;
    }
    return false;
  };
  if (std::none_of(plan.basic_ops.begin(), plan.basic_ops.end(), may_wait)) return std::nullopt;
  int64_t count = 0;
  for (const auto* steps : {&trace.forward, &trace.backward}) {
    for (const TracedStep& step : *steps) {
      count += std::count_if(step.kernels.begin(), step.kernels.end(),
                             [](const kernels::KernelCall& call) { return call.syncs; });
    }
  }
  return count;
}

void add_transfers(std::vector<ExplainedTransfer>& out, const char* direction,
                   const std::vector<TracedStep>& steps) {
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto& kernels = steps[k].kernels;
    for (size_t i = 0; i < kernels.size(); ++i) {
      const auto& call = kernels[i].collective;
      if (!call || call->awaited) continue;
      ExplainedTransfer transfer{direction,
                                 k,
                                 call->op,
                                 kernels[i].name,
                                 call->group,
                                 kernels[i].backend,
                                 call->format,
                                 call->ranks,
                                 call->bytes,
                                 "",
                                 0,
                                 0};
      for (size_t j = i + 1; j < kernels.size(); ++j) {
        const auto& later = kernels[j].collective;
        if (later && later->awaited && kernels[j].name == "await " + kernels[i].name) {
          if (j > i + 1) transfer.awaited_at = kernels[j - 1].name;
          break;
        }
      }
      const auto times = distributed::transfer_times(call->op, kernels[i].name);
      transfer.measured = times.count;
      transfer.hidden = times.in_flight > 0 ? 1.0 - times.waited / times.in_flight : 0.0;
      out.push_back(std::move(transfer));
    }
  }
}

}  // namespace

ExplainedPart explain_plan(const Plan& plan, const Trace& trace) {
  ExplainedPart part;
  part.recompute = plan.options.recompute == Recompute::Cheap ? "cheap" : "none";
  if (plan.options.recipe != nullptr) {
    const Recipe& recipe = *plan.options.recipe;
    part.recipe = recipe.name();
    if (recipe.backward_override() != BackwardOverride::None) {
      part.recipe +=
          std::string(", backward ") + backward_override_name(recipe.backward_override());
    }
    if (plan.options.calibrating) part.recipe += ", calibrating";
  }
  if (has_emulated(trace)) {
    part.note +=
        "products marked [emulated] are those of the format, computed in bfloat16 (float32 where "
        "the model is not bfloat16) with float32 accumulation: this device has no such products; "
        "use_split_accumulator has no effect on them";
  }
  part.gradients = plan.options.requires_grad;
  for (size_t i = 0; i < plan.basic_ops.size(); ++i) {
    part.ops.push_back(explain_operation(plan, i));
    const std::string note = plan.basic_ops[i]->note();
    if (note.empty()) continue;
    part.note += (part.note.empty() ? "" : "; ") + std::to_string(i) + " " +
                 plan.basic_ops[i]->name() + ": " + note;
  }
  part.forward = explain_steps(plan.forward, trace.forward);
  part.backward = explain_steps(plan.backward, trace.backward);
  part.considered = explain_considered(plan);
  part.host_syncs = host_syncs(plan, trace);
  add_transfers(part.communication, "forward", trace.forward);
  add_transfers(part.communication, "backward", trace.backward);
  for (const PartialGradients& partial : plan.partial_gradients) {
    part.note += (part.note.empty() ? "" : "; ") + std::to_string(partial.op) + " " +
                 plan.basic_ops[partial.op]->name() +
                 ": its parameters see one rank's tokens, so their gradients have to be added up "
                 "over the ranks (reduce_partial_grads)";
  }
  return part;
}

}  // namespace ligature
