#include "ligature/testing/direct.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/forward_run.h"
#include "ligature/testing/compare.h"

namespace ligature::testing {

DirectRun::DirectRun(std::shared_ptr<const Plan> plan, const Subject& subject, const Data& data,
                     const Needs& needs, uint64_t seed)
    : inputs(subject.ops.size()),
      plan_(std::move(plan)),
      subject_(subject),
      data_(data),
      seed_(seed),
      call_(prepare_call(subject, *plan_->wiring, data, needs).call),
      grads_(plan_gradients(call_, *plan_->wiring, subject.ops.size())),
      contexts_(std::make_shared<Contexts>(subject.ops.size())),
      args_(subject.ops.size()),
      extra_inputs_(subject.ops.size()),
      extra_outputs_(subject.ops.size()) {
  const at::DeviceType device = data.input.device().type();
  const size_t n = subject.ops.size();
  for (size_t i = 0; i < n; ++i) {
    OpArgs& args = args_[i];
    args.params = subject_.params[i];
    args.requires_grad = grads_.flags[i];
    args.training = subject.training[i];
    give_quantizers(*plan_, grads_.flags, i, args, (*contexts_)[i]);
    if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device)) {
      args.autocast_dtype = at::autocast::get_autocast_dtype(device);
    }
    (*contexts_)[i].requires_grad = grads_.flags[i];
  }
}

void DirectRun::forward() {
  at::NoGradGuard no_grad;
  seed_device(data_.input.device(), seed_);
  Value x = call_.input;
  for (const auto& op : subject_.ops) op->pre_fuser_forward(args_.back().requires_grad.op);
  for (const PlanStep& step : plan_->forward) {
    std::vector<OperationContext*> ctxs;
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      for (const Wiring::Input& slot : plan_->wiring->inputs[i]) {
        const bool inside = slot.caller == Wiring::kNone && slot.producer >= step.first;
        extra_inputs_[i].push_back(inside ? Tensor()
                                   : slot.caller != Wiring::kNone
                                       ? call_.extra_inputs[slot.caller]
                                       : extra_outputs_[slot.producer][slot.output]);
      }
      args_[i].extra_inputs = extra_inputs_[i];
      ctxs.push_back(&(*contexts_)[i]);
    }
    inputs[step.first] = ValueMeta::of(x);
    const ArgsList args = at::ArrayRef(args_).slice(step.first, step.count);
    StepScope scope(*step.op);
    if (before_step) before_step(step, x, args);
    FuserForwardResult result = step.op->fuser_forward(ctxs, x, args);
    for (size_t k = 0; k < step.count; ++k) {
      std::vector<Tensor>& outputs = extra_outputs_[step.first + k];
      if (k < result.extra_outputs.size()) outputs = std::move(result.extra_outputs[k]);
      outputs.resize(plan_->wiring->outputs[step.first + k].size());
    }
    complete_contexts(*plan_, step, *contexts_, args_);
    x = std::move(result.output);
  }
  output_dtype_ = x.dtype();
}

namespace {

/// A saved tensor and what it was before backward.
struct SavedCopy {
  std::string what;
  Tensor saved;
  Tensor before;
};

std::vector<SavedCopy> copies_of_saved(const Contexts& contexts, const Subject& subject) {
  std::vector<SavedCopy> out;
  for (size_t op = 0; op < contexts.size(); ++op) {
    for (size_t k = 0; k < contexts[op].num_saved(); ++k) {
      const Value& value = contexts[op].saved_value(k);
      if (!value.defined() || value.is_quantized()) continue;
      out.push_back({"saved tensor " + std::to_string(k) + " of " + op_name(subject, op),
                     value.tensor(), value.tensor().clone()});
    }
  }
  return out;
}

}  // namespace

void DirectRun::backward() {
  at::NoGradGuard no_grad;
  const size_t n = subject_.ops.size();
  if (grads_.first_backward_op >= n) return;
  const auto copies = copies_of_saved(*contexts_, subject_);
  std::vector<std::vector<Tensor>> grad_extra_outputs(n);
  for (size_t op = 0; op < n; ++op) {
    for (const Wiring::Output& slot : plan_->wiring->outputs[op]) {
      const bool given = slot.caller != Wiring::kNone && op >= grads_.first_backward_op;
      grad_extra_outputs[op].emplace_back();
      if (!given) continue;
      const Tensor& output = extra_outputs_[op][grad_extra_outputs[op].size() - 1];
      LIGATURE_CHECK_STATE(output.defined(), "extra output ", grad_extra_outputs[op].size() - 1,
                           " of ", place(plan_->basic_ops, op), " is missing");
      grad_extra_outputs[op].back() =
          data_.grad_outputs[1 + slot.caller].to(output.scalar_type(), false, /*copy=*/true);
    }
  }
  Value dy = data_.grad_outputs[0].to(output_dtype_, false, /*copy=*/true);
  for (size_t s = plan_->backward.size(); s-- > 0;) {
    const PlanStep& step = plan_->backward[s];
    const size_t end = step.first + step.count;
    if (end <= grads_.first_backward_op) break;
    std::vector<OperationContext*> ctxs;
    for (size_t op = step.first; op < end; ++op) {
      check_usable((*contexts_)[op]);
      ctxs.push_back(&(*contexts_)[op]);
      for (size_t j = 0; step.op->is_guest() && j < grad_extra_outputs[op].size(); ++j) {
        Tensor& grad = grad_extra_outputs[op][j];
        const Tensor& output = extra_outputs_[op][j];
        if (!grad.defined() && output.defined()) grad = at::zeros_like(output);
      }
    }
    StepGradients given{
        step, dy, {grad_extra_outputs.begin() + step.first, grad_extra_outputs.begin() + end}, {}};
    {
      StepScope scope(*step.op);
      given.result = step.op->fuser_backward(ctxs, dy, given.grad_extra_outputs);
    }
    FuserBackwardResult& result = given.result;
    result.grad_params.resize(step.count);
    result.grad_extra_inputs.resize(step.count);
    for (size_t k = 0; k < step.count; ++k) {
      const auto& slots = plan_->wiring->inputs[step.first + k];
      for (size_t j = 0; j < slots.size() && j < result.grad_extra_inputs[k].size(); ++j) {
        const Tensor& grad = result.grad_extra_inputs[k][j];
        if (slots[j].caller != Wiring::kNone || !grad.defined()) continue;
        if (slots[j].producer >= step.first) continue;  // inside the step
        Tensor& sum = grad_extra_outputs[slots[j].producer][slots[j].output];
        sum = sum.defined() ? at::add(sum, grad) : grad;
      }
    }
    dy = result.grad_input;
    backward_steps.push_back(std::move(given));
    if (!dy.defined()) break;  // complained of where one is needed
  }
  for (const SavedCopy& copy : copies) {
    if (!same_bits(copy.saved, copy.before)) overwritten.push_back(copy.what);
  }
}

namespace {

void complain(std::vector<std::string>& out, const std::string& what, const Tensor& grad,
              bool needed, bool for_free, at::ScalarType dtype, at::IntArrayRef sizes) {
  if (!grad.defined()) {
    if (needed) out.push_back(what + " is missing");
    return;
  }
  if (!needed) {
    if (!for_free) out.push_back(what + " is given, though none is needed");
    return;
  }
  if (grad.scalar_type() != dtype) {
    out.push_back(what + " has dtype " + dtype_name(grad.scalar_type()) + ", wanted " +
                  dtype_name(dtype));
  }
  if (grad.sizes() != sizes) {
    out.push_back(what + " has shape " + sizes_string(grad.sizes()) + ", wanted " +
                  sizes_string(sizes));
  }
}

}  // namespace

std::vector<std::string> complaints(const DirectRun& run, const Subject& subject,
                                    const std::vector<std::optional<ValueMeta>>& inputs,
                                    Unneeded allowed) {
  std::vector<std::string> out;
  for (const DirectRun::StepGradients& given : run.backward_steps) {
    const size_t first = given.step.first;
    const bool any = allowed == Unneeded::Any;
    const auto passed_on = [&](const Tensor& grad) {
      if (allowed != Unneeded::PassedOn) return any;
      if (!grad.defined() || grad.numel() == 0) return true;
      bool same = share_memory(grad, given.grad_output.dequantized());
      for (const auto& grads : given.grad_extra_outputs) {
        for (const Tensor& t : grads) same = same || share_memory(grad, t);
      }
      return same;
    };
    if (inputs[first]) {
      const Tensor grad =
          given.result.grad_input.defined() ? given.result.grad_input.dequantized() : Tensor();
      complain(
          out,
          first == 0 ? "gradient of input" : "gradient of the input of " + op_name(subject, first),
          grad, run.flags(first).input, passed_on(grad), inputs[first]->dtype,
          inputs[first]->sizes);
    }
    for (size_t k = 0; k < given.step.count; ++k) {
      const size_t op = first + k;
      const std::string name = op_name(subject, op);
      const auto& grad_params = given.result.grad_params[k];
      for (size_t j = 0; j < subject.params[op].size(); ++j) {
        const Tensor& param = subject.params[op][j];
        complain(out, "gradient of " + name + "." + subject.param_names[op][j],
                 j < grad_params.size() ? grad_params[j] : Tensor(), run.flags(op).param(j), any,
                 param.scalar_type(), param.sizes());
      }
      const auto& grad_extras = given.result.grad_extra_inputs[k];
      for (size_t j = 0; j < run.plan().wiring->inputs[op].size(); ++j) {
        const Wiring::Input& slot = run.plan().wiring->inputs[op][j];
        if (slot.caller == Wiring::kNone && slot.producer >= first) continue;
        const Tensor grad = j < grad_extras.size() ? grad_extras[j] : Tensor();
        const Tensor& extra = run.extra_input(op, j);
        if (!extra.defined()) continue;
        complain(out, "gradient of extra input " + std::to_string(j) + " of " + name, grad,
                 run.flags(op).extra_input(j), passed_on(grad), extra.scalar_type(), extra.sizes());
      }
    }
  }
  return out;
}

namespace {

void compare_saved(std::vector<std::string>& out, const std::string& name,
                   const OperationContext& actual, const OperationContext& expected,
                   ContextMatch match, double tolerance) {
  const bool too_many = actual.num_saved() > expected.num_saved();
  if (actual.num_saved() < expected.num_saved() || (too_many && match == ContextMatch::Exact)) {
    out.push_back("context of " + name + " has " + std::to_string(actual.num_saved()) +
                  " saved tensors, wanted " + std::to_string(expected.num_saved()));
    return;
  }
  for (size_t k = 0; k < expected.num_saved(); ++k) {
    const std::string what = "saved tensor " + std::to_string(k) + " of " + name;
    const Value& a = actual.saved_value(k);
    const Value& e = expected.saved_value(k);
    if (!e.defined()) {
      if (a.defined() && match == ContextMatch::Exact) {
        out.push_back(what + " is saved, though backward does not need it");
      }
      continue;
    }
    if (!a.defined()) {
      out.push_back(what + " is missing");
    } else if (a.is_quantized() != e.is_quantized() || a.dtype() != e.dtype()) {
      out.push_back(what + " has dtype " + dtype_name(a.dtype()) + ", wanted " +
                    dtype_name(e.dtype()));
    } else if (const auto off = difference(a.dequantized(), e.dequantized(), tolerance);
               !off.empty()) {
      out.push_back(what + " " + off);
    }
  }
}

void compare_state(std::vector<std::string>& out, const std::string& name,
                   const OperationContext& actual, const OperationContext& expected,
                   ContextMatch match) {
  for (const auto& [key, wanted] : expected.state) {
    const PlainValue* got = actual.state.find(key);
    if (got == nullptr && match == ContextMatch::Enough) continue;
    if (got == nullptr || *got != wanted) {
      out.push_back("context of " + name + " has " + key + " = " +
                    (got == nullptr ? "nothing" : ligature::to_string(*got)) + ", wanted " +
                    ligature::to_string(wanted));
    }
  }
  for (const auto& [key, got] : actual.state) {
    if (match == ContextMatch::Exact && expected.state.find(key) == nullptr) {
      out.push_back("context of " + name + " has " + key + " = " + ligature::to_string(got) +
                    ", wanted nothing");
    }
  }
  if (actual.parameter_references.size() != expected.parameter_references.size()) {
    out.push_back("context of " + name + " has " +
                  std::to_string(actual.parameter_references.size()) +
                  " references to parameters, wanted " +
                  std::to_string(expected.parameter_references.size()));
  }
}

}  // namespace

std::vector<std::string> context_differences(const DirectRun& actual, const DirectRun& expected,
                                             const Subject& subject, ContextMatch match,
                                             double tolerance) {
  std::vector<std::string> out;
  for (size_t op = 0; op < subject.ops.size(); ++op) {
    const std::string name = op_name(subject, op);
    compare_saved(out, name, actual.contexts()[op], expected.contexts()[op], match, tolerance);
    compare_state(out, name, actual.contexts()[op], expected.contexts()[op], match);
  }
  return out;
}

}  // namespace ligature::testing
