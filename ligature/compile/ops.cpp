// The functions that compiled graphs call. They are functional, so that a compiler may move them
// and see what is saved; only record_amax and update_delayed change what they are given. Their
// `owner` (see flat.h) keeps what they call alive.
#include "ligature/compile/ops.h"

#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/maximum.h>
#include <torch/library.h>

#include <algorithm>

namespace ligature::compile {
namespace {

std::vector<Tensor> pipeline_forward(const Tensor& input, at::TensorList params,
                                     at::TensorList extra_inputs, at::TensorList scales,
                                     const Tensor& /*owner*/, int64_t fuser, int64_t call,
                                     int64_t structure) {
  return find_call(fuser, call)
      ->forward({input, params.vec(), extra_inputs.vec()}, scales.vec(), structure);
}

std::vector<Tensor> pipeline_backward(const c10::List<std::optional<Tensor>>& grads,
                                      at::TensorList kept, const Tensor& /*owner*/,
                                      at::IntArrayRef sizes, int64_t fuser, int64_t call,
                                      int64_t structure) {
  std::vector<Tensor> given;
  for (size_t i = 0; i < grads.size(); ++i) {
    const std::optional<Tensor> grad = grads.get(i);
    given.push_back(grad ? *grad : Tensor());
  }
  return find_call(fuser, call)->backward(std::move(given), kept.vec(), sizes, structure);
}

void record_amax(at::TensorList amaxes, const Tensor& largest) {
  const at::NoGradGuard no_grad;
  if (!amaxes.empty()) at::_foreach_maximum_(amaxes, largest.split(1));
}

std::vector<DelayedScalePtr> delayed_of(int64_t fuser, at::Device device) {
  std::vector<DelayedScalePtr> known;
  for (const auto& op : operations_of(fuser)) {
    for (const DelayedScalePtr& state : op->delayed_states().forward) {
      if (state != nullptr && state->amax.device() == device) known.push_back(state);
    }
  }
  return known;
}

/// The end of an autocast inside a graph: chooses factors anew for what was noted in it, and not
/// -1. Inside another autocast, outside of the graph, it is that one's end that counts. What ran in
/// it has made the state follow its recipe.
void update_delayed(at::TensorList scales, at::TensorList amaxes, at::TensorList histories,
                    at::TensorList noted, int64_t fuser, std::string /*recipe*/) {
  if (scales.empty()) return;
  const at::NoGradGuard no_grad;
  const auto known = delayed_of(fuser, scales[0].device());
  LIGATURE_CHECK_STATE(known.size() == scales.size(), "delayed scaling has ", known.size(),
                       " factors here, got ", scales.size());
  Tensor latest = noted[0];
  for (const Tensor& one : noted.slice(1)) latest = at::maximum(latest, one);
  // What is given may be copies of the operations' own state, that a compiler writes back.
  std::vector<DelayedScale> given(known.size());
  std::vector<DelayedScale*> tensors;
  const auto& session = autocast_state().session;
  for (size_t i = 0; i < known.size(); ++i) {
    // Nothing waits for a GPU: there it is found out where the update runs.
    if (latest.is_cpu() && latest.const_data_ptr<float>()[i] < 0.0f) continue;
    bool record = true;
    if (session != nullptr) {
      session->scale_of(known[i], record);
      continue;
    }
    given[i] = {scales[i],           amaxes[i],        histories[i],
                known[i]->max_value, known[i]->recipe, scales[i]};
    ++known[i]->updates;
    tensors.push_back(&given[i]);
  }
  DelayedScaling::update_all(tensors, latest.is_cpu() ? Tensor() : latest);
}

}  // namespace

const c10::TypedOperatorHandle<ForwardOp>& forward_op(bool closed) {
  static const auto find = [](const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<ForwardOp>();
  };
  static const auto free = find("ligature::pipeline_forward");
  static const auto apart = find("ligature::pipeline_forward_no_cudagraph");
  return closed ? free : apart;
}

const c10::TypedOperatorHandle<BackwardOp>& backward_op(bool closed) {
  static const auto find = [](const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<BackwardOp>();
  };
  static const auto free = find("ligature::pipeline_backward");
  static const auto apart = find("ligature::pipeline_backward_no_cudagraph");
  return closed ? free : apart;
}

TORCH_LIBRARY(ligature, m) {
  const std::string forward =
      "(Tensor input, Tensor[] params, Tensor[] extra_inputs, Tensor[] scales, Tensor owner, int "
      "fuser, int call, int structure) -> Tensor[]";
  const std::string backward =
      "(Tensor?[] grads, Tensor[] kept, Tensor owner, SymInt[] sizes, int fuser, int call, int "
      "structure) -> Tensor[]";
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};
  m.def(("pipeline_forward" + forward).c_str(), tags);
  m.def(("pipeline_backward" + backward).c_str(), tags);
  // The same for calls that are not closed (FlatCall): a compiler's CUDA graphs leave them out.
  const std::vector<at::Tag> apart = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded,
                                      at::Tag::cudagraph_unsafe};
  m.def(("pipeline_forward_no_cudagraph" + forward).c_str(), apart);
  m.def(("pipeline_backward_no_cudagraph" + backward).c_str(), apart);
  const std::vector<at::Tag> writing = {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  m.def("record_amax(Tensor(a!)[] amaxes, Tensor largest) -> ()", writing);
  m.def(
      "update_delayed(Tensor(a!)[] scales, Tensor(b!)[] amaxes, Tensor(c!)[] histories, "
      "Tensor[] noted, int fuser, str recipe) -> ()",
      writing);
}

namespace {

void implement(torch::Library& m) {
  m.impl("pipeline_forward", pipeline_forward);
  m.impl("pipeline_backward", pipeline_backward);
  m.impl("pipeline_forward_no_cudagraph", pipeline_forward);
  m.impl("pipeline_backward_no_cudagraph", pipeline_backward);
  m.impl("record_amax", record_amax);
  m.impl("update_delayed", update_delayed);
}

}  // namespace

TORCH_LIBRARY_IMPL(ligature, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(ligature, CUDA, m) { implement(m); }

}  // namespace ligature::compile
