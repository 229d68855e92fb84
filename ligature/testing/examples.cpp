#include "ligature/testing/examples.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <random>

#include "ligature/fuser/match.h"

namespace ligature::testing {
namespace {

// Divisible by what interleaved activations want, and more than one vector of a CPU.
constexpr int64_t kFeatures = 20;
const std::vector<int64_t> kOutFeatures{28, kFeatures};
const char* const kChannel = "branch";

/// One way to make an operation.
struct Piece {
  std::string name;
  PlainState options;
  bool on_channel = false;  ///< its extra outputs, or inputs if it ends channels, are bound to some
  bool to_caller = true;    ///< its extra outputs are returned too
  bool ends_channel = false;
};

PlainState with(std::initializer_list<std::pair<std::string, PlainValue>> values,
                const PlainState& more) {
  PlainState state;
  for (const auto& [name, value] : values) state.set(name, value);
  for (const auto& [name, value] : more) state.set(name, value);
  return state;
}

/// Options that follow from the size of the input, by the names that operations give them.
std::vector<PlainState> sized_options(const PlainState& more, int64_t in, int64_t out) {
  return {with({{"in_features", in}, {"out_features", out}}, more),
          with({{"num_groups", int64_t{3}}, {"in_features", in}, {"out_features", out}}, more),
          with({{"num_experts", int64_t{3}}}, more),
          with({{"hidden_size", in}, {"num_experts", int64_t{3}}, {"top_k", int64_t{2}}}, more),
          with({{"size", in}}, more),
          with({{"normalized_shape", std::vector<int64_t>{in}}}, more),
          with({{"shape", std::vector<int64_t>{-1, in}}}, more),
          with({{"scale", -1.5}}, more),
          more};
}

/// Options worth trying besides the default, on every operation that has them.
const std::vector<std::pair<std::string, PlainValue>>& variations() {
  static const std::vector<std::pair<std::string, PlainValue>> list{
      {"in_place", true},
      {"zero_centered_gamma", true},
      {"glu_interleave_size", int64_t{2}},
      {"scale_bias", true}};
  return list;
}

std::vector<Tensor> fresh_parameters(const BasicOperation& op, const at::TensorOptions& options) {
  std::vector<Tensor> out;
  for (const auto& item : op.own_parameters()) {
    out.push_back(at::zeros(item.value().sizes(), options));
  }
  return out;
}

/// An operation as it was made: enough to make it again.
struct Made {
  Piece piece;
  PlainState options;
  std::vector<std::string> taken{};  ///< the channels of its extra inputs
};

/// The channel of an extra output.
std::string channel(size_t output) {
  return kChannel + (output > 0 ? std::to_string(output) : std::string());
}

BasicOpPtr make(const Made& made) {
  BasicOpPtr op = make_operation(made.piece.name, made.options);
  for (size_t i = 0; i < made.taken.size(); ++i) op->set_extra_input_channel(i, made.taken[i]);
  if (!made.piece.on_channel || made.piece.ends_channel) return op;
  for (size_t i = 0; i < op->num_extra_outputs(); ++i) {
    op->set_extra_output_channel(i, channel(i), made.piece.to_caller);
  }
  return op;
}

std::vector<Piece> find_pool(std::vector<std::string>* unknown) {
  std::vector<Piece> pool;
  for (const std::string& name : operation_names()) {
    BasicOpPtr op;
    for (const PlainState& options : sized_options({}, kFeatures, kFeatures)) {
      try {
        op = make_operation(name, options);
        const std::vector<std::optional<ValueMeta>> extras(op->num_extra_inputs());
        const auto params = fresh_parameters(*op, at::kFloat);
        op->infer({{{2, kFeatures}, at::kFloat, at::kCPU}, params, extras, true, std::nullopt});
        break;
      } catch (const c10::Error&) {
        op = nullptr;
      }
    }
    if (op == nullptr) {
      if (unknown != nullptr) unknown->push_back(name);
      continue;
    }
    std::vector<PlainState> choices{{}};
    for (const auto& [option, value] : variations()) {
      if (op->options_state().find(option) != nullptr)
        choices.push_back(with({{option, value}}, {}));
    }
    for (const PlainState& options : choices) {
      pool.push_back({name, options});
      if (op->num_extra_inputs() > 0) pool.push_back({name, options, true, true, true});
      if (op->num_extra_outputs() > 0) {
        pool.push_back({name, options, true, true});
        pool.push_back({name, options, true, false});
      }
    }
  }
  return pool;
}

/// Puts operations of these pieces in a row whose sizes fit, and tries the rule on them: it must
/// cover them all but `around`, which only serve the others' channels.
class Row {
 public:
  Row(const std::vector<const Piece*>& pieces, size_t around, const FusionRule& rule,
      PlanOptions options)
      : pieces_(pieces), around_(around), rule_(rule), options_(std::move(options)) {}

  bool find() { return extend({{2, 3, kFeatures}, at::kFloat, at::kCPU}); }
  const std::vector<Made>& made() const { return made_; }

 private:
  bool extend(const ValueMeta& value) {
    if (made_.size() == pieces_.size()) return fits();
    const Piece& piece = *pieces_[made_.size()];
    for (const int64_t out : kOutFeatures) {
      bool depends_on_out = false;
      for (const PlainState& options : sized_options(piece.options, value.sizes.back(), out)) {
        Made made{piece, options};
        const auto next = try_next(made, value);
        if (!next) continue;
        made_.push_back(std::move(made));
        const size_t before = produced_.size();
        for (const ValueMeta& extra : next->extra_outputs) {
          if (piece.on_channel && !piece.ends_channel) produced_.push_back(extra);
        }
        if (extend(next->output)) return true;
        produced_.resize(before);
        made_.pop_back();
        depends_on_out = options.find("out_features") != nullptr;
        break;  // the other ways to make it are for other operations
      }
      if (!depends_on_out) break;
    }
    return false;
  }

  /// With extra inputs on the channels that there are, where it ends some, or by example.
  std::optional<InferResult> try_next(Made& made, const ValueMeta& value) {
    try {
      const BasicOpPtr op = make(made);
      Subject subject;
      subject.ops = {op};
      subject.params = {fresh_parameters(*op, at::kFloat)};
      subject.training = {true};
      MaybeMetas extras(op->num_extra_inputs());
      const auto infer = [&] {
        return op->infer({value, subject.params[0], extras, true, std::nullopt});
      };
      for (size_t slot = 0; slot < extras.size(); ++slot) {
        if (made.piece.ends_channel && !take_channel(made, extras[slot], infer)) {
          return std::nullopt;
        }
        if (made.piece.ends_channel || !op->extra_input_is_integer(slot)) continue;
        extras[slot] = ValueMeta::of(op->example_extra_input(slot, value));
      }
      auto result = infer();
      for (size_t slot = 0; !result && slot < extras.size(); ++slot) {
        if (extras[slot]) continue;
        const auto sizes = find_shape(subject, 0, value, extras, slot);
        if (!sizes) return std::nullopt;
        extras[slot] = ValueMeta{{sizes->begin(), sizes->end()}, value.dtype, value.device};
        result = infer();
      }
      return result;
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  /// The first channel whose value the operation takes as its next extra input.
  template <class Infer>
  bool take_channel(Made& made, std::optional<ValueMeta>& extra, const Infer& infer) {
    for (size_t i = 0; i < produced_.size(); ++i) {
      extra = produced_[i];
      try {
        infer();
      } catch (const c10::Error&) {
        continue;
      }
      made.taken.push_back(channel(i));
      return true;
    }
    return false;
  }

  /// Is there one producer of each channel, and does the rule make one operation of it all?
  bool fits() {
    std::vector<BasicOpPtr> ops;
    for (const Made& made : made_) ops.push_back(make(made));
    try {
      wire(ops);
    } catch (const c10::Error&) {
      return false;
    }
    const OpList list(ops.begin(), ops.end());
    const OpList fused = apply_rule(rule_, list, options_, nullptr);
    if (fused.size() != 1 + around_) return false;
    const size_t covered = pieces_.size() - around_;
    return std::any_of(fused.begin(), fused.end(), [&](const OpPtr& op) {
      return op->is_fused_op() && op->basic_ops().size() == covered;
    });
  }

  const std::vector<const Piece*>& pieces_;
  size_t around_;
  const FusionRule& rule_;
  PlanOptions options_;
  std::vector<Made> made_;
  std::vector<ValueMeta> produced_;  ///< on each channel
};

MakeSubject subject_maker(std::vector<Made> row) {
  return [row = std::move(row)](at::ScalarType dtype, at::Device device) {
    Subject subject;
    for (const Made& made : row) {
      BasicOpPtr op = make(made);
      subject.params.push_back(fresh_parameters(*op, at::TensorOptions(dtype).device(device)));
      for (size_t i = 0; i < subject.params.back().size(); ++i) {
        op->initialize_parameter(op->parameter_names()[i], subject.params.back()[i]);
      }
      subject.param_names.push_back(op->parameter_names());
      subject.training.push_back(true);
      subject.ops.push_back(std::move(op));
    }
    return subject;
  };
}

std::string text_of(const std::vector<Made>& row) {
  std::string out;
  for (const Made& made : row) {
    out += (out.empty() ? "" : ", ") + made.piece.name;
    std::string more;
    for (const auto& [name, value] : made.piece.options) {
      more += (more.empty() ? "" : ", ") + name + "=" + ligature::to_string(value);
    }
    if (made.piece.on_channel) {
      more +=
          std::string(more.empty() ? "" : ", ") + "channel" + (made.piece.to_caller ? "" : " only");
    }
    if (!more.empty()) out += "(" + more + ")";
  }
  return "[" + out + "]";
}

/// The row, or, where a channel begins or ends in it that has no other end, the row with each kind
/// of operation that could be that other end. The second: how many pieces that took.
std::vector<std::pair<std::vector<const Piece*>, size_t>> with_closed_channels(
    const std::vector<const Piece*>& row, const std::vector<Piece>& pool) {
  bool produced = false;
  bool taken = false;
  bool to_caller = true;
  for (const Piece* piece : row) {
    if (!piece->on_channel) continue;
    (piece->ends_channel ? taken : produced) = true;
    to_caller = to_caller && piece->to_caller;
  }
  const bool begins_outside = taken && !produced;
  if (!begins_outside && (!produced || taken || to_caller)) return {{row, 0}};
  std::vector<std::pair<std::vector<const Piece*>, size_t>> rows;
  const std::string* last = nullptr;
  for (const Piece& piece : pool) {
    if (!piece.on_channel || piece.ends_channel == begins_outside) continue;
    if (last != nullptr && piece.name == *last) continue;  // the same with other options
    last = &piece.name;
    rows.emplace_back(row, 1);
    auto& own = rows.back().first;
    own.insert(begins_outside ? own.begin() : own.end(), &piece);
  }
  return rows;
}

/// What should occur: a piece at a place of the pattern, or a place left out (no piece).
using Goal = std::pair<size_t, const Piece*>;

}  // namespace

std::vector<std::string> unknown_operations() {
  std::vector<std::string> unknown;
  find_pool(&unknown);
  return unknown;
}

std::vector<Example> find_examples(const FusionRule& rule, Recompute recompute) {
  constexpr int kTries = 100;
  PlanOptions options;
  options.recompute = recompute;
  options.requires_grad = true;
  options.of_every_device = true;
  const std::vector<Piece> pool = find_pool(nullptr);

  std::vector<std::vector<const Piece*>> accepted(rule.pattern.size());
  std::vector<Goal> goals;
  for (size_t place = 0; place < rule.pattern.size(); ++place) {
    if (rule.pattern[place].optional) goals.emplace_back(place, nullptr);
    for (const Piece& piece : pool) {
      for (const PlainState& sized : sized_options(piece.options, kFeatures, kFeatures)) {
        OpPtr op;
        try {
          op = make({piece, sized});
        } catch (const c10::Error&) {
          continue;
        }
        if (rule.pattern[place].take({&op, 1}) == 1) {
          accepted[place].push_back(&piece);
          goals.emplace_back(place, &piece);
        }
        break;
      }
    }
  }

  std::mt19937 random(1);
  std::vector<Goal> reached;
  std::vector<Example> examples;
  for (const Goal& goal : goals) {
    for (int tries = 0; tries < kTries; ++tries) {
      if (std::find(reached.begin(), reached.end(), goal) != reached.end()) break;
      std::vector<const Piece*> pieces;
      std::vector<Goal> reaches;
      for (size_t place = 0; place < rule.pattern.size(); ++place) {
        const bool left_out = place == goal.first ? goal.second == nullptr
                                                  : rule.pattern[place].optional && random() % 2;
        if (!left_out && accepted[place].empty()) break;
        const Piece* piece = left_out ? nullptr
                             : place == goal.first
                                 ? goal.second
                                 : accepted[place][random() % accepted[place].size()];
        reaches.emplace_back(place, piece);
        if (piece != nullptr) pieces.push_back(piece);
      }
      if (reaches.size() < rule.pattern.size()) break;
      if (pieces.empty()) continue;
      for (const auto& [closed, around] : with_closed_channels(pieces, pool)) {
        Row row(closed, around, rule, options);
        if (!row.find()) continue;
        reached.insert(reached.end(), reaches.begin(), reaches.end());
        examples.push_back({text_of(row.made()),
                            subject_maker(row.made()),
                            {{{2, 3, kFeatures}}, {{5, kFeatures}}, {{0, kFeatures}}}});
        break;
      }
    }
  }
  return examples;
}

}  // namespace ligature::testing
