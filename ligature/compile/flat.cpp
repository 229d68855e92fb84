#include "ligature/compile/flat.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <sstream>

#include "ligature/compile/delayed.h"
#include "ligature/fuser/backward_run.h"
#include "ligature/fuser/forward_run.h"
#include "ligature/fuser/strict.h"
#include "ligature/readable.h"
#include "ligature/recipes/recipe.h"
#include "ligature/version.h"

namespace ligature::compile {
namespace {

std::vector<int64_t> sizes_of(const Arguments& arguments) {
  std::vector<int64_t> sizes = arguments.input.sizes().vec();
  for (const Tensor& extra : arguments.extra_inputs) {
    sizes.insert(sizes.end(), extra.sizes().begin(), extra.sizes().end());
  }
  return sizes;
}

/// A tensor that is given twice is one tensor under two names: each name is told apart.
void tell_apart(Arguments& arguments) {
  std::vector<Tensor*> all{&arguments.input};
  for (Tensor& t : arguments.params) all.push_back(&t);
  for (Tensor& t : arguments.extra_inputs) all.push_back(&t);
  for (size_t i = 1; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!all[i]->is_same(*all[j])) continue;
      *all[i] = all[i]->detach();
      break;
    }
  }
}

GradPlan plan_traced_gradients(const TracedCall& traced, const Wiring& wiring, size_t num_ops) {
  const at::AutoGradMode gradients(true);
  size_t next = 0;
  const auto stand_in = [&] {
    Tensor t = at::empty({0}, at::TensorOptions(at::kFloat).device(at::kMeta));
    return traced.requires_grad[next++] ? t.requires_grad_(true) : t;
  };
  Call call;
  call.input = stand_in();
  for (size_t i = 0; i < traced.params.size(); ++i) call.params.push_back(stand_in());
  for (size_t i = 0; i < traced.extra_inputs.size(); ++i) call.extra_inputs.push_back(stand_in());
  call.param_offsets = traced.param_offsets;
  return plan_gradients(call, wiring, num_ops);
}

bool is_delayed(const std::shared_ptr<Quantizer>& quantizer) {
  return quantizer != nullptr && quantizer->delayed != nullptr;
}

/// As is_closed(). Inference keeps its weights in low precision; in training a graph's backward
/// takes them over, so that keeping them would be a copy.
bool has_no_state(const Plan& plan, const GradPlan& grads) {
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const PlanStep& step : *steps) {
      if (!step.kind.ours) return false;
    }
  }
  if (plan.options.recipe == nullptr) return true;
  for (const OpQuantizationPtr& own : plan.quantizations) {
    if (own == nullptr) continue;
    if (std::any_of(own->forward.begin(), own->forward.end(), is_delayed) ||
        std::any_of(own->backward.begin(), own->backward.end(), is_delayed)) {
      return false;
    }
  }
  return std::any_of(grads.flags.begin(), grads.flags.end(),
                     [](const GradFlags& flags) { return flags.op; });
}

/// What backward is given, put into the contexts.
class FlatSavedValues final : public SavedValues {
 public:
  FlatSavedValues(const Layout& layout, const std::vector<Tensor>& kept, Contexts& contexts)
      : layout_(layout), kept_(kept), contexts_(contexts) {}

  void unpack(size_t op) override {
    std::vector<Value> values;
    values.reserve(layout_.saved[op].size());
    for (const SavedSlot& slot : layout_.saved[op]) {
      if (slot.shell == nullptr) {
        values.emplace_back(find(slot.parts[0]));
        continue;
      }
      std::vector<Tensor> parts;
      for (const Source& part : slot.parts) parts.push_back(find(part));
      values.emplace_back(slot.shell->with_tensors(std::move(parts)));
    }
    contexts_[op].save_for_backward(std::move(values));
  }

  void used(size_t, size_t) override {}

 private:
  Tensor find(const Source& source) const {
    if (source.kind == Source::Kind::None) return {};
    const auto same = [&](const Source& other) { return other.same_tensor(source); };
    const auto found = std::find_if(layout_.kept.begin(), layout_.kept.end(), same);
    const Tensor& tensor = kept_[found - layout_.kept.begin()];
    if (!source.view) return tensor;
    return tensor.as_strided(source.view->sizes, source.view->strides,
                             tensor.storage_offset() + source.view->offset);
  }

  const Layout& layout_;
  const std::vector<Tensor>& kept_;
  Contexts& contexts_;
};

}  // namespace

std::vector<DelayedScalePtr> forward_delayed(const std::vector<OpQuantizationPtr>& quantizations) {
  std::vector<DelayedScalePtr> out;
  for (const OpQuantizationPtr& own : quantizations) {
    if (own == nullptr) continue;
    for (const auto& quantizer : own->forward) {
      if (quantizer == nullptr || quantizer->delayed == nullptr) continue;
      if (quantizer->delayed->recipe) out.push_back(quantizer->delayed);
    }
  }
  return out;
}

FlatCall::FlatCall(const std::shared_ptr<OperationFuser>& fuser, TracedCall traced)
    : traced_(std::move(traced)) {
  const size_t n = fuser->num_basic_ops();
  LIGATURE_CHECK(traced_.param_offsets.size() == n + 1 && traced_.training.size() == n,
                 "a traced call must describe each of ", n, " basic operations, got ",
                 traced_.param_offsets.size());
  LIGATURE_CHECK(traced_.extra_inputs.size() == fuser->num_extra_inputs(), "the operations ",
                 describe(fuser->basic_ops()), " take ", fuser->num_extra_inputs(),
                 " extra inputs, got ", traced_.extra_inputs.size());
  fuser->prepare();
  grads_ = plan_traced_gradients(traced_, fuser->wiring(), n);
  plan_ = fuser->plan_traced(traced_.input, traced_.autocast, grads_);
  delayed_ = forward_delayed(plan_->quantizations);
  closed_ = plan_->groups.empty() && has_no_state(*plan_, grads_);
  id_ = static_cast<int64_t>(std::hash<std::string>()(key()) & 0x3fffffffffffffffULL);
}

std::string FlatCall::key() const {
  std::ostringstream out;
  out << version() << "|";
  for (const auto& op : plan_->basic_ops) {
    out << op->name() << "(";
    for (const auto& [name, value] : op->options_state()) out << name << "=" << to_string(value);
    out << ")";
    for (size_t j = 0; j < op->num_extra_inputs(); ++j) out << "<" << op->extra_input_channel(j);
    for (size_t j = 0; j < op->num_extra_outputs(); ++j) out << ">" << op->extra_output_channel(j);
  }
  for (const auto* steps : {&plan_->forward, &plan_->backward}) {
    for (const PlanStep& step : *steps) out << "|" << step.op->name() << step.count;
  }
  const auto describe_meta = [&](const ValueMeta& meta) {
    out << "|" << c10::toString(meta.dtype) << meta.sizes.size() << meta.device.str();
  };
  describe_meta(traced_.input);
  for (const ValueMeta& meta : traced_.params) {
    describe_meta(meta);
    out << sizes_string(meta.sizes);
  }
  for (const ValueMeta& meta : traced_.extra_inputs) describe_meta(meta);
  out << "|";
  for (const bool flag : traced_.requires_grad) out << flag;
  out << "|";
  for (const bool flag : traced_.training) out << flag;
  for (const OpKwargs& kwargs : traced_.kwargs) {
    out << "|";
    for (const auto& [name, value] : kwargs.values) out << name << "=" << to_string(value);
  }
  if (traced_.autocast_dtype) out << "|" << c10::toString(*traced_.autocast_dtype);
  if (const RecipePtr& recipe = traced_.autocast.active()) {
    out << "|" << recipe->key() << traced_.autocast.enabled << traced_.own_autocast;
  }
  return out.str();
}

// Graphs are guarded by what the threads of a process have in common; each thread has a
// low-precision context of its own.
void FlatCall::check_thread() const {
  if (traced_.own_autocast) {
    const bool again = is_recomputing() || torch::autograd::get_current_graph_task_id() >= 0;
    LIGATURE_CHECK_STATE(!again || delayed_.empty(),
                         "a checkpoint cannot run a compiled function again that enters autocast "
                         "with delayed scaling inside; enter autocast around the checkpoint");
    return;
  }
  const auto name = [](const RecipePtr& recipe) {
    return recipe == nullptr ? std::string("high precision") : recipe->key();
  };
  const AutocastState& now = autocast_state();
  const RecipePtr& wanted = traced_.autocast.active();
  const RecipePtr& active = now.active();
  const bool same_recipe = wanted == active || (wanted != nullptr && active != nullptr &&
                                                wanted->key() == active->key());
  const bool faster = wanted == nullptr && now.only_where_faster;
  const bool same =
      faster || (same_recipe && (wanted == nullptr || traced_.autocast.enabled == now.enabled));
  LIGATURE_CHECK_STATE(same, "a graph that was compiled for ", name(wanted),
                       " was called in a thread that computes in ", name(active),
                       "; while threads use different recipes at the same time, compiled calls "
                       "must enter autocast inside the compiled function");
}

Call FlatCall::make_call(const Arguments& arguments) const {
  Call call;
  call.input = arguments.input;
  call.params = arguments.params;
  call.param_offsets = traced_.param_offsets;
  call.extra_inputs = arguments.extra_inputs;
  call.kwargs = traced_.kwargs;
  call.training = traced_.training;
  call.autocast_dtype = traced_.autocast_dtype;
  return call;
}

std::shared_ptr<const Layout> FlatCall::run(const Arguments& arguments,
                                            std::vector<Tensor>& results,
                                            std::shared_ptr<const Layout> known, bool dry) const {
  Call call = make_call(arguments);
  call.dry = dry;
  call.keep_weights = !closed_;
  Outcome outcome;
  // An operation that overwrites an extra input is given a copy.
  outcome.overwritten.resize(call.extra_inputs.size());
  for (size_t i = 0; i < plan_->basic_ops.size(); ++i) {
    for (size_t j = 0; j < plan_->wiring->inputs[i].size(); ++j) {
      if (!plan_->basic_ops[i]->writes_extra_input(j)) continue;
      const size_t caller = plan_->wiring->inputs[i][j].caller;
      outcome.overwritten[caller] = call.extra_inputs[caller] = call.extra_inputs[caller].clone();
    }
  }
  auto contexts = std::make_shared<Contexts>(plan_->basic_ops.size());
  ForwardRun forward(*plan_, call, grads_, *contexts);
  const Value y = forward.run(nullptr);
  LIGATURE_CHECK_STATE(!y.is_quantized(), "[", plan_->basic_ops.back()->label(),
                       "] a compiled graph cannot return a quantized tensor; put Quantize before "
                       "an operation that takes one");
  outcome.output = y.tensor();
  outcome.extra_outputs = forward.extra_outputs();
  outcome.extra_outputs.resize(plan_->basic_ops.size());
  outcome.shapes = forward.shapes();
  if (known == nullptr) {
    return make_layout(*plan_, arguments, outcome, contexts, traced_.input.device, results);
  }
  results = collect_results(*known, *plan_, arguments, outcome, *contexts);
  return known;
}

std::vector<Tensor> FlatCall::forward(Arguments arguments, const std::vector<Tensor>& scales,
                                      int64_t structure) {
  check_thread();
  if (StrictScope::active()) StrictScope::check(*plan_);
  if (const RecipePtr& recipe = traced_.autocast.active(); recipe != nullptr && !is_recomputing()) {
    use_recipe(*plan_, recipe, traced_.input.device);
  }
  const auto read = [&](Tensor& t) {
    t = readable(t, [&] { return "an argument of " + describe(plan_->basic_ops); }).contiguous();
  };
  read(arguments.input);
  for (Tensor& t : arguments.params) read(t);
  for (Tensor& t : arguments.extra_inputs) read(t);
  tell_apart(arguments);
  const at::NoGradGuard no_grad;
  DelayedFactors factors(delayed_, scales);
  const std::vector<int64_t> sizes = sizes_of(arguments);
  std::shared_ptr<const Layout> known = find(sizes);
  std::vector<Tensor> results;
  std::shared_ptr<const Layout> made = run(arguments, results, known, false);
  LIGATURE_CHECK_STATE(made->structure == structure, "the operations ", describe(plan_->basic_ops),
                       " save other tensors for an input of ", sizes_string(sizes),
                       " than for those that they were compiled for; compile with dynamic=False, "
                       "or mark the dimension static");
  if (known == nullptr) keep(sizes, std::move(made));
  if (!delayed_.empty()) {
    // The end of an autocast inside the graph updates those that noted something, and no others.
    if (traced_.own_autocast) factors.mark_unused();
    results.push_back(factors.largest());
  }
  // Those that noted something are updated when the thread's outermost context ends.
  if (const auto& session = autocast_state().session; session != nullptr && !traced_.own_autocast) {
    std::lock_guard<std::mutex> lock(mutex_);
    reduce_amax_ = autocast_state().reduce_amax;
    for (const DelayedScalePtr& delayed : factors.met()) {
      bool record = true;
      session->scale_of(delayed, record);
    }
  }
  return results;
}

std::vector<Tensor> FlatCall::run_back(const Layout& layout, std::vector<Tensor> grads,
                                       const std::vector<Tensor>& kept) const {
  const auto contexts = copy_contexts(*layout.contexts);
  FlatSavedValues values(layout, kept, *contexts);
  // A step may write into gradients of extra outputs that it was given.
  for (size_t i = 0; i < plan_->basic_ops.size(); ++i) {
    for (size_t j = 0; j < plan_->wiring->outputs[i].size(); ++j) {
      const size_t caller = plan_->wiring->outputs[i][j].caller;
      if (caller == Wiring::kNone || !plan_->basic_ops[i]->writes_grad_of_extra_output(j)) continue;
      Tensor& grad = grads[1 + caller];
      if (grad.defined()) grad = grad.clone();
    }
  }
  const BackwardNeed need =
      BackwardNeed::of(*plan_, *contexts, traced_.param_offsets, [](size_t) { return true; });
  const Tensor dy = std::move(grads[0]);
  grads.erase(grads.begin());
  BackwardRun run({*plan_, *contexts, traced_.param_offsets, layout.shapes, values}, need);
  return run.run(dy, std::move(grads));
}

std::vector<Tensor> FlatCall::backward(std::vector<Tensor> grads, const std::vector<Tensor>& kept,
                                       at::IntArrayRef sizes, int64_t structure) {
  const std::shared_ptr<const Layout> known = layout(sizes);
  LIGATURE_CHECK_STATE(known->structure == structure && kept.size() == known->kept.size(),
                       "the backward of ", describe(plan_->basic_ops),
                       " was given other tensors than its forward saved");
  const at::NoGradGuard no_grad;
  std::vector<Tensor> plain;
  plain.reserve(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    const auto name = [&] {
      return "tensor " + std::to_string(i) + " that " + describe(plan_->basic_ops) + " saved";
    };
    const Tensor t = readable(kept[i], name);
    const ValueMeta wanted = kept_meta(*known, known->kept[i], sizes);
    LIGATURE_CHECK_STATE(t.scalar_type() == wanted.dtype && t.sizes() == wanted.sizes &&
                             t.device().type() == wanted.device.type(),
                         name(), " must be given back as ", to_string(wanted), " on ",
                         wanted.device.str(), ", got ", to_string(ValueMeta::of(t)), " on ",
                         t.device().str(), "; saved-tensor hooks must not ", "change it");
    plain.push_back(t.contiguous());
  }
  if (!grads[0].defined()) {
    const Source& y = known->outputs[0];
    const ValueMeta meta = y.kind == Source::Kind::Result ? known->results[y.index] : traced_.input;
    at::DimVector shape(meta.sizes.begin(), meta.sizes.end());
    if (y.kind != Source::Kind::Result) shape = sizes.slice(0, traced_.input.sizes.size());
    grads[0] = at::zeros(shape, at::TensorOptions(meta.dtype).device(traced_.input.device));
  }
  std::vector<Tensor> given = grads;
  std::shared_ptr<DelayedSession> session;
  if (plan_->options.recipe != nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    session = backward_session(reduce_amax_);
  }
  std::optional<DelayedSourceScope> delayed;
  if (session != nullptr) delayed.emplace(session.get());
  std::vector<Tensor> all = run_back(*known, std::move(grads), plain);
  std::vector<Tensor> out;
  given.insert(given.end(), plain.begin(), plain.end());
  for (size_t i = 0; i < all.size(); ++i) {
    Tensor& grad = all[i];
    if (!traced_.requires_grad[i] || !grad.defined()) continue;
    LIGATURE_CHECK_STATE(quantized_of(grad) == nullptr,
                         "a compiled graph cannot return a quantized gradient");
    // As autograd does with what a node gives.
    if (grad.scalar_type() != meta_of(i).dtype) grad = grad.to(meta_of(i).dtype);
    const auto shares = [&](const Tensor& other) {
      return other.defined() && other.has_storage() && other.is_alias_of(grad);
    };
    const bool shared = std::any_of(given.begin(), given.end(), shares) ||
                        std::any_of(out.begin(), out.end(), shares);
    out.push_back(shared ? grad.clone(at::MemoryFormat::Contiguous) : grad.contiguous());
  }
  return out;
}

ValueMeta FlatCall::kept_meta(const Layout& layout, const Source& source,
                              at::IntArrayRef sizes) const {
  using Kind = Source::Kind;
  if (source.kind == Kind::Result) {
    ValueMeta meta = layout.results[source.index];
    meta.device = traced_.input.device;  // a layout may be of tensors without memory
    return meta;
  }
  if (source.kind == Kind::Param) return traced_.params[source.index];
  ValueMeta meta = source.kind == Kind::Input ? traced_.input : traced_.extra_inputs[source.index];
  size_t first = 0;
  if (source.kind == Kind::Extra) {
    first = traced_.input.sizes.size();
    for (size_t i = 0; i < source.index; ++i) first += traced_.extra_inputs[i].sizes.size();
  }
  const at::IntArrayRef own = sizes.slice(first, meta.sizes.size());
  meta.sizes.assign(own.begin(), own.end());
  return meta;
}

const ValueMeta& FlatCall::meta_of(size_t i) const {
  if (i == 0) return traced_.input;
  const size_t n = 1 + traced_.params.size();
  return i < n ? traced_.params[i - 1] : traced_.extra_inputs[i - n];
}

}  // namespace ligature::compile
