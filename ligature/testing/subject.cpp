#include "ligature/testing/subject.h"

#include <c10/core/GradMode.h>

#include <algorithm>

namespace ligature::testing {

Subject subject_of(const OpList& ops) {
  Subject subject;
  for (const auto& op : ops) {
    LIGATURE_CHECK_TYPE(op != nullptr, "an operation to be checked is null");
    for (auto& basic : op->basic_ops()) subject.ops.push_back(std::move(basic));
  }
  LIGATURE_CHECK(!subject.ops.empty(), "there are no operations to check");
  for (const auto& op : subject.ops) {
    op->pre_first_fuser_forward();
    op->collect_parameters(subject.params.emplace_back());
    const bool none = subject.params.back().empty();
    subject.param_names.push_back(none ? std::vector<std::string>() : op->parameter_names());
    subject.training.push_back(op->parameter_owner().is_training());
  }
  subject.keep_alive = std::make_shared<OpList>(ops);
  return subject;
}

std::string op_name(const Subject& subject, size_t op) {
  const std::string name = subject.ops[op]->name();
  const auto same = [&](const BasicOpPtr& other) { return other->name() == name; };
  const bool unique = std::count_if(subject.ops.begin(), subject.ops.end(), same) == 1;
  return unique ? name : name + "[" + std::to_string(op) + "]";
}

std::vector<std::string> leaf_names(const Subject& subject, const Wiring& wiring) {
  std::vector<std::string> names{"input"};
  for (size_t i = 0; i < subject.ops.size(); ++i) {
    for (const auto& name : subject.param_names[i]) {
      names.push_back(op_name(subject, i) + "." + name);
    }
  }
  for (size_t i = 0; i < subject.ops.size(); ++i) {
    for (size_t j = 0; j < wiring.inputs[i].size(); ++j) {
      if (wiring.inputs[i][j].caller == Wiring::kNone) continue;
      const std::string which = wiring.inputs[i].size() > 1 ? " " + std::to_string(j) : "";
      names.push_back("extra input" + which + " of " + op_name(subject, i));
    }
  }
  return names;
}

std::vector<std::string> output_names(const Subject& subject, const Wiring& wiring) {
  std::vector<std::string> names{"output"};
  names.resize(1 + wiring.caller_outputs.size());
  for (size_t i = 0; i < subject.ops.size(); ++i) {
    for (size_t j = 0; j < wiring.outputs[i].size(); ++j) {
      const size_t caller = wiring.outputs[i][j].caller;
      if (caller == Wiring::kNone) continue;
      const std::string which = wiring.outputs[i].size() > 1 ? " " + std::to_string(j) : "";
      names[1 + caller] = "extra output" + which + " of " + op_name(subject, i);
    }
  }
  return names;
}

namespace {

std::optional<InferResult> infer(const Subject& subject, size_t op, const ValueMeta& input,
                                 const MaybeMetas& extras) {
  return subject.ops[op]->infer(
      {input, subject.params[op], extras, subject.training[op], std::nullopt});
}

}  // namespace

std::optional<std::vector<int64_t>> find_shape(const Subject& subject, size_t op,
                                               const ValueMeta& input, MaybeMetas extras,
                                               size_t slot) {
  std::vector<at::SmallVector<int64_t, 5>> candidates{input.sizes};
  if (!input.sizes.empty()) {
    candidates.push_back(input.sizes);
    candidates.back().pop_back();
  }
  for (size_t before = 0; before < slot; ++before) {
    if (extras[before]) candidates.push_back(extras[before]->sizes);
  }
  for (const auto& sizes : candidates) {
    extras[slot] = ValueMeta{sizes, input.dtype, input.device};
    try {
      if (!infer(subject, op, input, extras)) return std::nullopt;
    } catch (const c10::Error&) {
      continue;
    }
    return std::vector<int64_t>(sizes.begin(), sizes.end());
  }
  return std::nullopt;
}

ExampleShapes complete_shapes(const Subject& subject, const Wiring& wiring,
                              const ExampleShapes& shapes, at::ScalarType dtype,
                              at::Device device) {
  const size_t wanted = wiring.caller_inputs.size();
  if (wanted == 0 && shapes.extra_inputs.empty()) return shapes;
  const bool given = shapes.extra_inputs.size() == wanted;
  LIGATURE_CHECK(given || shapes.extra_inputs.empty(), "the operations ", describe(subject.ops),
                 " take ", wanted, " extra inputs, got shapes of ", shapes.extra_inputs.size());
  ExampleShapes out = shapes;
  out.extra_inputs.resize(wanted);
  out.extra_values.resize(wanted);
  std::optional<ValueMeta> value =
      ValueMeta{{shapes.input.begin(), shapes.input.end()}, dtype, device};
  std::vector<at::SmallVector<ValueMeta, 1>> produced(subject.ops.size());
  for (size_t i = 0; i < subject.ops.size(); ++i) {
    MaybeMetas extras(wiring.inputs[i].size());
    for (size_t j = 0; j < extras.size(); ++j) {
      const Wiring::Input& slot = wiring.inputs[i][j];
      if (slot.caller == Wiring::kNone) {
        if (slot.output < produced[slot.producer].size()) {
          extras[j] = produced[slot.producer][slot.output];
        }
        continue;
      }
      std::vector<int64_t>& sizes = out.extra_inputs[slot.caller];
      if (value && subject.ops[i]->extra_input_is_integer(j)) {
        const Tensor example = subject.ops[i]->example_extra_input(j, *value);
        LIGATURE_CHECK(example.defined() && (!given || example.sizes() == at::IntArrayRef(sizes)),
                       "[", op_name(subject, i), "] has no example of its extra input ", j);
        sizes = example.sizes().vec();
        out.extra_values[slot.caller] = example.to(device);
        extras[j] = ValueMeta::of(out.extra_values[slot.caller]);
        continue;
      }
      const auto found = given   ? std::optional(sizes)
                         : value ? find_shape(subject, i, *value, extras, j)
                                 : std::nullopt;
      LIGATURE_CHECK(found, "[", op_name(subject, i), "] the shape of its extra input ", j,
                     " cannot be told from an input of ", sizes_string(shapes.input),
                     "; give the shapes of all ", wanted, " extra inputs");
      extras[j] = ValueMeta{{found->begin(), found->end()}, dtype, device};
      sizes = *found;
    }
    if (!value) continue;
    std::optional<InferResult> inferred;
    if (!given || i + 1 < subject.ops.size()) inferred = infer(subject, i, *value, extras);
    value.reset();
    if (!inferred) continue;
    value = std::move(inferred->output);
    produced[i] = std::move(inferred->extra_outputs);
  }
  return out;
}

std::string to_string(const Dtypes& dtypes) {
  const std::string input = dtype_name(dtypes.input);
  if (dtypes.input == dtypes.params) return input;
  return input + " with " + dtype_name(dtypes.params) + " parameters";
}

std::string to_string(const ExampleShapes& shapes) {
  std::string out = sizes_string(shapes.input);
  for (size_t i = 0; i < shapes.extra_inputs.size(); ++i) {
    out += (i == 0 ? " with " : ", ") + sizes_string(shapes.extra_inputs[i]);
  }
  return out;
}

}  // namespace ligature::testing
