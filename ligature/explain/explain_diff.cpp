// What differs between two plans.
#include <algorithm>

#include "ligature/explain/explain.h"

namespace ligature {
namespace {

using Lines = std::vector<std::string>;

/// The shortest way from one list of lines to the other.
std::vector<PlanDiff::Line> diff_lines(const Lines& a, const Lines& b) {
  std::vector<std::vector<size_t>> common(a.size() + 1, std::vector<size_t>(b.size() + 1, 0));
  for (size_t i = a.size(); i-- > 0;) {
    for (size_t j = b.size(); j-- > 0;) {
      common[i][j] =
          a[i] == b[j] ? common[i + 1][j + 1] + 1 : std::max(common[i + 1][j], common[i][j + 1]);
    }
  }
  std::vector<PlanDiff::Line> out;
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() || j < b.size()) {
    if (i < a.size() && j < b.size() && a[i] == b[j]) {
      out.push_back({' ', a[i++]});
      ++j;
    } else if (j == b.size() || (i < a.size() && common[i + 1][j] >= common[i][j + 1])) {
      out.push_back({'-', a[i++]});
    } else {
      out.push_back({'+', b[j++]});
    }
  }
  return out;
}

bool has_change(const std::vector<PlanDiff::Line>& lines) {
  return std::any_of(lines.begin(), lines.end(), [](const auto& line) { return line.sign != ' '; });
}

Lines situation_lines(const ExplainedPart& part) {
  if (!part.is_fuser()) return {"module " + part.module};
  Lines lines{"input " + to_string(part.input.value) + " on " + part.input.device};
  for (const auto& extra : part.extra_inputs) {
    lines.push_back("extra input " + to_string(extra.value));
  }
  lines.push_back(part.gradients ? "gradients" : "no gradients");
  lines.push_back("recompute " + part.recompute);
  if (!part.autocast.empty()) lines.push_back("autocast " + part.autocast);
  if (!part.recipe.empty()) lines.push_back("recipe " + part.recipe);
  return lines;
}

Lines step_lines(const ExplainedPart& part, const std::vector<ExplainedStep>& steps) {
  Lines lines;
  for (const auto& step : steps) {
    std::string names;
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      names += (names.empty() ? "" : " + ") + part.ops[i].name;
    }
    std::string line = step.fused ? step.op + " = " + names : step.op;
    if (!step.trace.output.format.empty()) line += " → " + to_string(step.trace.output);
    if (step.saved_bytes() > 0) line += ", saves " + bytes_string(step.saved_bytes());
    lines.push_back(std::move(line));
  }
  return lines;
}

/// For every fusion that `with` took and `without` did not: why.
void add_reasons(const ExplainedPart& with, const ExplainedPart& without, const char* which,
                 std::vector<std::string>& reasons) {
  for (const auto& taken : with.considered) {
    if (!taken.taken) continue;
    std::string why = "it was not tried there";
    const bool backward = taken.pass == pass_name(Pass::Backward);
    for (const auto& step : backward ? without.backward : without.forward) {
      const bool covers = step.first <= taken.position && taken.position < step.first + step.count;
      if (covers && step.fused) why = step.op + " covers it";
    }
    bool also = false;
    for (const auto& other : without.considered) {
      if (other.fusion != taken.fusion || other.position != taken.position ||
          other.pass != taken.pass) {
        continue;
      }
      also = also || other.taken;
      why = other.reason;
    }
    if (also) continue;
    reasons.push_back(taken.fusion + " at " + std::to_string(taken.position) + " is not in the " +
                      which + " plan: " + why);
  }
}

PlanDiff::Part diff_part(const ExplainedPart& a, const ExplainedPart& b) {
  PlanDiff::Part out;
  out.name = a.title() == b.title() ? a.title() : a.title() + " / " + b.title();
  out.situation = diff_lines(situation_lines(a), situation_lines(b));
  out.forward = diff_lines(step_lines(a, a.forward), step_lines(b, b.forward));
  out.backward = diff_lines(step_lines(a, a.backward), step_lines(b, b.backward));
  add_reasons(a, b, "second", out.reasons);
  add_reasons(b, a, "first", out.reasons);
  out.saved_before = a.saved_bytes();
  out.saved_after = b.saved_bytes();
  return out;
}

std::string lines_text(const char* title, const std::vector<PlanDiff::Line>& lines) {
  if (!has_change(lines)) return "";
  std::string out = std::string("  ") + title + "\n";
  for (const auto& line : lines) out += std::string("  ") + line.sign + " " + line.text + "\n";
  return out;
}

}  // namespace

bool PlanDiff::Part::differs() const {
  return has_change(situation) || has_change(forward) || has_change(backward) ||
         saved_before != saved_after;
}

bool PlanDiff::differs() const {
  return std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.differs(); });
}

PlanDiff diff(const Explanation& before, const Explanation& after) {
  PlanDiff out;
  for (size_t k = 0; k < std::max(before.parts.size(), after.parts.size()); ++k) {
    ExplainedPart missing;
    missing.module = "nothing";
    out.parts.push_back(diff_part(k < before.parts.size() ? before.parts[k] : missing,
                                  k < after.parts.size() ? after.parts[k] : missing));
  }
  return out;
}

std::string PlanDiff::text() const {
  std::string out;
  for (const Part& part : parts) {
    if (!part.differs()) continue;
    out += part.name + "\n";
    out += lines_text("situation", part.situation);
    out += lines_text("forward", part.forward);
    out += lines_text("backward", part.backward);
    if (part.saved_before != part.saved_after) {
      out += "  saved for backward: " + bytes_string(part.saved_before) + " → " +
             bytes_string(part.saved_after) + "\n";
    }
    for (const auto& reason : part.reasons) out += "  " + reason + "\n";
  }
  return out.empty() ? "the plans are the same\n" : out;
}

}  // namespace ligature
