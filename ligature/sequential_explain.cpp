// How a Sequential explains itself: its fusers one after the other. What passes between them has no
// memory; of a module in between a copy runs on zeros, to see what it gives.
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <mutex>

#include "ligature/explain/explain.h"
#include "ligature/sequential.h"

namespace ligature {
namespace {

std::string join_names(const std::string& prefix, const std::string& name) {
  if (prefix.empty()) return name;
  return name.empty() ? prefix : prefix + "." + name;
}

/// Random numbers drawn in here are drawn again afterwards.
class KeepRandomState {
 public:
  explicit KeepRandomState(at::Device device)
      : generator_(at::globalContext().defaultGenerator(device)) {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepRandomState() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeepRandomState(const KeepRandomState&) = delete;
  KeepRandomState& operator=(const KeepRandomState&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

template <class Forward>
Tensor output_of_a_copy(const torch::nn::Module& module, const Forward& forward, const Tensor& x,
                        at::Device device) {
  const KeepRandomState cpu(at::kCPU);
  const KeepRandomState other(device);
  const at::NoGradGuard no_grad;
  Tensor y;
  try {
    const auto copy = module.clone();
    y = forward(*copy, at::zeros(x.sizes(), x.options().device(device)));
  } catch (const c10::Error& error) {
    LIGATURE_CHECK_STATE(false, "explain: ", module.name(), " could not be tried on an example (",
                         error.what_without_backtrace(), "); call the model once, then explain it");
  }
  bool requires_grad = x.requires_grad();
  for (const Tensor& parameter : module.parameters()) {
    requires_grad = requires_grad || parameter.requires_grad();
  }
  Tensor out = at::empty(y.sizes(), y.options().device(at::kMeta));
  return requires_grad && y.is_floating_point() ? out.requires_grad_() : out;
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
        outputs[0] = output_of_a_copy(*entry.module, entry.forward, outputs[0], device);
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

// A nested Sequential is part of the one around it.
void SequentialImpl::explain_in(torch::nn::Module& module, const std::string& name,
                                std::vector<ExplainedPart>& parts) {
  if (auto* sequential = module.as<SequentialImpl>()) {
    sequential->explain_parts(name, nullptr, {}, at::kCPU, parts);
    return;
  }
  for (const auto& child : module.named_children()) {
    explain_in(*child.value(), join_names(name, child.key()), parts);
  }
}

Explanation explain(torch::nn::Module& model) {
  Explanation out;
  SequentialImpl::explain_in(model, "", out.parts);
  return out;
}

}  // namespace ligature
