// An explanation for programs.
#include "ligature/base/json.h"
#include "ligature/explain/explain.h"

namespace ligature {
namespace {

void write_fields(JsonWriter& json, const TracedValue& value) {
  json.key("dtype").value(value.format).key("shape").array(value.sizes);
  json.key("bytes").value(value.bytes);
}

void write(JsonWriter& json, const TracedValue& value) {
  if (value.format.empty()) {
    json.null();
    return;
  }
  json.begin_object();
  write_fields(json, value);
  json.end_object();
}

void write(JsonWriter& json, const ExplainedInput& input) {
  if (input.value.format.empty()) {
    json.null();
    return;
  }
  json.begin_object();
  write_fields(json, input.value);
  json.key("device").value(input.device).key("requires_grad").value(input.requires_grad);
  json.end_object();
}

void write(JsonWriter& json, const ExplainedBranch& branch, bool input) {
  json.begin_object().key("channel").value_or_null(branch.channel).key("caller");
  branch.caller ? json.value(*branch.caller) : json.null();
  if (input) {
    json.key("op");
    branch.operation ? json.value(*branch.operation) : json.null();
    if (!branch.what.empty())
      json.key("what").value(branch.what).key("device").value(branch.device);
  } else {
    json.key("ops").array(branch.consumers);
  }
  json.end_object();
}

void write(JsonWriter& json, const ExplainedOperation& op, size_t index) {
  json.begin_object().key("index").value(index).key("name").value(op.name);
  json.key("label").value_or_null(op.label);
  json.key("parameters").begin_array();
  for (const auto& parameter : op.parameters) {
    json.begin_object().key("name").value(parameter.name);
    write_fields(json, parameter.value);
    json.key("requires_grad").value(parameter.requires_grad).end_object();
  }
  json.end_array().key("extra_inputs").begin_array();
  for (const auto& branch : op.extra_inputs) write(json, branch, true);
  json.end_array().key("extra_outputs").begin_array();
  for (const auto& branch : op.extra_outputs) write(json, branch, false);
  json.end_array().key("runs_in_backward").value(op.runs_in_backward).end_object();
}

void write(JsonWriter& json, const ExplainedStep& step, bool forward) {
  json.begin_object().key("op").value(step.op).key("fused").value(step.fused);
  json.key("python").value(step.python).key("covers").begin_array();
  for (size_t i = step.first; i < step.first + step.count; ++i) json.value(i);
  json.end_array().key("ran").value(step.trace.ran).key("kernels").begin_array();
  for (const auto& kernel : step.trace.kernels) {
    json.begin_object().key("name").value(kernel.name).key("backend").value(kernel.backend);
    json.key("calls").array(kernel.calls);
    if (kernel.syncs) json.key("syncs").value(true);
    if (kernel.collective) json.key("collective").value(kernel.collective->group);
    json.end_object();
  }
  json.end_array().key(forward ? "input" : "grad_output");
  write(json, step.trace.input);
  json.key(forward ? "output" : "grad_input");
  write(json, step.trace.output);
  if (forward) {
    json.key("saved").begin_array();
    for (const auto& save : step.trace.saved) {
      json.begin_object().key("op").value(save.op).key("what").value(save.what);
      write_fields(json, save.value);
      json.key("counted").value(save.counted).end_object();
    }
    json.end_array().key("saved_bytes").value(step.saved_bytes());
  }
  json.end_object();
}

void write(JsonWriter& json, const ExplainedPart& part) {
  json.begin_object().key("name").value(part.name);
  json.key("kind").value(part.is_fuser() ? "fuser" : "module");
  json.key("note").value_or_null(part.note);
  if (!part.is_fuser()) {
    json.key("module").value(part.module).end_object();
    return;
  }
  json.key("situation").begin_object().key("input");
  write(json, part.input);
  json.key("extra_inputs").begin_array();
  for (const auto& input : part.extra_inputs) write(json, input);
  json.end_array().key("autocast").value_or_null(part.autocast);
  json.key("recompute").value(part.recompute).key("recipe").value_or_null(part.recipe);
  json.key("training").value(part.training).key("gradients").value(part.gradients).end_object();
  json.key("ops").begin_array();
  for (size_t i = 0; i < part.ops.size(); ++i) write(json, part.ops[i], i);
  json.end_array().key("forward").begin_array();
  for (const auto& step : part.forward) write(json, step, true);
  json.end_array().key("backward").begin_array();
  for (const auto& step : part.backward) write(json, step, false);
  json.end_array().key("saved_bytes").value(part.saved_bytes());
  json.key("held_input_bytes").value(part.held_input_bytes());
  json.key("host_syncs");
  part.host_syncs ? json.value(*part.host_syncs) : json.null();
  if (!part.communication.empty()) {
    json.key("communication").begin_array();
    for (const auto& transfer : part.communication) {
      json.begin_object().key("direction").value(transfer.direction);
      json.key("step").value(transfer.step).key("op").value(transfer.op);
      json.key("collective").value(transfer.collective).key("group").value(transfer.group);
      json.key("backend").value(transfer.backend).key("ranks").value(transfer.ranks);
      json.key("bytes").value(transfer.bytes).key("format").value(transfer.format);
      json.key("awaited_at").value_or_null(transfer.awaited_at);
      json.key("measured").value(transfer.measured).key("hidden").value(transfer.hidden);
      json.end_object();
    }
    json.end_array();
  }
  json.key("considered").begin_array();
  for (const auto& fusion : part.considered) {
    json.begin_object().key("pass").value(fusion.pass).key("fusion").value(fusion.fusion);
    json.key("position").value(fusion.position).key("ops").array(fusion.ops);
    json.key("taken").value(fusion.taken).key("reason").value_or_null(fusion.reason).end_object();
  }
  json.end_array().end_object();
}

void write(JsonWriter& json, const char* name, const std::vector<PlanDiff::Line>& lines) {
  json.key(name).begin_array();
  for (const auto& line : lines) {
    json.begin_object().key("sign").value(std::string(1, line.sign));
    json.key("text").value(line.text).end_object();
  }
  json.end_array();
}

}  // namespace

std::string Explanation::json(int indent) const {
  JsonWriter json(indent);
  json.begin_object().key("version").value(int64_t{1}).key("parts").begin_array();
  for (const auto& part : parts) write(json, part);
  json.end_array().key("saved_bytes").value(saved_bytes()).key("fusions").array(fusions());
  json.end_object();
  return json.take();
}

std::string PlanDiff::json(int indent) const {
  JsonWriter json(indent);
  json.begin_object().key("version").value(int64_t{1}).key("differs").value(differs());
  json.key("parts").begin_array();
  for (const auto& part : parts) {
    json.begin_object().key("name").value(part.name).key("differs").value(part.differs());
    write(json, "situation", part.situation);
    write(json, "forward", part.forward);
    write(json, "backward", part.backward);
    json.key("reasons").array(part.reasons);
    json.key("saved_before").value(part.saved_before);
    json.key("saved_after").value(part.saved_after).end_object();
  }
  json.end_array().end_object();
  return json.take();
}

}  // namespace ligature
