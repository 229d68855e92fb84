#include "ligature/fuser/execute.h"

#include <ATen/ops/view.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "ligature/fuser/forward_run.h"
#include "ligature/fuser/node.h"
#include "ligature/fuser/node_ptr.h"
#include "ligature/readable.h"

namespace ligature {

GradPlan plan_gradients(const Call& call, const Wiring& wiring, size_t num_ops) {
  GradPlan grads;
  grads.flags.resize(num_ops);
  grads.first_backward_op = num_ops;
  if (!at::GradMode::is_enabled()) return grads;
  const Tensor& input = call.input.identity();
  const bool input_requires_grad = input.defined() && input.requires_grad();
  if (input_requires_grad) grads.first_backward_op = 0;
  for (size_t op = 0; op < num_ops; ++op) {
    GradFlags& flags = grads.flags[op];
    const size_t first_param = call.param_offsets[op];
    const size_t num_params = call.param_offsets[op + 1] - first_param;
    for (size_t j = 0; j < num_params; ++j) {
      const Tensor& param = call.params[first_param + j];
      if (param.defined() && param.requires_grad()) flags.params.set(j);
    }
    for (size_t j = 0; j < wiring.inputs[op].size(); ++j) {
      const Wiring::Input& extra = wiring.inputs[op][j];
      const bool requires_grad = extra.caller != Wiring::kNone
                                     ? call.extra_inputs[extra.caller].requires_grad()
                                     : extra.producer >= grads.first_backward_op;
      if (requires_grad) flags.extra_inputs.set(j);
    }
    if ((flags.params.any() || flags.extra_inputs.any()) && op < grads.first_backward_op) {
      grads.first_backward_op = op;
    }
    flags.op = op >= grads.first_backward_op;
    flags.input = op == 0 ? input_requires_grad : op > grads.first_backward_op;
  }
  return grads;
}

namespace {

/// Makes output `k` a tensor that can carry a gradient edge. One in the memory of an argument or of
/// another output becomes a view that autograd does not let be edited; a view of an intermediate
/// stops being one.
Tensor own_output(size_t k, const std::vector<Tensor>& outputs,
                  at::ArrayRef<const Tensor*> inputs) {
  using torch::autograd::CreationMeta;
  const Tensor& y = outputs[k];
  bool of_output = false;
  for (size_t j = 0; j < outputs.size(); ++j) {
    of_output = of_output || (j != k && share_memory(y, outputs[j]));
  }
  const bool of_input = std::any_of(inputs.begin(), inputs.end(),
                                    [&](const Tensor* input) { return share_memory(y, *input); });
  if (of_output || of_input) {
    Tensor view = y.view_as(y);
    if (auto* meta = torch::autograd::impl::get_view_autograd_meta(view)) {
      meta->set_creation_meta(of_output ? CreationMeta::MULTI_OUTPUT_NODE
                                        : CreationMeta::IN_CUSTOM_FUNCTION);
    }
    return view;
  }
  return y.is_view() || y.requires_grad() ? y.detach() : y;
}

torch::autograd::Edge edge_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  return torch::autograd::impl::gradient_edge(tensor);
}

/// One of the caller's extra inputs that the operations overwrite, and its history before that.
struct Overwritten {
  Tensor tensor;
  torch::autograd::Edge before;
};

/// A leaf that needs a gradient, or a view of one, stays what it is in the graph: it is given other
/// values, and its gradient is that of the values before.
bool keeps_history(const Tensor& extra) {
  if (!at::GradMode::is_enabled() || !extra.requires_grad()) return false;
  const Tensor base = extra.is_view() ? Tensor(extra._base()) : extra;
  return base.is_leaf() && base.requires_grad();
}

std::vector<Overwritten> overwritten_inputs(const Plan& plan, const Call& call) {
  std::vector<Overwritten> out;
  if (call.extra_inputs.empty()) return out;
  for (size_t i = 0; i < plan.basic_ops.size(); ++i) {
    for (size_t j = 0; j < plan.wiring->inputs[i].size(); ++j) {
      if (!plan.basic_ops[i]->writes_extra_input(j)) continue;
      const Tensor& extra = call.extra_inputs[plan.wiring->inputs[i][j].caller];
      if (!keeps_history(extra)) out.push_back({extra, edge_of(extra)});
    }
  }
  return out;
}

/// Between a view that was overwritten and the output that it became. Autograd takes the only input
/// of such a node for the view, and its first edge for what the view was before: nothing of that is
/// left.
struct OverwrittenView : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor& grad = grads[0];
    return {grad.defined() ? at::zeros_like(grad) : Tensor(), grad};
  }
};

/// An overwritten tensor takes on a new history: that of the output it became, or one that refuses.
void rebase_overwritten(const Overwritten& overwritten, const torch::autograd::Edge& output) {
  const Tensor& tensor = overwritten.tensor;
  if (output.is_valid() && !tensor.is_view()) {
    torch::autograd::impl::rebase_history(tensor, output);
    return;
  }
  if (output.is_valid()) {
    auto replaced = make_node<OverwrittenView>();
    replaced->add_next_edge(overwritten.before);
    replaced->add_next_edge(output);
    replaced->add_input_metadata(tensor);
    torch::autograd::impl::rebase_history(tensor, {replaced, 0});
    return;
  }
  auto refuse = make_node<torch::autograd::Error>(
      "this extra input was overwritten in place inside a fuser, so no gradient can flow through "
      "it",
      torch::autograd::edge_list{overwritten.before});
  refuse->add_input_metadata(tensor);
  torch::autograd::impl::rebase_history(tensor, {refuse, 0});
}

}  // namespace

std::vector<Tensor> execute(const std::shared_ptr<const Plan>& plan, Call&& call,
                            const GradPlan& grads) {
  const size_t n = plan->basic_ops.size();
  const bool requires_grad = grads.first_backward_op < n;
  auto contexts = std::make_shared<Contexts>(n);
  std::vector<Tensor> outputs(1 + plan->wiring->caller_outputs.size());
  c10::SmallVector<size_t, 2> producers;  // of the extra outputs

  const std::vector<Overwritten> overwritten = overwritten_inputs(*plan, call);
  const auto find_overwritten = [&](const Tensor& y) {
    return std::find_if(overwritten.begin(), overwritten.end(),
                        [&](const Overwritten& item) { return item.tensor.is_same(y); });
  };
  // The arguments' histories are those from before an operation writes into one of them.
  c10::SmallVector<const Tensor*, 8> inputs;
  torch::autograd::edge_list edges;
  if (requires_grad) {
    for (const Overwritten& item : overwritten) torch::autograd::check_inplace(item.tensor, true);
    const Tensor& main_input = call.input.identity();
    if (main_input.defined()) inputs.push_back(&main_input);
    for (const Tensor& param : call.params) inputs.push_back(&param);
    for (const Tensor& extra : call.extra_inputs) inputs.push_back(&extra);
    edges.reserve(inputs.size() + 1);
    if (!main_input.defined()) edges.emplace_back();
    for (const Tensor* input : inputs) edges.push_back(edge_of(*input));
  }
  at::NoGradGuard no_grad;
  ForwardRun run(*plan, call, grads, *contexts);
  {
    const Value y = run.run(&plan->forward_bytes);
    // A quantized argument that comes back is itself, not another tensor of the same data.
    const bool wrap = y.is_quantized() && !y.identity().defined();
    outputs[0] = wrap ? wrap_quantized(y.quantized()) : y.identity();
  }
  producers.resize(outputs.size());
  for (size_t i = 0; outputs.size() > 1 && i < n; ++i) {
    for (size_t j = 0; j < plan->wiring->outputs[i].size(); ++j) {
      const size_t caller = plan->wiring->outputs[i][j].caller;
      if (caller == Wiring::kNone) continue;
      outputs[1 + caller] = run.extra_outputs()[i][j];
      producers[1 + caller] = i;
    }
  }
  if (!requires_grad) {
    // An argument that is returned as it is keeps its flag to itself, unless it was written to.
    for (Tensor& y : outputs) {
      if (y.requires_grad() && find_overwritten(y) == overwritten.end()) y = y.detach();
    }
    return outputs;
  }

  auto node = make_node<FuserNode>(plan, std::move(contexts), std::move(call.param_offsets),
                                   std::move(call.autocast), std::move(call.keep_alive),
                                   std::move(call.observer));
  node->set_next_edges(std::move(edges));

  const std::vector<Tensor> several = outputs.size() > 1 ? outputs : std::vector<Tensor>();
  const std::vector<Tensor>& made = outputs.size() > 1 ? several : outputs;
  for (size_t k = 0; k < outputs.size(); ++k) {
    const bool differentiable = (k == 0 || producers[k] >= grads.first_backward_op) &&
                                torch::autograd::isDifferentiableType(outputs[k].scalar_type());
    if (!differentiable) continue;
    node->add_output(k == 0 ? FuserNode::kMainOutput : k - 1);
    const auto written = find_overwritten(outputs[k]);
    if (written != overwritten.end()) {
      rebase_overwritten(*written, {node, node->add_input_metadata(outputs[k])});
    } else {
      outputs[k] = own_output(k, made, inputs);
      torch::autograd::set_history(outputs[k], node);
    }
  }
  for (const Overwritten& item : overwritten) {
    const bool returned = std::any_of(outputs.begin(), outputs.end(),
                                      [&](const Tensor& y) { return y.is_same(item.tensor); });
    if (!returned) rebase_overwritten(item, {});
  }
  if (plan->has_extras && !plan->ours) node->remember_shapes(run.shapes());
  node->save(outputs, run.versions());
  return outputs;
}

}  // namespace ligature
