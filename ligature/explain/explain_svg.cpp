// An explanation as a picture. The basic operations stand in the middle, from top to bottom; on the
// left the forward steps that cover them, on the right the backward steps. Between two steps stands
// the format of what passes from one to the next; arcs are channels.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "ligature/explain/explain.h"

namespace ligature {
namespace {

constexpr double kPictureWidth = 640;
constexpr double kSide = 214;    // width of a step
constexpr double kMiddle = 124;  // width of an operation
constexpr double kMargin = 12;
constexpr double kLeft = kMargin;
constexpr double kCentre = (kPictureWidth - kMiddle) / 2;
constexpr double kRight = kPictureWidth - kMargin - kSide;
constexpr double kGap = 22;  // between two steps, for the format
constexpr double kLine = 14;
constexpr double kPadding = 8;

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20) out += c;
    }
  }
  return out;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  std::string out = text;
  if (out.size() > 2 && out.substr(out.size() - 2) == ".0") out.resize(out.size() - 2);
  return out;
}

size_t letters(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

/// Cut to what fits into `width` at this size of letters; 0.56 em is a wide sans-serif's mean, and
/// a bold one takes a sixth more.
std::string fitted(const std::string& text, double width, double size) {
  const auto most = static_cast<size_t>(width / (0.56 * size));
  if (letters(text) <= most) return text;
  std::string out;
  size_t count = 0;
  for (const char c : text) {
    if ((static_cast<unsigned char>(c) & 0xC0U) != 0x80U && ++count >= most) break;
    out += c;
  }
  return out + "…";
}

struct Text {
  std::string text;
  const char* style;  // class
  double size;
};

/// What is written into a step's box.
std::vector<Text> step_lines(const ExplainedStep& step, bool forward) {
  std::vector<Text> lines{{step.op, "lg-name", 13}};
  if (!step.trace.ran) {
    lines.push_back({forward ? "not run yet" : "not run", "lg-note", 10.5});
    return lines;
  }
  for (const auto& kernel : step.trace.kernels) {
    std::string name = kernel.name.substr(kernel.name.rfind(':') + 1);
    lines.push_back({name + " · " + kernel.backend, "lg-kernel", 10.5});
  }
  if (step.saved_bytes() > 0) {
    lines.push_back({"saves " + bytes_string(step.saved_bytes()), "lg-save", 10.5});
  } else if (!step.trace.saved.empty()) {
    lines.push_back({"keeps inputs or parameters", "lg-note", 10.5});
  }
  return lines;
}

bool runs_backward(const ExplainedPart& part, const ExplainedStep& step) {
  for (size_t i = step.first; i < step.first + step.count; ++i) {
    if (part.ops[i].runs_in_backward) return true;
  }
  return false;
}

class PartPicture {
 public:
  PartPicture(const ExplainedPart& part, double top) : part_(part), top_(top) {}

  /// Draws into `out` and returns where the next part begins.
  double draw(std::string& out) {
    out_ = &out;
    double y = top_ + 20;
    text(kMargin, y, "lg-title", fitted(part_.title(), kPictureWidth - 2 * kMargin, 17), "start");
    if (!part_.is_fuser()) {
      text(kMargin, y + 18, "lg-note", part_.module + " runs as it is", "start");
      return y + 34;
    }
    text(kMargin, y + 18, "lg-note", fitted(subtitle(), kPictureWidth - 2 * kMargin, 11), "start");
    y += 44;
    text(kLeft + kSide / 2, y, "lg-head", "forward ↓", "middle");
    text(kPictureWidth / 2, y, "lg-head", "operations", "middle");
    text(kRight + kSide / 2, y, "lg-head", part_.gradients ? "backward ↑" : "no backward",
         "middle");
    lay_out(y + 14);
    for (size_t i = 0; i < part_.ops.size(); ++i) draw_operation(i);
    draw_channels();
    draw_steps(part_.forward, kLeft, true);
    if (part_.gradients) draw_steps(part_.backward, kRight, false);
    double end = rows_.back() + kGap;
    if (part_.gradients) {
      std::string total = "saved for backward: " + bytes_string(part_.saved_bytes());
      if (part_.held_input_bytes() > 0) {
        total += ", and " + bytes_string(part_.held_input_bytes()) + " of inputs kept alive";
      }
      text(kMargin, end + 12, "lg-save", total, "start");
      end += 20;
    }
    return end + 8;
  }

 private:
  std::string subtitle() const {
    std::string out = part_.input.value.format.empty()
                          ? ""
                          : to_string(part_.input.value) + " on " + part_.input.device + " · ";
    out += "recompute " + part_.recompute;
    if (!part_.autocast.empty()) out += " · autocast " + part_.autocast;
    if (!part_.recipe.empty()) out += " · " + part_.recipe;
    return out;
  }

  std::vector<std::string> branch_lines(const ExplainedOperation& op) const {
    std::vector<std::string> out;
    for (const auto& branch : op.extra_inputs) {
      if (branch.caller) out.push_back("◂ extra input " + std::to_string(*branch.caller));
      if (branch.operation) out.push_back("◂ " + branch.channel);
    }
    for (const auto& branch : op.extra_outputs) {
      if (!branch.consumers.empty()) out.push_back("▸ " + branch.channel);
      if (branch.caller) out.push_back("▸ extra output " + std::to_string(*branch.caller));
    }
    return out;
  }

  /// Rows high enough for what stands in each column.
  void lay_out(double top) {
    std::vector<double> heights;
    for (const auto& op : part_.ops) {
      heights.push_back(26 + kLine * static_cast<double>(branch_lines(op).size()) + kGap);
    }
    const auto make_room = [&](const std::vector<ExplainedStep>& steps, bool forward) {
      for (const auto& step : steps) {
        const double wanted =
            kLine * static_cast<double>(step_lines(step, forward).size()) + 2 * kPadding + kGap;
        double have = 0;
        for (size_t i = step.first; i < step.first + step.count; ++i) have += heights[i];
        for (size_t i = step.first; have < wanted && i < step.first + step.count; ++i) {
          heights[i] += (wanted - have) / static_cast<double>(step.count);
        }
      }
    };
    make_room(part_.forward, true);
    if (part_.gradients) make_room(part_.backward, false);
    rows_ = {top};
    for (double height : heights) rows_.push_back(rows_.back() + height);
  }

  void draw_operation(size_t i) {
    const ExplainedOperation& op = part_.ops[i];
    const auto branches = branch_lines(op);
    const double height = 26 + kLine * static_cast<double>(branches.size());
    const double y = (rows_[i] + rows_[i + 1] - height) / 2;
    centres_.push_back(y + 13);
    const bool idle = part_.gradients && !op.runs_in_backward;
    rect(kCentre, y, kMiddle, height, idle ? "lg-op lg-idle" : "lg-op");
    const std::string name = std::to_string(i) + " " + op.name;
    text(kPictureWidth / 2, y + 17, "lg-op-name", fitted(name, kMiddle - 8, 11), "middle");
    double line = y + 17;
    for (const auto& branch : branches) {
      line += kLine;
      text(kPictureWidth / 2, line, "lg-branch", fitted(branch, kMiddle - 8, 10.5), "middle");
    }
    if (i > 0) {
      arrow(kPictureWidth / 2, last_bottom_, y, "lg-thin", false);
    }
    last_bottom_ = y + height;
  }

  void draw_channels() {
    size_t lane = 0;
    for (size_t i = 0; i < part_.ops.size(); ++i) {
      for (const auto& branch : part_.ops[i].extra_outputs) {
        for (size_t consumer : branch.consumers) {
          const double x = kCentre + kMiddle;
          const double bend = x + 12 + 6 * static_cast<double>(lane % 3);
          *out_ += "<path class=\"lg-channel\" d=\"M" + number(x) + " " + number(centres_[i]) +
                   " C" + number(bend) + " " + number(centres_[i]) + " " + number(bend) + " " +
                   number(centres_[consumer]) + " " + number(x) + " " + number(centres_[consumer]) +
                   "\" marker-end=\"url(#lg-end)\"/>\n";
          ++lane;
        }
      }
    }
  }

  void draw_steps(const std::vector<ExplainedStep>& steps, double x, bool forward) {
    const double middle = x + kSide / 2;
    const ExplainedStep* before = nullptr;
    for (const auto& step : steps) {
      if (!forward && !runs_backward(part_, step)) continue;
      const double top = rows_[step.first] + kGap / 2;
      const double bottom = rows_[step.first + step.count] - kGap / 2;
      const char* kind = step.fused ? "lg-fused" : step.python ? "lg-python" : "lg-plain";
      rect(x, top, kSide, bottom - top, std::string("lg-step ") + kind);
      title(step);
      const auto lines = step_lines(step, forward);
      double y = (top + bottom) / 2 - kLine * static_cast<double>(lines.size()) / 2 + 11;
      for (const auto& line : lines) {
        text(middle, y, line.style, fitted(line.text, kSide - 12, line.size), "middle");
        y += kLine;
      }
      const TracedValue& edge = forward ? step.trace.input : step.trace.output;
      format(middle, rows_[step.first], edge, forward);
      before = &step;
    }
    if (before != nullptr) {
      const TracedValue& edge = forward ? before->trace.output : before->trace.input;
      format(middle, rows_[before->first + before->count], edge, forward);
    }
  }

  void title(const ExplainedStep& step) {
    std::string covers;
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      covers += (covers.empty() ? "" : " + ") + part_.ops[i].name;
    }
    *out_ += "<title>" + escaped(step.op + ": " + covers) + "</title></g>\n";
  }

  /// The format of what passes between two steps, with an arrow beside it.
  void format(double x, double y, const TracedValue& value, bool down) {
    const std::string label = value.format.empty() ? "" : to_string(value);
    const double width = 0.56 * 10.5 * static_cast<double>(letters(label));
    text(x + 8, y + 4, "lg-edge", fitted(label, kSide - 24, 10.5), "middle");
    const double ax = x - std::min(width, kSide - 24) / 2 - 2;
    arrow(ax, down ? y - 9 : y + 9, down ? y + 9 : y - 9, "lg-flow", true);
  }

  void rect(double x, double y, double width, double height, const std::string& style) {
    if (style.rfind("lg-step", 0) == 0) *out_ += "<g>";
    *out_ += "<rect class=\"" + style + "\" x=\"" + number(x) + "\" y=\"" + number(y) +
             "\" width=\"" + number(width) + "\" height=\"" + number(height) + "\" rx=\"5\"/>";
    if (style.rfind("lg-step", 0) != 0) *out_ += "\n";
  }

  void text(double x, double y, const char* style, const std::string& content, const char* anchor) {
    if (content.empty()) return;
    *out_ += std::string("<text class=\"") + style + "\" x=\"" + number(x) + "\" y=\"" + number(y) +
             "\" text-anchor=\"" + anchor + "\">" + escaped(content) + "</text>\n";
  }

  void arrow(double x, double from, double to, const char* style, bool head) {
    *out_ += std::string("<path class=\"") + style + "\" d=\"M" + number(x) + " " + number(from) +
             " V" + number(to) + "\"" + (head ? " marker-end=\"url(#lg-end)\"" : "") + "/>\n";
  }

  const ExplainedPart& part_;
  double top_;
  std::string* out_ = nullptr;
  std::vector<double> rows_;  // where each row begins, and the end of the last
  std::vector<double> centres_;
  double last_bottom_ = 0;
};

constexpr const char* kStyle = R"(<style>
.lg-plan text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1b1f24}
.lg-plan .lg-back{fill:#ffffff}
.lg-plan .lg-title{font-size:14px;font-weight:600}
.lg-plan .lg-note{font-size:11px;fill:#57606a}
.lg-plan .lg-head{font-size:12px;font-weight:600;fill:#57606a}
.lg-plan .lg-name{font-size:12px;font-weight:600}
.lg-plan .lg-kernel,.lg-plan .lg-edge{font-size:10.5px;fill:#57606a}
.lg-plan .lg-save{font-size:10.5px;fill:#9a3412}
.lg-plan .lg-op-name{font-size:11px}
.lg-plan .lg-branch{font-size:10.5px;fill:#6d28d9}
.lg-plan rect.lg-step{stroke-width:1.2}
.lg-plan .lg-fused{fill:#dbeafe;stroke:#2563eb}
.lg-plan .lg-plain{fill:#f6f8fa;stroke:#8c959f}
.lg-plan .lg-python{fill:#fef3c7;stroke:#b45309}
.lg-plan .lg-op{fill:#ffffff;stroke:#8c959f;stroke-width:1}
.lg-plan .lg-idle{stroke-dasharray:3 3}
.lg-plan .lg-thin{stroke:#d0d7de;stroke-width:1.5;fill:none}
.lg-plan .lg-flow{stroke:#57606a;stroke-width:1.2;fill:none}
.lg-plan .lg-channel{stroke:#7c3aed;stroke-width:1.2;fill:none}
.lg-plan .lg-tip{fill:#57606a}
@media (prefers-color-scheme:dark){
.lg-plan text{fill:#e6edf3}
.lg-plan .lg-back{fill:#0d1117}
.lg-plan .lg-note,.lg-plan .lg-head,.lg-plan .lg-kernel,.lg-plan .lg-edge{fill:#9da7b3}
.lg-plan .lg-save{fill:#fdba74}
.lg-plan .lg-branch{fill:#c4b5fd}
.lg-plan .lg-fused{fill:#172f55;stroke:#60a5fa}
.lg-plan .lg-plain{fill:#161b22;stroke:#6e7681}
.lg-plan .lg-python{fill:#3b2a08;stroke:#fbbf24}
.lg-plan .lg-op{fill:#0d1117;stroke:#6e7681}
.lg-plan .lg-thin{stroke:#30363d}
.lg-plan .lg-flow{stroke:#9da7b3}
.lg-plan .lg-tip{fill:#9da7b3}
.lg-plan .lg-channel{stroke:#a78bfa}
}
</style>
)";

}  // namespace

std::string Explanation::svg() const {
  std::string body;
  double y = 4;
  for (const auto& part : parts) y = PartPicture(part, y).draw(body);
  const std::string height = number(std::ceil(y + 4));
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"lg-plan\" viewBox=\"0 0 " +
                    number(kPictureWidth) + " " + height + "\" width=\"" + number(kPictureWidth) +
                    "\" height=\"" + height +
                    "\" style=\"max-width:100%;height:auto\" role=\"img\"" +
                    " aria-label=\"The forward and backward plan\">\n" + kStyle +
                    "<defs><marker id=\"lg-end\" viewBox=\"0 0 6 6\" refX=\"5\" refY=\"3\" " +
                    "markerWidth=\"5\" markerHeight=\"5\" orient=\"auto\">" +
                    "<path class=\"lg-tip\" d=\"M0 0L6 3L0 6z\"/></marker></defs>\n" +
                    "<rect class=\"lg-back\" width=\"100%\" height=\"100%\"/>\n";
  return out + body + "</svg>\n";
}

}  // namespace ligature
