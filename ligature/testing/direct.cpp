#include "ligature/testing/direct.h"

#include <c10/core/GradMode.h>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/forward_run.h"
#include "ligature/readable.h"
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
      extra_inputs_(subject.ops.size()) {
  call_.autocast_dtype = autocast_dtype(data.input.device());
  call_.observer = {std::shared_ptr<void>(), this};  // it lives as long as the call
}

void DirectRun::forward() {
  at::NoGradGuard no_grad;
  seed_device(data_.input.device(), seed_);
  ForwardRun run(*plan_, call_, grads_, *contexts_);
  output_dtype_ = run.run(nullptr).dtype();
  extra_outputs_ = run.extra_outputs();
  extra_outputs_.resize(subject_.ops.size());
  shapes_ = run.shapes();
}

const kernels::KernelLog* DirectRun::before_forward(size_t index, const Value& input,
                                                    ArgsList args) {
  const PlanStep& step = plan_->forward[index];
  inputs[step.first] = ValueMeta::of(input);
  for (size_t k = 0; k < step.count; ++k) {
    extra_inputs_[step.first + k] = args[k].extra_inputs.vec();
  }
  if (before_step) before_step(step, input, args);
  return nullptr;
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

/// What forward left in the contexts, given to every step of backward.
class SavedByForward final : public SavedValues {
 public:
  explicit SavedByForward(Contexts& contexts) : contexts_(contexts) {
    for (const OperationContext& ctx : contexts) saved_.push_back(ctx.saved());
  }
  void unpack(size_t op) override { contexts_[op].save_for_backward(saved_[op]); }
  void used(size_t, size_t) override {}

 private:
  Contexts& contexts_;
  std::vector<std::vector<Value>> saved_;
};

}  // namespace

void DirectRun::backward() {
  at::NoGradGuard no_grad;
  const size_t n = subject_.ops.size();
  if (grads_.first_backward_op >= n) return;
  const auto copies = copies_of_saved(*contexts_, subject_);
  std::vector<Tensor> caller_grads(plan_->wiring->caller_outputs.size());
  for (size_t op = grads_.first_backward_op; op < n; ++op) {
    for (size_t j = 0; j < plan_->wiring->outputs[op].size(); ++j) {
      const size_t caller = plan_->wiring->outputs[op][j].caller;
      if (caller == Wiring::kNone) continue;
      const Tensor& output = extra_outputs_[op][j];
      LIGATURE_CHECK_STATE(output.defined(), "extra output ", j, " of ",
                           place(plan_->basic_ops, op), " is missing");
      caller_grads[caller] =
          data_.grad_outputs[1 + caller].to(output.scalar_type(), false, /*copy=*/true);
    }
  }
  const BackwardNeed need =
      BackwardNeed::of(*plan_, *contexts_, call_.param_offsets, [](size_t) { return true; });
  SavedByForward saved(*contexts_);
  BackwardRun run({*plan_, *contexts_, call_.param_offsets, shapes_, saved, this}, need);
  run.run(data_.grad_outputs[0].to(output_dtype_, false, /*copy=*/true), std::move(caller_grads));
  for (const SavedCopy& copy : copies) {
    if (!same_bits(copy.saved, copy.before)) overwritten.push_back(copy.what);
  }
}

const kernels::KernelLog* DirectRun::before_backward(size_t index, const Value& grad_output,
                                                     GradList grad_extra_outputs) {
  backward_steps.push_back({plan_->backward[index], grad_output, grad_extra_outputs.vec(), {}});
  return nullptr;
}

void DirectRun::after_backward(const PlanStep& step, size_t, const FuserBackwardResult& result) {
  FuserBackwardResult& kept = backward_steps.back().result;
  kept = result;
  kept.grad_params.resize(step.count);
  kept.grad_extra_inputs.resize(step.count);
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
        const bool needed = run.flags(op).extra_input(j) && at::isFloatingType(extra.scalar_type());
        complain(out, "gradient of extra input " + std::to_string(j) + " of " + name, grad, needed,
                 passed_on(grad), extra.scalar_type(), extra.sizes());
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
  const PlainState wanted_state = expected.state.all();
  const PlainState got_state = actual.state.all();
  for (const auto& [key, wanted] : wanted_state) {
    const PlainValue* got = got_state.find(key);
    if (got == nullptr && match == ContextMatch::Enough) continue;
    if (got == nullptr || *got != wanted) {
      out.push_back("context of " + name + " has " + key + " = " +
                    (got == nullptr ? "nothing" : ligature::to_string(*got)) + ", wanted " +
                    ligature::to_string(wanted));
    }
  }
  for (const auto& [key, got] : got_state) {
    if (match == ContextMatch::Exact && wanted_state.find(key) == nullptr) {
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
