#include "ligature/fuser/match.h"

namespace ligature {
namespace {

struct Attempt {
  const std::string& fusion;
  at::ArrayRef<OpPtr> ops;
  std::vector<at::ArrayRef<OpPtr>> elements;
  size_t furthest = 0;     // how many elements matched at best
  size_t furthest_at = 0;  // and at which operation that stopped
};

bool match_from(const Pattern& pattern, size_t element, size_t at, Attempt& attempt) {
  if (at > attempt.furthest_at || (at == attempt.furthest_at && element >= attempt.furthest)) {
    attempt.furthest = element;
    attempt.furthest_at = at;
  }
  if (element == pattern.size()) return true;
  const PatternElement& wanted = pattern[element];
  const size_t taken = at < attempt.ops.size() ? wanted.take(attempt.ops.slice(at)) : 0;
  LIGATURE_CHECK_STATE(at + taken <= attempt.ops.size(), "fusion '", attempt.fusion, "': place '",
                       wanted.what, "' of its pattern covers ", taken, " of ",
                       attempt.ops.size() - at, " operations");
  if (taken > 0) {
    attempt.elements.push_back(attempt.ops.slice(at, taken));
    if (match_from(pattern, element + 1, at + taken, attempt)) return true;
    attempt.elements.pop_back();
  }
  if (!wanted.optional) return false;
  attempt.elements.push_back({});
  if (match_from(pattern, element + 1, at, attempt)) return true;
  attempt.elements.pop_back();
  return false;
}

std::string mismatch(const Pattern& pattern, const Attempt& attempt) {
  const std::string found = attempt.furthest_at < attempt.ops.size()
                                ? attempt.ops[attempt.furthest_at]->name()
                                : "the end";
  return "wanted " + pattern[attempt.furthest].what + ", found " + found;
}

bool has_internal_channel(const OpList& ops) {
  std::vector<std::string> produced;
  for (const auto& op : ops) {
    for (const auto& basic : op->basic_ops()) {
      for (size_t i = 0; i < basic->num_extra_inputs(); ++i) {
        for (const auto& name : produced) {
          if (name == basic->extra_input_channel(i)) return true;
        }
      }
      for (size_t i = 0; i < basic->num_extra_outputs(); ++i) {
        if (const auto& name = basic->extra_output_channel(i); !name.empty()) {
          produced.push_back(name);
        }
      }
    }
  }
  return false;
}

}  // namespace

namespace {

/// The fused operation for a match, or why there is none.
OpPtr fuse(const FusionRule& rule, const Match& match, const PlanOptions& options,
           std::string& reason) {
  reason = rule.why_not ? rule.why_not(match, options) : std::string();
  if (!reason.empty()) return nullptr;
  OpPtr fused = rule.make(match);
  LIGATURE_CHECK_TYPE(fused != nullptr, "fusion '", rule.name, "' returned no operation");
  if (!has_internal_channel(match.ops) || fused->handles_internal_channels()) return fused;
  reason = "it does not run a channel inside itself";
  return nullptr;
}

}  // namespace

OpList apply_rule(const FusionRule& rule, const OpList& ops, const PlanOptions& options,
                  std::vector<Consideration>* considered, bool only_in_te_ops) {
  LIGATURE_CHECK(!rule.pattern.empty(), "fusion '", rule.name, "' has an empty pattern");
  OpList out;
  size_t position = 0;
  const auto note = [&](std::string reason, size_t count = 1) {
    if (considered == nullptr || (only_in_te_ops && !reason.empty())) return;
    considered->push_back({rule.name, position, std::move(reason), count});
  };
  for (size_t i = 0; i < ops.size();) {
    Attempt attempt{rule.name, at::ArrayRef<OpPtr>(ops).slice(i), {}, 0, 0};
    OpPtr fused;
    size_t covered = 1;
    if (match_from(rule.pattern, 0, 0, attempt)) {
      size_t count = 0;
      for (const auto& element : attempt.elements) count += element.size();
      Match match{OpList(ops.begin() + i, ops.begin() + i + count), attempt.elements,
                  options.planner};
      if (!only_in_te_ops || rule.in_te_ops(match, options)) {
        std::string reason;
        fused = fuse(rule, match, options, reason);
        if (fused != nullptr) covered = count;
        note(std::move(reason), fused != nullptr ? fused->basic_ops().size() : 1);
      }
    } else if (attempt.furthest_at > 0) {
      note(mismatch(rule.pattern, attempt));
    }
    if (fused != nullptr) out.push_back(fused);
    for (size_t k = i; k < i + covered; ++k) {
      position += ops[k]->basic_ops().size();
      if (fused == nullptr) out.push_back(ops[k]);
    }
    i += covered;
  }
  return out;
}

}  // namespace ligature
