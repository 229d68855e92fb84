#include "ligature/compile/layout.h"

#include <c10/util/hash.h>

#include <algorithm>

namespace ligature::compile {
namespace {

using Kind = Source::Kind;

bool same_geometry(const Tensor& a, const Tensor& b) {
  return a.storage_offset() == b.storage_offset() && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool in_one_memory(const Tensor& a, const Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

/// Does `part` lie within the elements of `whole`, which is contiguous?
bool lies_within(const Tensor& part, const Tensor& whole) {
  if (part.scalar_type() != whole.scalar_type() || part.numel() == 0) return false;
  int64_t last = part.storage_offset();
  for (int64_t d = 0; d < part.dim(); ++d) last += (part.size(d) - 1) * part.stride(d);
  return part.storage_offset() >= whole.storage_offset() &&
         last < whole.storage_offset() + whole.numel();
}

struct KnownTensor {
  Tensor tensor;
  Kind kind;
  size_t index;
};

class Maker {
 public:
  Maker(const Arguments& arguments, std::vector<Tensor>& results) : results_(results) {
    known_.push_back({arguments.input, Kind::Input, 0});
    for (size_t i = 0; i < arguments.params.size(); ++i) {
      known_.push_back({arguments.params[i], Kind::Param, i});
    }
    for (size_t i = 0; i < arguments.extra_inputs.size(); ++i) {
      known_.push_back({arguments.extra_inputs[i], Kind::Extra, i});
    }
  }

  /// Anything that is not an argument is a result; no two results share memory.
  Source find(const Tensor& tensor, bool may_be_view) {
    if (!tensor.defined()) return {};
    for (const KnownTensor& known : known_) {
      if (known.tensor.is_same(tensor)) return {known.kind, known.index, std::nullopt};
    }
    for (const KnownTensor& known : known_) {
      if (in_one_memory(known.tensor, tensor) && same_geometry(known.tensor, tensor)) {
        return {known.kind, known.index, std::nullopt};
      }
    }
    for (const KnownTensor& known : known_) {
      if (!may_be_view || !in_one_memory(known.tensor, tensor)) continue;
      if (!known.tensor.is_contiguous() || !lies_within(tensor, known.tensor)) continue;
      return {known.kind, known.index,
              Source::View{at::DimVector(tensor.sizes()), at::DimVector(tensor.strides()),
                           tensor.storage_offset() - known.tensor.storage_offset()}};
    }
    return add(tensor);
  }

  /// A tensor of its own in any case.
  Source add(const Tensor& tensor) {
    const Source source{Kind::Result, results_.size(), std::nullopt};
    known_.push_back({tensor, Kind::Result, results_.size()});
    results_.push_back(tensor);
    return source;
  }

  Source output(const Tensor& tensor) {
    const Source found = find(tensor, false);
    return found.kind == Kind::Param ? add(tensor) : found;
  }

 private:
  std::vector<Tensor>& results_;
  std::vector<KnownTensor> known_;
};

/// Mixes numbers into one that fits into a graph's integers.
class Mixer {
 public:
  void add(size_t value) { hash_ = c10::hash_combine(hash_, value); }
  void add(const std::string& text) { add(std::hash<std::string>()(text)); }
  void add(const Source& source) {
    add(static_cast<size_t>(source.kind));
    add(source.index);
    add(source.view.has_value() ? 1 : 0);
  }
  int64_t value() const { return static_cast<int64_t>(hash_ & 0x3fffffffffffffffULL); }

 private:
  size_t hash_ = 0;
};

int64_t structure_of(const Layout& layout, const Plan& plan) {
  Mixer mix;
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const PlanStep& step : *steps) {
      mix.add(step.op->name());
      mix.add(step.count);
    }
  }
  for (const Source& source : layout.outputs) mix.add(source);
  for (const Source& source : layout.overwritten) mix.add(source);
  for (const ValueMeta& meta : layout.results) {
    mix.add(static_cast<size_t>(meta.dtype));
    mix.add(meta.sizes.size());
  }
  for (const auto& values : layout.saved) {
    mix.add(values.size());
    for (const SavedSlot& slot : values) {
      if (slot.shell != nullptr) mix.add(slot.shell->format());
      for (const Source& part : slot.parts) mix.add(part);
    }
  }
  return mix.value();
}

/// A weight that an operation keeps in low precision is not given away: a graph may write into its
/// own tensors when it needs them no more.
bool is_kept_by_operation(const Plan& plan, const Tensor& tensor) {
  return std::any_of(plan.quantizations.begin(), plan.quantizations.end(), [&](const auto& own) {
    return own != nullptr && own->weights->keeps(tensor);
  });
}

void make_own(std::vector<Tensor>& results, const Arguments& arguments, const Plan& plan) {
  const auto any = [](const std::vector<Tensor>& tensors, const auto& test) {
    return std::any_of(tensors.begin(), tensors.end(), test);
  };
  for (size_t i = 0; i < results.size(); ++i) {
    Tensor& t = results[i];
    const auto shares = [&](const Tensor& other) { return in_one_memory(t, other); };
    if (!t.is_contiguous() || is_kept_by_operation(plan, t) || shares(arguments.input) ||
        any(arguments.params, shares) || any(arguments.extra_inputs, shares) ||
        std::any_of(results.begin(), results.begin() + i, shares)) {
      t = t.clone(at::MemoryFormat::Contiguous);
    } else if (t.storage_offset() != 0 ||
               static_cast<int64_t>(t.storage().nbytes()) > t.numel() * t.element_size()) {
      t = t.clone();
    }
  }
}

}  // namespace

std::shared_ptr<Contexts> copy_contexts(const Contexts& contexts) {
  auto made = std::make_shared<Contexts>(contexts.size());
  for (size_t i = 0; i < contexts.size(); ++i) {
    (*made)[i] = contexts[i];
    (*made)[i].block = made.get();
  }
  return made;
}

std::shared_ptr<const Layout> make_layout(const Plan& plan, const Arguments& arguments,
                                          const Outcome& outcome,
                                          std::shared_ptr<Contexts> contexts, at::Device device,
                                          std::vector<Tensor>& results) {
  auto layout = std::make_shared<Layout>();
  Maker maker(arguments, results);
  layout->outputs.push_back(maker.output(outcome.output));
  layout->outputs.resize(1 + plan.wiring->caller_outputs.size());
  for (size_t i = 0; i < plan.basic_ops.size(); ++i) {
    for (size_t j = 0; j < plan.wiring->outputs[i].size(); ++j) {
      const size_t caller = plan.wiring->outputs[i][j].caller;
      if (caller != Wiring::kNone) {
        layout->outputs[1 + caller] = maker.output(outcome.extra_outputs[i][j]);
      }
    }
  }
  for (const Tensor& tensor : outcome.overwritten) {
    layout->overwritten.push_back(maker.find(tensor, false));
  }
  layout->num_outputs = results.size();
  layout->saved.resize(contexts->size());
  const auto keep = [&](const Source& source) {
    const auto same = [&](const Source& other) { return other.same_tensor(source); };
    if (source.kind != Kind::None && std::none_of(layout->kept.begin(), layout->kept.end(), same)) {
      layout->kept.push_back({source.kind, source.index, std::nullopt});
    }
  };
  for (size_t op = 0; op < contexts->size(); ++op) {
    OperationContext& ctx = (*contexts)[op];
    LIGATURE_CHECK_STATE(ctx.parameter_references.empty(), "[", plan.basic_ops[op]->label(),
                         "] accumulate_into_main_grad does not work in a compiled graph");
    for (const Value& value : ctx.saved()) {
      SavedSlot& slot = layout->saved[op].emplace_back();
      if (value.is_quantized()) {
        slot.shell = value.quantized()->shell();
        for (const Tensor& part : value.quantized()->tensors()) {
          slot.parts.push_back(maker.find(part, false));
        }
      } else {
        slot.parts.push_back(maker.find(value.defined() ? value.tensor() : Tensor(), true));
      }
      for (const Source& part : slot.parts) keep(part);
    }
    ctx.save_for_backward({});
  }
  make_own(results, arguments, plan);
  for (const Tensor& result : results) layout->results.push_back(ValueMeta::of(result));
  layout->shapes = outcome.shapes;
  const auto place = [&](std::vector<std::optional<ValueMeta>>& metas) {
    for (auto& meta : metas) {
      if (meta) meta->device = device;
    }
  };
  for (auto& metas : layout->shapes.extra_outputs) place(metas);
  place(layout->shapes.outputs);
  layout->contexts = std::move(contexts);
  layout->structure = structure_of(*layout, plan);
  return layout;
}

std::vector<Tensor> collect_results(const Layout& layout, const Plan& plan,
                                    const Arguments& arguments, const Outcome& outcome,
                                    const Contexts& contexts) {
  std::vector<Tensor> results(layout.results.size());
  const auto put = [&](const Source& source, const Tensor& tensor) {
    if (source.kind != Kind::Result || source.view || results[source.index].defined()) return;
    results[source.index] = tensor;
  };
  put(layout.outputs[0], outcome.output);
  for (size_t i = 0; i < plan.basic_ops.size(); ++i) {
    for (size_t j = 0; j < plan.wiring->outputs[i].size(); ++j) {
      const size_t caller = plan.wiring->outputs[i][j].caller;
      if (caller != Wiring::kNone) put(layout.outputs[1 + caller], outcome.extra_outputs[i][j]);
    }
  }
  for (size_t i = 0; i < outcome.overwritten.size(); ++i) {
    put(layout.overwritten[i], outcome.overwritten[i]);
  }
  for (size_t op = 0; op < contexts.size(); ++op) {
    const auto& values = contexts[op].saved();
    const auto& slots = layout.saved[op];
    LIGATURE_CHECK_STATE(values.size() == slots.size(), "[", plan.basic_ops[op]->label(),
                         "] saved ", values.size(), " tensors, but ", slots.size(),
                         " when it was compiled");
    for (size_t k = 0; k < slots.size(); ++k) {
      if (!values[k].is_quantized()) {
        put(slots[k].parts[0], values[k].defined() ? values[k].tensor() : Tensor());
        continue;
      }
      const std::vector<Tensor> parts = values[k].quantized()->tensors();
      LIGATURE_CHECK_STATE(parts.size() == slots[k].parts.size(), "[", plan.basic_ops[op]->label(),
                           "] saved another format than when it was compiled");
      for (size_t i = 0; i < parts.size(); ++i) put(slots[k].parts[i], parts[i]);
    }
  }
  for (const Tensor& result : results) {
    LIGATURE_CHECK_STATE(result.defined(), "a compiled call of ", describe(plan.basic_ops),
                         " saved other tensors than when it was compiled");
  }
  make_own(results, arguments, plan);
  return results;
}

}  // namespace ligature::compile
