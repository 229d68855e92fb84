// What a traced call says of itself before it computes: layouts and gradients for given sizes,
// found by running its plan on tensors without memory.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "ligature/compile/flat.h"

namespace ligature::compile {
namespace {

constexpr size_t kMaxLayouts = 64;

/// Nothing is computed while it lives: tensors without memory stand for those of a device.
struct DryRun {
  explicit DryRun(at::DeviceType device) : log(device) {}

  const c10::InferenceMode no_inference{false};
  const at::NoGradGuard no_grad;
  const kernels::KernelLog log;
};

}  // namespace

Arguments FlatCall::without_memory(at::IntArrayRef sizes) const {
  size_t next = 0;
  const auto take = [&](const ValueMeta& meta) {
    const at::IntArrayRef shape = sizes.slice(next, meta.sizes.size());
    next += meta.sizes.size();
    return at::empty(shape, at::TensorOptions(meta.dtype).device(at::kMeta));
  };
  Arguments arguments;
  arguments.input = take(traced_.input);
  for (const ValueMeta& meta : traced_.extra_inputs) arguments.extra_inputs.push_back(take(meta));
  for (const ValueMeta& meta : traced_.params) {
    arguments.params.push_back(
        at::empty(meta.sizes, at::TensorOptions(meta.dtype).device(at::kMeta)));
  }
  return arguments;
}

std::shared_ptr<const Layout> FlatCall::layout(at::IntArrayRef sizes) {
  if (auto known = find(sizes)) return known;
  const DryRun dry(traced_.input.device.type());
  std::vector<Tensor> results;
  auto made = run(without_memory(sizes), results, nullptr, true);
  keep(sizes, made);
  return made;
}

std::vector<bool> FlatCall::differentiable() const {
  std::vector<bool> out(1 + plan_->wiring->caller_outputs.size());
  out[0] = grads_.first_backward_op < plan_->basic_ops.size();
  for (size_t i = 0; i < plan_->basic_ops.size(); ++i) {
    for (const Wiring::Output& output : plan_->wiring->outputs[i]) {
      if (output.caller != Wiring::kNone) out[1 + output.caller] = i >= grads_.first_backward_op;
    }
  }
  return out;
}

std::vector<Tensor> FlatCall::run_back_dry(at::IntArrayRef sizes, const std::vector<bool>& given) {
  const std::shared_ptr<const Layout> known = layout(sizes);
  const Arguments arguments = without_memory(sizes);
  const auto shape_of = [&](const Source& source) -> Tensor {
    if (source.kind == Source::Kind::Input) return arguments.input;
    if (source.kind == Source::Kind::Param) return arguments.params[source.index];
    if (source.kind == Source::Kind::Extra) return arguments.extra_inputs[source.index];
    const ValueMeta& meta = known->results[source.index];
    return at::empty(meta.sizes, at::TensorOptions(meta.dtype).device(at::kMeta));
  };
  std::vector<Tensor> grads;
  for (size_t k = 0; k < known->outputs.size(); ++k) {
    const bool there = k == 0 || given[k];
    grads.push_back(there ? at::empty_like(shape_of(known->outputs[k])) : Tensor());
  }
  std::vector<Tensor> kept;
  for (const Source& source : known->kept) kept.push_back(shape_of(source));
  return run_back(*known, std::move(grads), kept);
}

std::vector<bool> FlatCall::gradients(at::IntArrayRef sizes, const std::vector<bool>& given) {
  const DryRun dry(traced_.input.device.type());
  std::vector<bool> out;
  const std::vector<Tensor> all = run_back_dry(sizes, given);
  for (size_t i = 0; i < all.size(); ++i) {
    out.push_back(traced_.requires_grad[i] && all[i].defined());
  }
  return out;
}

int64_t FlatCall::forward_flops(at::IntArrayRef sizes) {
  const DryRun dry(traced_.input.device.type());
  std::vector<Tensor> results;
  run(without_memory(sizes), results, nullptr, true);
  return dry.log.flops();
}

int64_t FlatCall::backward_flops(at::IntArrayRef sizes, const std::vector<bool>& given) {
  layout(sizes);
  const DryRun dry(traced_.input.device.type());
  run_back_dry(sizes, given);
  return dry.log.flops();
}

std::shared_ptr<const Layout> FlatCall::layout_of(int64_t structure) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = layouts_.size(); i-- > 0;) {
    if (layouts_[i].layout->structure == structure) return layouts_[i].layout;
  }
  LIGATURE_CHECK_STATE(false, "a graph calls ", describe(plan_->basic_ops),
                       " in a way that was never traced in this process");
}

std::shared_ptr<const Layout> FlatCall::find(at::IntArrayRef sizes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = layouts_.size(); i-- > 0;) {
    if (at::IntArrayRef(layouts_[i].sizes) == sizes) return layouts_[i].layout;
  }
  return nullptr;
}

void FlatCall::keep(at::IntArrayRef sizes, std::shared_ptr<const Layout> layout) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (layouts_.size() >= kMaxLayouts) layouts_.erase(layouts_.begin());
  layouts_.push_back({sizes.vec(), std::move(layout)});
}

}  // namespace ligature::compile
