// The gradients of the functions that graphs call, for graphs that run under autograd as they are:
// those of torch.jit.trace, make_fx and torch.export. Under torch.compile, and in a call that a
// mode watches, autograd is above these functions and finds nothing to do here.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>

#include "ligature/compile/flat.h"
#include "ligature/compile/ops.h"
#include "ligature/fuser/node_ptr.h"

namespace ligature::compile {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Optionals = c10::List<std::optional<Tensor>>;

bool requires_grad(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

bool any_requires_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), requires_grad);
}

struct PipelineBackward : torch::autograd::Node {
  std::shared_ptr<FlatCall> flat;
  int64_t fuser = 0, call = 0, structure = 0;
  c10::SymDimVector sizes;
  std::vector<SavedVariable> kept;
  Tensor owner;
  size_t num_outputs = 0;
  std::vector<size_t> outputs;  // which output each input of this node is

  std::string name() const override { return "LigaturePipelineBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& saved : kept) saved.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<bool>& known = flat->traced().requires_grad;
    for (size_t i = 0; i < known.size(); ++i) {
      LIGATURE_CHECK_STATE(known[i] || !task_should_compute_output(i), "a graph of ",
                           describe(flat->plan().basic_ops), " gives no gradient for ", what(i),
                           ", which needed none when it was recorded; record it with an example "
                           "that requires grad");
    }
    Optionals given;
    std::vector<bool> there(num_outputs);
    given.resize(num_outputs);
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (!grads[k].defined()) continue;
      given.set(outputs[k], grads[k]);
      there[outputs[k]] = true;
    }
    variable_list result(known.size());
    if (std::none_of(there.begin(), there.end(), [](bool b) { return b; })) return result;
    std::vector<Tensor> tensors;
    for (const SavedVariable& saved : kept) tensors.push_back(saved.unpack(getptr()));
    std::vector<int64_t> numbers;
    for (const c10::SymInt& size : sizes) numbers.push_back(size.guard_int(__FILE__, __LINE__));
    const std::vector<bool> exist = flat->gradients(numbers, there);
    std::vector<Tensor> found =
        backward_op(flat->is_closed()).call(given, tensors, owner, sizes, fuser, call, structure);
    size_t next = 0;
    for (size_t i = 0; i < exist.size(); ++i) {
      if (exist[i]) result[i] = std::move(found[next++]);
    }
    return result;
  }

 private:
  std::string what(size_t i) const {
    if (i == 0) return "its input";
    const size_t params = flat->traced().params.size();
    return i <= params ? "parameter " + std::to_string(i - 1)
                       : "extra input " + std::to_string(i - 1 - params);
  }
};

/// Which results carry a gradient, each with the output that it is.
std::vector<std::pair<size_t, size_t>> differentiable_results(FlatCall& flat, const Layout& layout,
                                                              const std::vector<Tensor>& results) {
  const std::vector<bool> differentiable = flat.differentiable();
  std::vector<std::pair<size_t, size_t>> out;
  for (size_t k = 0; k < layout.outputs.size(); ++k) {
    const Source& source = layout.outputs[k];
    if (!differentiable[k] || source.kind != Source::Kind::Result) continue;
    const auto same = [&](const auto& other) { return other.first == source.index; };
    if (std::any_of(out.begin(), out.end(), same)) continue;
    if (torch::autograd::isDifferentiableType(results[source.index].scalar_type())) {
      out.emplace_back(source.index, k);
    }
  }
  return out;
}

Tensor pick(const Source& source, const Arguments& arguments, const std::vector<Tensor>& results) {
  switch (source.kind) {
    case Source::Kind::Input:
      return arguments.input;
    case Source::Kind::Param:
      return arguments.params[source.index];
    case Source::Kind::Extra:
      return arguments.extra_inputs[source.index];
    case Source::Kind::Result:
      return results[source.index];
    case Source::Kind::None:
      break;
  }
  return {};
}

template <bool closed>
std::vector<Tensor> forward_kernel(const Tensor& input, at::TensorList params,
                                   at::TensorList extra_inputs, at::TensorList scales,
                                   const Tensor& owner, int64_t fuser, int64_t call,
                                   int64_t structure) {
  std::vector<Tensor> results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_op(closed).call(input, params, extra_inputs, scales, owner, fuser, call,
                                   structure);
  }();
  const bool wanted =
      at::GradMode::is_enabled() &&
      (requires_grad(input) || any_requires_grad(params) || any_requires_grad(extra_inputs));
  if (!wanted) return results;
  const std::shared_ptr<FlatCall> flat = find_call(fuser, call);
  const std::shared_ptr<const Layout> layout = flat->layout_of(structure);
  Arguments arguments{input, params.vec(), extra_inputs.vec()};
  torch::autograd::edge_list edges;
  const auto add_edges = [&](const std::vector<Tensor>& tensors) {
    for (const Tensor& t : tensors) {
      edges.push_back(requires_grad(t) ? torch::autograd::impl::gradient_edge(t)
                                       : torch::autograd::Edge());
    }
  };
  add_edges({input});
  add_edges(arguments.params);
  add_edges(arguments.extra_inputs);
  const std::vector<bool>& known = flat->traced().requires_grad;
  if (std::none_of(known.begin(), known.end(), [](bool b) { return b; })) {
    auto refuse = make_node<torch::autograd::Error>(
        "a graph that was recorded without gradients has no backward; record it where gradients "
        "are enabled and something requires grad",
        std::move(edges));
    for (const Source& source : layout->outputs) {
      if (source.kind == Source::Kind::Result && !results[source.index].requires_grad()) {
        torch::autograd::set_history(results[source.index], refuse);
      }
    }
    return results;
  }
  auto node = make_node<PipelineBackward>();
  node->set_next_edges(std::move(edges));
  node->flat = flat;
  node->fuser = fuser;
  node->call = call;
  node->structure = structure;
  node->owner = owner;
  node->num_outputs = layout->outputs.size();
  const auto add_sizes = [&](const Tensor& t) {
    for (const c10::SymInt& size : t.sym_sizes()) node->sizes.push_back(size);
  };
  add_sizes(input);
  for (const Tensor& t : extra_inputs) add_sizes(t);
  const auto carried = differentiable_results(*flat, *layout, results);
  for (const auto& [result, output] : carried) {
    node->outputs.push_back(output);
    torch::autograd::set_history(results[result], node);
  }
  for (const Source& source : layout->kept) {
    const bool is_output = source.kind == Source::Kind::Result &&
                           std::any_of(carried.begin(), carried.end(), [&](const auto& other) {
                             return other.first == source.index;
                           });
    node->kept.emplace_back(pick(source, arguments, results), is_output);
  }
  return results;
}

template <bool closed>
std::vector<Tensor> backward_kernel(const Optionals& grads, at::TensorList kept,
                                    const Tensor& owner, c10::SymIntArrayRef sizes, int64_t fuser,
                                    int64_t call, int64_t structure) {
  std::vector<Tensor> results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return backward_op(closed).call(grads, kept, owner, sizes, fuser, call, structure);
  }();
  if (!at::GradMode::is_enabled()) return results;
  torch::autograd::edge_list edges;
  const auto add = [&](const Tensor& t) {
    if (requires_grad(t)) edges.push_back(torch::autograd::impl::gradient_edge(t));
  };
  for (size_t i = 0; i < grads.size(); ++i) add(grads.get(i).value_or(Tensor()));
  for (const Tensor& t : kept) add(t);
  if (edges.empty()) return results;
  auto refuse = make_node<torch::autograd::Error>(
      "trying to differentiate twice a function that was marked with @once_differentiable",
      std::move(edges));
  for (Tensor& grad : results) torch::autograd::set_history(grad, refuse);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(ligature, Autograd, m) {
  m.impl("pipeline_forward", forward_kernel<true>);
  m.impl("pipeline_forward_no_cudagraph", forward_kernel<false>);
  m.impl("pipeline_backward", backward_kernel<true>);
  m.impl("pipeline_backward_no_cudagraph", backward_kernel<false>);
}

}  // namespace ligature::compile
