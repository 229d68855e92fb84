// What Python traces a compiled graph with: numbers for fusers and their calls, and the shapes of
// what they return.
#include <c10/core/InferenceMode.h>

#include "bindings.h"
#include "host.h"
#include "ligature/base/modes.h"
#include "ligature/compile/flat.h"
#include "plain.h"

namespace ligature::python {
namespace {

ValueMeta meta_from(const py::handle& item, at::Device device) {
  const auto [sizes, dtype] = item.cast<std::pair<std::vector<int64_t>, at::ScalarType>>();
  return {{sizes.begin(), sizes.end()}, dtype, device};
}

/// `shapes`: of the input, the parameters and the extra inputs, each a pair of sizes and dtype.
int64_t trace(int64_t fuser, const py::dict& given) {
  compile::TracedCall call;
  const auto device = given["device"].cast<at::Device>();
  call.input = meta_from(given["input"], device);
  for (const auto& item : given["params"]) call.params.push_back(meta_from(item, device));
  for (const auto& item : given["extra_inputs"]) {
    call.extra_inputs.push_back(meta_from(item, device));
  }
  call.param_offsets = {0};
  for (const auto& count : given["param_counts"]) {
    call.param_offsets.push_back(call.param_offsets.back() + count.cast<size_t>());
  }
  call.requires_grad = given["requires_grad"].cast<std::vector<bool>>();
  call.training = given["training"].cast<std::vector<bool>>();
  call.autocast_dtype = given["autocast_dtype"].cast<std::optional<at::ScalarType>>();
  for (const auto& item : given["kwargs"]) {
    OpKwargs& kwargs = call.kwargs.emplace_back();
    const auto dict = py::cast<py::dict>(item);
    for (const auto& [name, value] : dict) {
      kwargs.names.push_back(name.cast<std::string>());
      auto plain = to_plain(value);
      LIGATURE_CHECK_TYPE(plain.has_value(), "a compiled graph takes keyword arguments with plain ",
                          "values only, got '", kwargs.names.back(), "'");
      kwargs.values.set(kwargs.names.back(), std::move(*plain));
    }
    kwargs.bound = hold(dict);
  }
  if (!given["recipe"].is_none()) {
    call.autocast.recipe = given["recipe"].cast<std::shared_ptr<Recipe>>();
    call.autocast.enabled = given["enabled"].cast<bool>();
    call.autocast.calibrating = given["calibrating"].cast<bool>();
    call.own_autocast = given["own_autocast"].cast<bool>();
  }
  py::gil_scoped_release no_gil;
  return compile::trace_call(fuser, std::move(call));
}

py::tuple source_tuple(const compile::Source& source) {
  static const char* const kNames[] = {"none", "input", "param", "extra", "result"};
  return py::make_tuple(kNames[static_cast<size_t>(source.kind)], source.index);
}

py::tuple source_tuples(const std::vector<compile::Source>& sources) {
  py::tuple out(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) out[i] = source_tuple(sources[i]);
  return out;
}

py::dict layout(int64_t fuser, int64_t call, const std::vector<int64_t>& sizes) {
  std::shared_ptr<const compile::Layout> found;
  std::vector<bool> differentiable;
  bool closed = false;
  {
    py::gil_scoped_release no_gil;
    const auto flat = compile::find_call(fuser, call);
    found = flat->layout(sizes);
    differentiable = flat->differentiable();
    closed = flat->is_closed();
  }
  py::dict out;
  out["structure"] = found->structure;
  out["closed"] = closed;
  out["outputs"] = source_tuples(found->outputs);
  out["overwritten"] = source_tuples(found->overwritten);
  out["differentiable"] = differentiable;
  out["kept"] = source_tuples(found->kept);
  py::list results;
  for (const ValueMeta& meta : found->results) {
    results.append(py::make_tuple(std::vector<int64_t>(meta.sizes.begin(), meta.sizes.end()),
                                  from_plain(PlainValue(meta.dtype))));
  }
  out["results"] = results;
  return out;
}

/// The factors, largest values and histories of delayed scaling in forward, in memory that stays.
py::tuple delayed_tensors(int64_t number, const std::shared_ptr<Recipe>& recipe,
                          at::Device device) {
  std::vector<Tensor> lists[3];
  {
    py::gil_scoped_release no_gil;
    const c10::InferenceMode no_inference(false);
    const ModesHidden modes;
    std::vector<OpQuantizationPtr> states;
    for (const auto& op : compile::operations_of(number)) {
      states.push_back(op->quantization(recipe, device));
    }
    for (const DelayedScalePtr& delayed : compile::forward_delayed(states)) {
      if (!delayed->graph_scale.defined()) {
        delayed->graph_scale = delayed->scale.clone();
        delayed->scale = delayed->graph_scale;
      }
      lists[0].push_back(delayed->graph_scale);
      lists[1].push_back(delayed->amax);
      lists[2].push_back(delayed->history);
    }
  }
  py::tuple out(3);
  for (size_t i = 0; i < 3; ++i) {
    py::list tensors;
    for (const Tensor& t : lists[i]) tensors.append(wrap(t));
    out[i] = tensors;
  }
  return out;
}

}  // namespace

void bind_compile(py::module_& m) {
  m.def("trace_call", &trace);
  m.def("traced_layout", &layout);
  m.def("delayed_tensors", &delayed_tensors);
  m.def("owner_of",
        [](int64_t fuser, at::Device device) { return wrap(compile::owner_of(fuser, device)); });
  m.def("is_known", &compile::is_known);
  m.def("forward_flops", [](int64_t fuser, int64_t call, const std::vector<int64_t>& sizes) {
    py::gil_scoped_release no_gil;
    return compile::find_call(fuser, call)->forward_flops(sizes);
  });
  m.def("backward_flops", [](int64_t fuser, int64_t call, const std::vector<int64_t>& sizes,
                             const std::vector<bool>& given) {
    py::gil_scoped_release no_gil;
    return compile::find_call(fuser, call)->backward_flops(sizes, given);
  });
  m.def("traced_gradients", [](int64_t fuser, int64_t call, const std::vector<int64_t>& sizes,
                               const std::vector<bool>& given) {
    py::gil_scoped_release no_gil;
    return compile::find_call(fuser, call)->gradients(sizes, given);
  });
}

}  // namespace ligature::python
