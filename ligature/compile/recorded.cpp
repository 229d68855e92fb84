// A call while torch.jit.trace records: one call of a function that graphs can hold. What such a
// graph cannot hold is refused; recorded as it is, it would be the example's values.
#include <ATen/ops/view_as.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>

#include "ligature/compile/flat.h"
#include "ligature/compile/ops.h"
#include "ligature/quantized/quantized_tensor.h"

namespace ligature::compile {
namespace {

std::string why_not(const OperationFuser& fuser, const Call& call) {
  const auto& ops = fuser.basic_ops();
  for (size_t i = 0; i < ops.size(); ++i) {
    const std::string name = "[" + ops[i]->label() + "] ";
    if (ops[i]->is_python_op()) {
      return name + "is written in Python, which TorchScript cannot call";
    }
    for (size_t j = 0; j < ops[i]->num_extra_inputs(); ++j) {
      if (ops[i]->writes_extra_input(j)) {
        return name + "overwrites its extra input " + std::to_string(j);
      }
    }
    if (call.kwargs.empty()) continue;
    const OpKwargs& kwargs = call.kwargs[i];
    for (const std::string& given : kwargs.names) {
      if (kwargs.values.find(given) != nullptr) continue;
      return name + "was given the keyword argument '" + given + "', which is no plain value";
    }
  }
  const auto is_quantized = [](const Tensor& t) {
    return t.defined() && quantized_of(t) != nullptr;
  };
  if (call.input.is_quantized() || is_quantized(call.input.tensor()) ||
      std::any_of(call.params.begin(), call.params.end(), is_quantized) ||
      std::any_of(call.extra_inputs.begin(), call.extra_inputs.end(), is_quantized)) {
    return "one of its tensors is kept in low precision (quantized_model_init)";
  }
  return "";
}

TracedCall traced_of(const Call& call) {
  TracedCall traced;
  traced.param_offsets = call.param_offsets;
  traced.training = call.training;
  traced.training.resize(call.param_offsets.size() - 1, true);
  traced.kwargs = call.kwargs;
  traced.input = ValueMeta::of(call.input);
  // Which gradients are wanted is found out when the graph runs: torch.jit.trace checks a graph by
  // recording it again with gradients disabled.
  const auto add = [&](const Tensor& t) {
    traced.requires_grad.push_back(at::isFloatingType(t.scalar_type()));
    return ValueMeta::of(t);
  };
  add(call.input.tensor());
  for (const Tensor& t : call.params) traced.params.push_back(add(t));
  for (const Tensor& t : call.extra_inputs) traced.extra_inputs.push_back(add(t));
  traced.autocast_dtype = call.autocast_dtype;
  traced.autocast.recipe = call.autocast.recipe;
  traced.autocast.enabled = call.autocast.enabled;
  traced.autocast.calibrating = call.autocast.calibrating;
  return traced;
}

/// While it lives, nothing is recorded, and numbers are numbers to operations in Python, too.
class NotRecording {
 public:
  NotRecording() : state_(torch::jit::tracer::getTracingState()) {
    torch::jit::tracer::setTracingState(nullptr);
  }
  ~NotRecording() { torch::jit::tracer::setTracingState(state_); }
  NotRecording(const NotRecording&) = delete;
  NotRecording& operator=(const NotRecording&) = delete;

 private:
  std::shared_ptr<torch::jit::tracer::TracingState> state_;
};

std::vector<Tensor> run_recorded(OperationFuser& fuser, Call&& call) {
  const auto refuse = [&](const std::string& why) {
    LIGATURE_CHECK_STATE(why.empty(), "torch.jit.trace cannot record ", describe(fuser.basic_ops()),
                         ": ", why, "; use torch.compile or torch.export");
  };
  refuse(why_not(fuser, call));
  const auto shared = fuser.weak_from_this().lock();
  refuse(shared == nullptr ? "its OperationFuser must be held by a shared pointer" : "");
  const int64_t number = register_fuser(shared);
  const int64_t id = trace_call(number, traced_of(call));
  const std::shared_ptr<FlatCall> flat = find_call(number, id);
  refuse(flat->delayed().empty() ? "" : "delayed scaling changes with every step");
  std::vector<int64_t> sizes = call.input.sizes().vec();
  for (const Tensor& t : call.extra_inputs) {
    sizes.insert(sizes.end(), t.sizes().begin(), t.sizes().end());
  }
  std::shared_ptr<const Layout> layout;
  Tensor owner;
  {
    const NotRecording now;
    layout = flat->layout(sizes);
    owner = owner_of(number, call.input.device());
  }
  const Tensor& input = call.input.tensor();
  const std::vector<Tensor> results =
      forward_op(flat->is_closed())
          .call(input, call.params, call.extra_inputs, {}, owner, number, id, layout->structure);
  // An output in the memory of an argument, or of another output, is a view of it.
  std::vector<Tensor> outputs;
  for (const Source& source : layout->outputs) {
    if (source.kind != Source::Kind::Result) {
      const Tensor& t =
          source.kind == Source::Kind::Input ? input : call.extra_inputs[source.index];
      outputs.push_back(t.view_as(t));
      continue;
    }
    const Tensor& result = results[source.index];
    const bool again = std::any_of(outputs.begin(), outputs.end(),
                                   [&](const Tensor& y) { return y.is_same(result); });
    outputs.push_back(again ? result.view_as(result) : result);
  }
  return outputs;
}

const bool registered = [] {
  set_recorded_run(&run_recorded);
  return true;
}();

}  // namespace
}  // namespace ligature::compile
