#include "ligature/sequential.h"

#include "ligature/fuser/strict.h"

namespace ligature {

void SequentialImpl::insert_entry(size_t index, Entry entry) {
  LIGATURE_CHECK(index <= size(), "[Sequential] there is no position ", index, " among ", size(),
                 " modules");
  entries_.insert(entries_.begin() + index, std::move(entry));
  changed();
}

void SequentialImpl::erase(size_t index) {
  LIGATURE_CHECK(index < size(), "[Sequential] there is no module ", index, " among ", size());
  entries_.erase(entries_.begin() + index);
  changed();
}

void SequentialImpl::extend(const SequentialImpl& other) {
  for (const Entry& entry : std::vector<Entry>(other.entries_)) insert_entry(size(), entry);
}

const std::shared_ptr<torch::nn::Module>& SequentialImpl::operator[](size_t index) const {
  LIGATURE_CHECK(index < size(), "[Sequential] there is no module ", index, " among ", size());
  return entries_[index].module;
}

// Children are named by position, as in torch::nn::Sequential.
void SequentialImpl::changed() {
  grouped_ = false;
  for (const auto& name : named_children().keys()) unregister_module(name);
  for (size_t i = 0; i < entries_.size(); ++i) {
    register_module(std::to_string(i), entries_[i].module);
  }
}

std::shared_ptr<torch::nn::Module> SequentialImpl::clone(
    const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<SequentialImpl>();
  copy->options_ = options_;
  copy->strict_ = strict_;
  for (Entry entry : entries_) {
    entry.module = entry.module->clone(device);
    if (entry.op) entry.op = std::dynamic_pointer_cast<FusibleOperation>(entry.module);
    if (entry.nested) entry.nested = std::dynamic_pointer_cast<SequentialImpl>(entry.module);
    copy->insert_entry(copy->size(), std::move(entry));
  }
  copy->train(is_training());
  return copy;
}

const std::vector<SequentialImpl::Group>& SequentialImpl::groups() {
  if (grouped_) return groups_;
  groups_.clear();
  for (size_t i = 0; i < entries_.size();) {
    OpList ops;
    size_t end = i;
    while (end < entries_.size() && entries_[end].op) ops.push_back(entries_[end++].op);
    if (ops.empty()) {
      groups_.push_back({nullptr, i, 1});
      ++i;
    } else {
      groups_.push_back({std::make_shared<OperationFuser>(ops, options_), i, ops.size()});
      i = end;
    }
  }
  grouped_ = true;
  return groups_;
}

size_t SequentialImpl::num_extra_inputs() {
  size_t count = 0;
  for (const Group& group : groups()) {
    if (group.fuser) count += group.fuser->num_extra_inputs();
    if (entries_[group.first].nested) count += entries_[group.first].nested->num_extra_inputs();
  }
  return count;
}

size_t SequentialImpl::num_extra_outputs() {
  size_t count = 0;
  for (const Group& group : groups()) {
    if (group.fuser) count += group.fuser->num_extra_outputs();
    if (entries_[group.first].nested) count += entries_[group.first].nested->num_extra_outputs();
  }
  return count;
}

std::vector<std::shared_ptr<OperationFuser>> SequentialImpl::fusers() {
  std::vector<std::shared_ptr<OperationFuser>> out;
  for (const Group& group : groups()) {
    if (group.fuser) out.push_back(group.fuser);
  }
  return out;
}

void SequentialImpl::set_recompute(Recompute recompute) {
  options_.recompute = recompute;
  grouped_ = false;
}

void SequentialImpl::set_fuse(bool fuse) {
  options_.fuse = fuse;
  grouped_ = false;
}

void SequentialImpl::set_strict(std::vector<std::string> fusions) {
  strict_ = std::move(fusions);
  grouped_ = false;
}

Tensor SequentialImpl::forward(const Tensor& input) {
  std::vector<Tensor> outputs = forward(input, {});
  LIGATURE_CHECK(outputs.size() == 1, "[Sequential] it has ", outputs.size() - 1,
                 " extra outputs; call forward(input, extra_inputs) to get them");
  return outputs[0];
}

std::vector<Tensor> SequentialImpl::forward(
    const Tensor& input, const std::vector<Tensor>& extra_inputs,
    const std::vector<std::pair<size_t, OpKwargs>>& kwargs) {
  if (strict_.empty()) return run_groups(input, extra_inputs, kwargs);
  const StrictScope strict(strict_, StrictScope::Where::Any);
  std::vector<Tensor> outputs = run_groups(input, extra_inputs, kwargs);
  strict.finish();
  return outputs;
}

std::vector<Tensor> SequentialImpl::run_groups(
    const Tensor& input, const std::vector<Tensor>& extra_inputs,
    const std::vector<std::pair<size_t, OpKwargs>>& kwargs) {
  LIGATURE_CHECK(extra_inputs.size() == num_extra_inputs(), "[Sequential] takes ",
                 num_extra_inputs(), " extra inputs, got ", extra_inputs.size());
  for (const auto& [index, values] : kwargs) {
    LIGATURE_CHECK(index < size() && entries_[index].op,
                   "[Sequential] keyword arguments for module ", index, ", which is no operation");
    LIGATURE_CHECK(!entries_[index].op->is_fused_op(), "[Sequential] keyword arguments for module ",
                   index, ", which is not a basic operation");
  }
  std::vector<Tensor> outputs{input};
  auto next_extra = extra_inputs.begin();
  const auto take_extra = [&](size_t count) {
    std::vector<Tensor> taken(next_extra, next_extra + count);
    next_extra += count;
    return taken;
  };
  const auto give = [&](std::vector<Tensor> results) {
    outputs[0] = results[0];
    outputs.insert(outputs.end(), results.begin() + 1, results.end());
  };
  for (const Group& group : groups()) {
    const Entry& entry = entries_[group.first];
    if (group.fuser) {
      std::vector<OpKwargs> group_kwargs;
      if (!kwargs.empty()) {
        for (size_t i = group.first; i < group.first + group.count; ++i) {
          const size_t before = group_kwargs.size();
          group_kwargs.resize(before + entries_[i].op->basic_ops().size());
          for (const auto& [index, values] : kwargs) {
            if (index == i) group_kwargs[before] = values;
          }
        }
      }
      give((*group.fuser)(outputs[0], take_extra(group.fuser->num_extra_inputs()),
                          std::move(group_kwargs)));
    } else if (entry.nested) {
      give(entry.nested->forward(outputs[0], take_extra(entry.nested->num_extra_inputs())));
    } else {
      outputs[0] = entry.forward(*entry.module, outputs[0]);
    }
  }
  return outputs;
}

}  // namespace ligature
