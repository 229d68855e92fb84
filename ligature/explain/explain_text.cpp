// An explanation for people, in a terminal.
#include <algorithm>

#include "ligature/explain/explain.h"

namespace ligature {
namespace {

std::string join(const std::vector<std::string>& items, const char* between) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : between) + item;
  return out;
}

std::string plural(size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string covered(const ExplainedPart& part, const ExplainedStep& step) {
  std::vector<std::string> names;
  for (size_t i = step.first; i < step.first + step.count; ++i) {
    names.push_back(std::to_string(i) + " " + part.ops[i].name);
  }
  return join(names, " + ");
}

using Items = std::vector<std::string>;

Items kernel_items(const TracedStep& trace) {
  Items out;
  for (const auto& kernel : trace.kernels) {
    Items calls;
    for (const auto& call : kernel.calls) calls.push_back(call.substr(call.rfind(':') + 1));
    std::string where = kernel.backend;
    if (!calls.empty()) where += ": " + join(calls, ", ");
    if (kernel.syncs) where += ", the host waits";
    if (kernel.collective && !kernel.collective->awaited) {
      where += ": " + bytes_string(kernel.collective->bytes) + " " + kernel.collective->format +
               " to " + plural(static_cast<size_t>(kernel.collective->ranks), "rank");
    }
    const bool is_call = kernel.name.rfind("aten::", 0) == 0;
    out.push_back(is_call ? kernel.name : kernel.name + " [" + where + "]");
  }
  if (out.empty()) out.emplace_back("nothing");
  return out;
}

/// "weight12" is "weight" and 12; no number: -1.
std::pair<std::string, int64_t> numbered(const std::string& name) {
  size_t end = name.size();
  while (end > 0 && name[end - 1] >= '0' && name[end - 1] <= '9') --end;
  const size_t digits = name.size() - end;
  if (digits == 0 || digits > 6) return {name, -1};
  return {name.substr(0, end), std::stoll(name.substr(end))};
}

/// Names with numbers that follow each other in one: "weight0 to weight7".
Items in_runs(const Items& names) {
  Items out;
  for (size_t i = 0; i < names.size();) {
    const auto [stem, first] = numbered(names[i]);
    size_t end = i + 1;
    while (first >= 0 && end < names.size() &&
           numbered(names[end]) == std::pair(stem, first + static_cast<int64_t>(end - i))) {
      ++end;
    }
    out.push_back(end - i > 2 ? names[i] + " to " + names[end - 1] : names[i]);
    i = end - i > 2 ? end : i + 1;
  }
  return out;
}

/// `counted`: what takes memory for backward alone; otherwise what is there anyway.
Items saved_items(const ExplainedPart& part, const ExplainedStep& step, bool counted) {
  Items out;
  for (const TracedSave& save : step.trace.saved) {
    if (save.counted != counted) continue;
    const std::string owner = step.count > 1 ? part.ops[save.op].name : "";
    if (!counted) {
      const bool parameter = save.what != "input" && save.what.rfind("extra", 0) != 0 &&
                             save.what.rfind("output", 0) != 0 && !owner.empty();
      out.push_back(parameter ? owner + "." + save.what : save.what);
      continue;
    }
    std::string text = save.what == "made by forward" ? "" : save.what + " ";
    text += to_string(save.value) + " " + bytes_string(save.value.bytes);
    out.push_back(owner.empty() ? text : text + " for " + owner);
  }
  return out;
}

// Breaks the line between items; later lines are indented like the first item.
std::string listed(const std::string& lead, const Items& items, const char* between, size_t width) {
  std::string out = lead;
  size_t column = lead.size();
  for (size_t k = 0; k < items.size(); ++k) {
    const std::string item = items[k] + (k + 1 < items.size() ? between : "");
    if (k > 0 && column + item.size() > width) {
      while (out.back() == ' ') out.pop_back();
      out += "\n" + std::string(lead.size(), ' ');
      column = lead.size();
    }
    out += item;
    column += item.size();
  }
  return out + "\n";
}

Items words(const std::string& text) {
  Items out;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find(' ', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

std::string branch_text(const ExplainedPart& part, const ExplainedBranch& branch, bool input,
                        size_t slot) {
  std::string out = std::string(input ? "extra input " : "extra output ") + std::to_string(slot);
  std::vector<std::string> ends;
  const std::string index = branch.caller ? std::to_string(*branch.caller) : "";
  if (branch.caller) ends.push_back(input ? "the caller's " + index : "the caller as " + index);
  if (branch.operation) {
    ends.push_back(std::to_string(*branch.operation) + " " + part.ops[*branch.operation].name);
  }
  for (size_t consumer : branch.consumers) {
    ends.push_back(std::to_string(consumer) + " " + part.ops[consumer].name);
  }
  out += (input ? " from " : " to ") + (ends.empty() ? "nobody" : join(ends, ", "));
  if (!branch.channel.empty()) out += " (channel '" + branch.channel + "')";
  if (!branch.what.empty()) out += ": " + branch.what + " on " + branch.device;
  return out;
}

std::string input_text(const ExplainedInput& input) {
  return to_string(input.value) + " on " + input.device +
         (input.requires_grad ? ", needs a gradient" : "");
}

constexpr size_t kWidth = 100;

std::string operations_text(const ExplainedPart& part) {
  std::string out = "  operations\n";
  size_t longest = 0;
  for (const auto& op : part.ops) longest = std::max(longest, op.name.size());
  for (size_t i = 0; i < part.ops.size(); ++i) {
    const ExplainedOperation& op = part.ops[i];
    std::string lead = "    " + std::string(i < 10 ? " " : "") + std::to_string(i) + " " + op.name;
    std::vector<std::string> facts;
    for (size_t j = 0; j < op.parameters.size();) {
      const auto text = [&](size_t k) {
        return to_string(op.parameters[k].value) +
               (op.parameters[k].requires_grad ? "" : " (frozen)");
      };
      Items names{op.parameters[j].name};
      const std::string value = text(j);
      while (++j < op.parameters.size() && text(j) == value) {
        names.push_back(op.parameters[j].name);
      }
      for (const std::string& name : in_runs(names)) facts.push_back(name + " " + value);
    }
    for (size_t j = 0; j < op.extra_inputs.size(); ++j) {
      facts.push_back(branch_text(part, op.extra_inputs[j], true, j));
    }
    for (size_t j = 0; j < op.extra_outputs.size(); ++j) {
      facts.push_back(branch_text(part, op.extra_outputs[j], false, j));
    }
    if (part.gradients && !op.runs_in_backward) facts.push_back("takes no part in backward");
    if (facts.empty()) {
      out += lead + "\n";
      continue;
    }
    lead += std::string(longest - op.name.size() + 2, ' ');
    out += listed(lead, facts, "; ", kWidth);
  }
  return out;
}

std::string steps_text(const ExplainedPart& part, bool forward) {
  const auto& steps = forward ? part.forward : part.backward;
  std::string out = forward ? "  forward\n" : "  backward, in the order it runs\n";
  for (size_t k = 0; k < steps.size(); ++k) {
    const ExplainedStep& step = steps[forward ? k : steps.size() - 1 - k];
    if (!forward && step.first + step.count <= 0) continue;
    bool runs = forward;
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      runs = runs || part.ops[i].runs_in_backward;
    }
    if (!runs) continue;
    if (step.trace.ran) out += "      ↓ " + to_string(step.trace.input) + "\n";
    std::string line = "    " + std::string(step.fused ? "■ " : "□ ") + step.op;
    if (step.fused) line += " = " + covered(part, step);
    out += line + (step.fused ? "" : " (" + std::to_string(step.first) + ")") + "\n";
    if (!step.trace.ran) {
      out += forward ? "        not run yet\n" : "        not run in the traced call\n";
      continue;
    }
    out += listed("        runs   ", kernel_items(step.trace), ", ", kWidth);
    const Items saved = saved_items(part, step, true);
    const Items kept = saved_items(part, step, false);
    if (!saved.empty()) out += listed("        saves  ", saved, "; ", kWidth);
    if (!kept.empty()) out += listed("        keeps  ", in_runs(kept), ", ", kWidth);
  }
  const ExplainedStep& last = forward ? steps.back() : steps.front();
  if (last.trace.ran) out += "      ↓ " + to_string(last.trace.output) + "\n";
  return out;
}

/// What travels, and how much of its time something else was done, as far as it has been seen.
std::string communication_text(const ExplainedPart& part) {
  std::string out;
  for (const ExplainedTransfer& transfer : part.communication) {
    std::string text = transfer.collective + " for " + transfer.op + " over group '" +
                       transfer.group + "' of " + std::to_string(transfer.ranks) + " (" +
                       transfer.backend + "): " + bytes_string(transfer.bytes) + " " +
                       transfer.format + " from each rank";
    text += transfer.awaited_at.empty() ? "" : ", awaited after " + transfer.awaited_at;
    if (transfer.measured > 0) {
      text += "; measured " + std::to_string(transfer.measured) + " times, " +
              std::to_string(static_cast<int>(100.0 * transfer.hidden + 0.5)) + " % hidden";
    }
    out += listed("    ", words(text), " ", kWidth);
  }
  return out.empty() ? "" : "  communication\n" + out;
}

std::string considered_text(const ExplainedPart& part) {
  std::string out;
  for (const ExplainedFusion& fusion : part.considered) {
    const std::string where =
        fusion.pass + ", " + std::to_string(fusion.position) + " " + join(fusion.ops, " + ");
    const std::string text =
        fusion.fusion + " (" + where + ")" + (fusion.taken ? "" : ": " + fusion.reason);
    out +=
        std::string("    ") + (fusion.taken ? "✓ " : "✗ ") + listed("", words(text), " ", kWidth);
  }
  return out.empty() ? "" : "  fusions considered\n" + out;
}

std::string part_text(const ExplainedPart& part) {
  if (!part.is_fuser()) {
    return part.title() + ", runs as it is" + (part.note.empty() ? "" : " (" + part.note + ")") +
           "\n";
  }
  std::string out = listed("", words(part.title()), " ", kWidth);
  out += "  " + plural(part.ops.size(), "basic operation") + ", " +
         plural(part.forward.size(), "forward step");
  if (part.gradients) out += ", " + plural(part.backward.size(), "backward step");
  out += "\n";
  if (!part.input.value.format.empty()) {
    out += "  input " + input_text(part.input) + "\n";
    for (size_t k = 0; k < part.extra_inputs.size(); ++k) {
      out += "  extra input " + std::to_string(k) + " " + input_text(part.extra_inputs[k]) + "\n";
    }
  }
  std::string settings = part.gradients ? "" : "no gradients; ";
  settings += "recompute " + part.recompute;
  if (!part.autocast.empty()) settings += "; autocast " + part.autocast;
  if (!part.recipe.empty()) settings += "; recipe " + part.recipe;
  if (!part.training) settings += "; evaluation mode";
  out += "  " + settings + "\n";
  if (!part.note.empty()) out += listed("  note: ", words(part.note), " ", kWidth);
  out += operations_text(part) + steps_text(part, true);
  if (part.gradients) {
    out += "  saved for backward: " + bytes_string(part.saved_bytes());
    const int64_t held = part.held_input_bytes();
    if (held > 0) out += ", and " + bytes_string(held) + " of inputs kept alive";
    out += "\n" + steps_text(part, false);
  }
  if (part.host_syncs) out += "  host syncs: " + std::to_string(*part.host_syncs) + "\n";
  return out + communication_text(part) + considered_text(part);
}

}  // namespace

std::string Explanation::text() const {
  std::string out;
  for (const auto& part : parts) {
    if (!out.empty() && (part.is_fuser() || out.find('\n') + 1 != out.size())) out += "\n";
    out += part_text(part);
  }
  if (parts.size() > 1) {
    out += "\nsaved for backward in all: " + bytes_string(saved_bytes()) + "\n";
  }
  return out;
}

}  // namespace ligature
