// How a Sequential explains itself: its fusers one after the other. What passes between them has no
// memory; a module in between is asked for its output through a copy without memory.
#include "ligature/sequential.h"

namespace ligature {
namespace {

std::string join_names(const std::string& prefix, const std::string& name) {
  if (prefix.empty()) return name;
  return name.empty() ? prefix : prefix + "." + name;
}

}  // namespace

std::vector<Tensor> SequentialImpl::explain_parts(const std::string& name, const Tensor* input,
                                                  std::vector<Tensor> extra_inputs,
                                                  at::Device device,
                                                  std::vector<ExplainedPart>& parts) {
  std::vector<Tensor> outputs;
  if (input != nullptr) outputs.push_back(*input);
  const auto take_extra = [&](size_t count) {
    LIGATURE_CHECK(count <= extra_inputs.size(), "[Sequential] takes ", num_extra_inputs(),
                   " extra inputs; explain() needs an example of each");
    std::vector<Tensor> taken(extra_inputs.begin(), extra_inputs.begin() + count);
    extra_inputs.erase(extra_inputs.begin(), extra_inputs.begin() + count);
    return taken;
  };
  const auto give = [&](const std::vector<Tensor>& results) {
    outputs[0] = results[0];
    outputs.insert(outputs.end(), results.begin() + 1, results.end());
  };
  const bool alone = groups().size() == 1;
  for (const Group& group : groups()) {
    const Entry& entry = entries_[group.first];
    const std::string place = join_names(name, alone ? "" : std::to_string(group.first));
    if (group.fuser) {
      Call call = group.fuser->collect();
      std::optional<Situation> situation;
      if (input != nullptr) {
        group.fuser->prepare();
        call = group.fuser->collect();
        situation = Situation::of(outputs[0], take_extra(group.fuser->num_extra_inputs()), device);
      }
      ExplainedCall explained = group.fuser->explain_call(std::move(call), situation);
      explained.part.name = place;
      parts.push_back(std::move(explained.part));
      if (input != nullptr) give(explained.outputs);
    } else if (entry.nested) {
      const auto extra =
          input == nullptr ? std::vector<Tensor>{} : take_extra(entry.nested->num_extra_inputs());
      auto results = entry.nested->explain_parts(place, input == nullptr ? nullptr : outputs.data(),
                                                 extra, device, parts);
      if (input != nullptr) give(results);
    } else {
      ExplainedPart& part = parts.emplace_back();
      part.name = place;
      part.module = entry.module->name();
      if (input != nullptr) {
        auto copy = entry.module->clone(at::Device(at::kMeta));
        outputs[0] = entry.forward(*copy, outputs[0].to(at::kMeta));
        const bool requires_grad = outputs[0].requires_grad();
        outputs[0] = outputs[0].detach().requires_grad_(requires_grad);
      }
    }
  }
  return outputs;
}

Explanation SequentialImpl::explain() {
  Explanation out;
  explain_parts("", nullptr, {}, at::kCPU, out.parts);
  return out;
}

Explanation SequentialImpl::explain(const Tensor& input, const std::vector<Tensor>& extra_inputs) {
  Explanation out;
  at::Device device = input.device();
  if (device.is_meta()) {
    device = at::kCPU;
    for (const Tensor& parameter : parameters()) {
      if (!parameter.is_meta()) {
        device = parameter.device();
        break;
      }
    }
  }
  explain_parts("", &input, extra_inputs, device, out.parts);
  return out;
}

Explanation explain(torch::nn::Module& model) {
  Explanation out;
  std::vector<std::string> covered;  // a nested Sequential is part of the one around it
  for (const auto& item : model.named_modules()) {
    auto* sequential = item.value()->as<SequentialImpl>();
    if (sequential == nullptr) continue;
    bool nested = false;
    for (const auto& prefix : covered) {
      nested = nested || prefix.empty() || item.key().rfind(prefix + ".", 0) == 0;
    }
    if (nested) continue;
    covered.push_back(item.key());
    sequential->explain_parts(item.key(), nullptr, {}, at::kCPU, out.parts);
  }
  return out;
}

}  // namespace ligature
