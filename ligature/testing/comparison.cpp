#include "ligature/testing/comparison.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "ligature/testing/compare.h"

namespace ligature::testing {

Comparison::Comparison(Report& report, const CheckOptions& options, const Subject& subject,
                       const Wiring& wiring, Dtypes dtypes, Sides sides)
    : report_(report),
      options_(options),
      subject_(subject),
      dtypes_(dtypes),
      sides_(std::move(sides)),
      leaves_(leaf_names(subject, wiring)),
      outputs_(output_names(subject, wiring)),
      overwritten_(leaves_.size()) {
  LIGATURE_CHECK(leaves_.size() <= kMostLeaves, "a check takes up to ", kMostLeaves,
                 " inputs and parameters, got ", leaves_.size());
  for (size_t i = 0; i < leaves_.size(); ++i) all_.set(i);
  for (const auto& params : subject.params) {
    for (const Tensor& param : params) {
      params_.push_back(param);
      snapshots_.push_back(copy_of(param));
      if (!at::isFloatingType(param.scalar_type())) all_ &= ~only(params_.size());
    }
  }
  for (size_t i = 0; i < subject.ops.size(); ++i) {
    for (size_t j = 0; j < wiring.inputs[i].size(); ++j) {
      const size_t caller = wiring.inputs[i][j].caller;
      if (caller == Wiring::kNone) continue;
      overwritten_[1 + params_.size() + caller] = subject.ops[i]->writes_extra_input(j);
      if (subject.ops[i]->extra_input_is_integer(j)) all_ &= ~only(1 + params_.size() + caller);
    }
  }
  tolerance_ = std::max(tolerance_of(dtypes.input), tolerance_of(dtypes.params));
  if (options.autocast) tolerance_ = std::max(tolerance_, tolerance_of(*options.autocast));
  tolerance_ *= options.tolerance;
  if (options.recipe == nullptr) return;
  for (const auto& op : subject.ops) {
    for (const auto& roles : {op->forward_quantizer_roles(), op->backward_quantizer_roles()}) {
      for (const QuantizerRole& role : roles) {
        const auto quantizer = options.recipe->make_quantizer(role, *options.device);
        if (quantizer == nullptr || !quantizer->is_native()) continue;
        rounding_ = std::max(rounding_, rounding_of(quantizer->format_tag().element));
      }
    }
  }
}

void Comparison::fail(const std::string& where, const std::string& what) {
  const std::string text = where + ": " + what;
  auto& all = report_.failures;
  if (std::find(all.begin(), all.end(), text) == all.end()) all.push_back(text);
}

void Comparison::guarded(const std::string& where, const std::function<void()>& check) {
  try {
    check();
  } catch (const c10::Error& error) {
    if (options_.is_fatal && options_.is_fatal(error)) throw;
    fail(where, error.what_without_backtrace());
  } catch (const std::exception& error) {
    if (options_.is_fatal && options_.is_fatal(error)) throw;
    fail(where, error.what());
  }
  restore_parameters();
}

// ---- values

Data Comparison::make_data(const ExampleShapes& shapes, Layout layout, uint64_t salt) const {
  at::NoGradGuard no_grad;
  const at::Device device = *options_.device;
  const uint64_t seed = options_.seed + 1000 * (salt + 1);
  seed_device(at::kCPU, seed);
  const auto sample = [&](at::IntArrayRef sizes) {
    return options_.sample ? options_.sample(sizes)
                           : at::randn(sizes, at::TensorOptions(at::kDouble).device(at::kCPU));
  };
  const auto make = [&](const std::vector<int64_t>& sizes) {
    std::vector<int64_t> stored = sizes;
    std::vector<int64_t> order(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) order[i] = static_cast<int64_t>(i);
    if (layout == Layout::Strided) {
      std::reverse(stored.begin(), stored.end());
      std::reverse(order.begin(), order.end());
    }
    return sample(stored).to(at::TensorOptions(dtypes_.input).device(device)).permute(order);
  };
  Data data;
  data.input = make(shapes.input);
  for (size_t k = 0; k < shapes.extra_inputs.size(); ++k) {
    const bool is_given = k < shapes.extra_values.size() && shapes.extra_values[k].defined();
    data.extra_inputs.push_back(is_given ? shapes.extra_values[k].clone()
                                         : make(shapes.extra_inputs[k]));
  }
  const Graph graph = sides_.expected(data, 0);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + 1);
  for (const Tensor& y : graph.outputs) {
    // The gradient of a sum has strides of zero.
    const auto sizes = layout == Layout::Strided ? std::vector<int64_t>() : y.sizes().vec();
    const Tensor values = at::randn(sizes, generator, at::TensorOptions(at::kDouble));
    const at::ScalarType dtype = sides_.formula ? dtypes_.input : y.scalar_type();
    data.grad_outputs.push_back(values.to(y.options().dtype(dtype)).expand(y.sizes()));
  }
  restore_parameters();
  return data;
}

std::vector<bool> Comparison::changed_leaves(const Graph& graph, const Data& data) const {
  std::vector<bool> changed{!same_bits(graph.given[0], data.input)};
  for (size_t i = 0; i < params_.size(); ++i) {
    changed.push_back(!same_bits(params_[i], snapshots_[i]));
  }
  for (size_t k = 0; k < data.extra_inputs.size(); ++k) {
    const size_t leaf = 1 + params_.size() + k;
    changed.push_back(!overwritten_[leaf] && !same_bits(graph.given[leaf], data.extra_inputs[k]));
  }
  return changed;
}

void Comparison::restore_parameters() const {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (same_bits(params_[i], snapshots_[i])) continue;
    Tensor param = params_[i];
    param.copy_(snapshots_[i]);
  }
}

Comparison::Values Comparison::evaluate(const Forward& forward, const Data& data,
                                        const Choice& choice) {
  const Graph graph = forward(data, choice.needs);
  LIGATURE_CHECK_STATE(graph.outputs.size() == outputs_.size(), "gives ", graph.outputs.size(),
                       " outputs, wanted ", outputs_.size());
  Values values;
  values.outputs = graph.outputs;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    for (size_t i = 0; i < graph.given.size(); ++i) {
      if (share_memory(graph.outputs[k], graph.given[i])) values.shared.emplace_back(k, i);
    }
    for (size_t j = 0; j < k; ++j) {
      if (share_memory(graph.outputs[k], graph.outputs[j])) {
        values.shared.emplace_back(k, leaves_.size() + j);
      }
    }
  }
  Gradients grads = gradients(graph, data, choice.wanted, false, choice.outputs);
  values.grads = std::move(grads.of_leaves);
  values.grad_changed = std::move(grads.changed);
  values.leaf_changed = changed_leaves(graph, data);
  restore_parameters();
  return values;
}

Comparison::Values Comparison::spread(const Values& expected, const Data& data,
                                      const Choice& choice, int tries) {
  at::AutoGradMode with_grad(true);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed + 7);
  const auto moved = [&](const Tensor& t) {
    if (!at::isFloatingType(t.scalar_type())) return t;
    const Tensor noise = at::rand(t.sizes(), generator, at::TensorOptions(at::kDouble)) * 2 - 1;
    const Tensor factor = 1 + noise.to(t.device()) * std::max(tolerance_ / 4, rounding_);
    const Tensor copy = t.is_non_overlapping_and_dense() ? copy_of(t) : t.contiguous();
    return copy.copy_(t.detach().to(at::kDouble) * factor);
  };
  Values out;
  out.outputs.resize(expected.outputs.size());
  out.grads.resize(expected.grads.size());
  const auto widen = [](Tensor& spread, const Tensor& moved_value, const Tensor& value) {
    if (!value.defined() || !moved_value.defined()) return;
    const Tensor off =
        (moved_value.detach().to(at::kDouble) - value.detach().to(at::kDouble)).abs() * 2;
    spread = spread.defined() ? at::maximum(spread, off) : off;
  };
  for (int n = 0; n < tries; ++n) {
    Data other;
    {
      at::NoGradGuard no_grad;
      other.input = moved(data.input);
      for (const Tensor& extra : data.extra_inputs) other.extra_inputs.push_back(moved(extra));
      for (size_t i = 0; i < params_.size(); ++i) {
        Tensor param = params_[i];
        if (at::isFloatingType(param.scalar_type())) param.copy_(moved(snapshots_[i]));
      }
    }
    for (const Tensor& grad : data.grad_outputs) {
      other.grad_outputs.push_back(rounding_ > 0 ? moved(grad) : grad);
    }
    const Graph graph = sides_.expected(other, choice.needs);
    const Gradients grads = gradients(graph, other, choice.wanted, false, choice.outputs);
    for (size_t k = 0; k < out.outputs.size(); ++k) {
      widen(out.outputs[k], graph.outputs[k], expected.outputs[k]);
    }
    for (size_t i = 0; i < out.grads.size(); ++i) {
      widen(out.grads[i], grads.of_leaves[i], expected.grads[i]);
    }
    restore_parameters();
  }
  return out;
}

double Comparison::tolerance_for(const Tensor& expected) const {
  if (!at::isFloatingType(expected.scalar_type())) return 0;
  return std::max(tolerance_, tolerance_of(expected.scalar_type()) * options_.tolerance);
}

/// Is one of them nothing and the other something? Nothing is as good as zeros where not all
/// outputs have a gradient, and to a formula.
bool Comparison::missing(const Tensor& actual, const Tensor& expected, const Choice& choice) const {
  if (actual.defined() == expected.defined()) return false;
  const bool zeros_are_nothing = sides_.formula || choice.outputs != ~Needs();
  const Tensor& there = actual.defined() ? actual : expected;
  return !zeros_are_nothing || there.ne(0).any().item<bool>();
}

void Comparison::compare_values(const std::string& where, const Values& actual,
                                const Values& expected, const Data& data, const Choice& choice) {
  struct Suspect {
    std::string what;
    size_t index;
    bool is_output;
    std::string off = {};
  };
  std::vector<Suspect> suspects;
  for (size_t k = 0; k < actual.outputs.size(); ++k) {
    const Tensor& a = actual.outputs[k];
    const Tensor& e = expected.outputs[k];
    if (!sides_.formula && a.scalar_type() != e.scalar_type()) {
      fail(where, outputs_[k] + " has dtype " + dtype_name(a.scalar_type()) + ", wanted " +
                      dtype_name(e.scalar_type()));
    } else if (!sides_.formula && a.requires_grad() != e.requires_grad()) {
      fail(where, outputs_[k] + (a.requires_grad() ? " requires a gradient, wanted none"
                                                   : " requires no gradient, wanted one"));
    }
    if (!difference(a, e, tolerance_for(e)).empty()) suspects.push_back({outputs_[k], k, true});
  }
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (!has(choice.wanted, i)) continue;
    const std::string what = "gradient of " + leaves_[i];
    const Tensor& a = actual.grads[i];
    const Tensor& e = expected.grads[i];
    if (missing(a, e, choice)) {
      fail(where, what + (a.defined() ? " is given, wanted none" : " is missing"));
    } else if (a.defined() && e.defined() && !difference(a, e, tolerance_for(e)).empty()) {
      suspects.push_back({what, i, false});
    }
  }
  // Rounding decides at a kink, such as that of a ReLU: there the expected values jump too.
  for (const int tries : {8, 64, 512}) {
    if (suspects.empty()) return;
    const Values allowed = spread(expected, data, choice, tries);
    std::vector<Suspect> left;
    for (Suspect& s : suspects) {
      const Tensor& a = s.is_output ? actual.outputs[s.index] : actual.grads[s.index];
      const Tensor& e = s.is_output ? expected.outputs[s.index] : expected.grads[s.index];
      const Tensor& more = s.is_output ? allowed.outputs[s.index] : allowed.grads[s.index];
      s.off = difference(a, e, tolerance_for(e), more);
      if (!s.off.empty()) left.push_back(std::move(s));
    }
    suspects = std::move(left);
  }
  for (const Suspect& s : suspects) fail(where, s.what + " " + s.off);
}

void Comparison::compare_hazards(const std::string& where, const Values& actual,
                                 const Values& expected) {
  const auto name = [&](size_t i) {
    return i < leaves_.size() ? leaves_[i] : outputs_[i - leaves_.size()];
  };
  for (const auto& pair : actual.shared) {
    const bool known =
        std::find(expected.shared.begin(), expected.shared.end(), pair) != expected.shared.end();
    const bool written = pair.second < leaves_.size() && overwritten_[pair.second];
    if (options_.may_alias || known || written) continue;
    fail(where, outputs_[pair.first] + " shares memory with " + name(pair.second));
  }
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (actual.leaf_changed[i] && !expected.leaf_changed[i])
      fail(where, leaves_[i] + " was changed");
  }
  for (size_t k = 0; k < outputs_.size(); ++k) {
    if (actual.grad_changed[k] && !expected.grad_changed[k] && !options_.may_change_gradients) {
      fail(where, "the gradient given for the " + outputs_[k] + " was changed");
    }
  }
}

// ---- comparisons

void Comparison::compare(const std::string& where, const Data& data, const Needs& needs) {
  ++report_.runs;
  const Choice choice{needs, needs};
  const Values expected = evaluate(sides_.expected, data, choice);
  const Values actual = evaluate(sides_.actual, data, choice);
  compare_values(where, actual, expected, data, choice);
  compare_hazards(where, actual, expected);
}

/// A spread moves the parameters, which no graph that is still needed survives: gradients are taken
/// first and compared then.
void Comparison::compare_parts(const std::string& where, const std::vector<Part>& parts) {
  std::vector<std::pair<const Part*, std::vector<Tensor>>> found;
  for (const Part& part : parts) {
    guarded(where + ", " + part.what, [&] {
      found.emplace_back(
          &part, gradients(*part.graph, *part.data, part.choice.wanted, true, part.choice.outputs)
                     .of_leaves);
    });
  }
  for (auto& [part, grads] : found) {
    Values got = part->expected;
    got.grads = std::move(grads);
    compare_values(where + ", " + part->what, got, part->expected, *part->data, part->choice);
  }
}

void Comparison::compare_narrower(const std::string& where, const Data& data) {
  ++report_.runs;
  const Values expected = evaluate(sides_.expected, data, {all_, all_});
  std::vector<Part> parts;
  const auto graph = std::make_shared<const Graph>(sides_.actual(data, all_));
  for (size_t i = 0; i < leaves_.size() && leaves_.size() > 1; ++i) {
    if (!has(all_, i)) continue;
    parts.push_back(
        {"only that of " + leaves_[i] + " asked", graph, &data, {all_, only(i)}, expected});
  }
  for (size_t k = 0; k < outputs_.size() && outputs_.size() > 1; ++k) {
    const Choice choice{all_, all_, only(k)};
    parts.push_back({"only through the " + outputs_[k], graph, &data, choice,
                     evaluate(sides_.expected, data, choice)});
  }
  compare_parts(where, parts);
}

void Comparison::compare_twice(const std::string& where, const Data& data) {
  ++report_.runs;
  const auto both = [&](const Forward& forward) {
    const Graph graph = forward(data, all_);
    Gradients first = gradients(graph, data, all_, true);
    Gradients second = gradients(graph, data, all_, true);
    return std::make_pair(std::move(first), std::move(second));
  };
  const auto [first, second] = both(sides_.actual);
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (same_bits(first.of_leaves[i], second.of_leaves[i])) continue;
    const auto [wanted, again] = both(sides_.expected);
    if (!same_bits(wanted.of_leaves[i], again.of_leaves[i])) continue;
    const std::string off = first.of_leaves[i].defined() && second.of_leaves[i].defined()
                                ? difference(second.of_leaves[i], first.of_leaves[i], 0)
                                : std::string("is given only once");
    fail(where, "in a second backward (retain_graph) gradient of " + leaves_[i] + " " + off);
  }
}

void Comparison::compare_interleaved(const std::string& where, const Data& first,
                                     const Data& second) {
  ++report_.runs;
  const Choice choice{all_, all_};
  const Values expected_first = evaluate(sides_.expected, first, choice);
  const Values expected_second = evaluate(sides_.expected, second, choice);
  const auto graph_first = std::make_shared<const Graph>(sides_.actual(first, all_));
  const auto graph_second = std::make_shared<const Graph>(sides_.actual(second, all_));
  compare_parts(
      where,
      {{"backward of the first of two forwards", graph_first, &first, choice, expected_first},
       {"backward of the second of two forwards", graph_second, &second, choice, expected_second}});
}

void Comparison::compare_edited(const std::string& where, const Data& data) {
  ++report_.runs;
  const Choice choice{all_, all_};
  const Values expected = evaluate(sides_.expected, data, choice);
  const Values plain = evaluate(sides_.actual, data, choice);
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const auto shares = [&](const auto& pair) { return pair.second == i; };
    if (!has(all_, i) || overwritten_[i] ||
        std::any_of(plain.shared.begin(), plain.shared.end(), shares)) {
      continue;
    }
    const std::string what = where + ", " + leaves_[i] + " edited between forward and backward";
    guarded(what, [&] {
      const Graph graph = sides_.actual(data, all_);
      {
        at::NoGradGuard no_grad;
        Tensor leaf = graph.given[i];
        leaf.add_(1);
      }
      Values got = expected;
      try {
        got.grads = gradients(graph, data, all_).of_leaves;
      } catch (const c10::Error& error) {
        if (std::string(error.what_without_backtrace()).find("inplace") == std::string::npos) throw;
        return;
      }
      restore_parameters();
      compare_values(what, got, expected, data, choice);
    });
  }
}

}  // namespace ligature::testing
