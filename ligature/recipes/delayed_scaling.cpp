// What delayed scaling remembers of a tensor, and how it moves on from step to step.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/max.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

#include "ligature/kernels/backend.h"
#include "ligature/meta.h"
#include "ligature/recipes/recipe.h"

namespace ligature {

int64_t margin_of(const DelayedScaling& recipe) { return recipe.options.margin; }

at::Tensor resized_history(const at::Tensor& history, int64_t length) {
  if (history.size(0) == length) return history;
  at::Tensor out = at::zeros({length}, history.options());
  const int64_t kept = std::min(length, history.size(0));
  out.narrow(0, 0, kept).copy_(history.narrow(0, 0, kept));
  return out;
}

void DelayedScale::follow(const std::shared_ptr<const DelayedScaling>& by, float largest) {
  // Graphs know the history by its memory: for them it stays as long as it is.
  const int64_t length = graph_scale.defined() ? history.size(0) : by->options.amax_history_len;
  if (recipe.is(by.get()) && max_value == largest && history.size(0) == length) return;
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  LIGATURE_CHECK_STATE(
      (max_value == largest && history.size(0) == length) || !kernels::is_captured(history),
      "the history and the format of delayed scaling cannot change while a CUDA graph is captured; "
      "run a step with this recipe before");
  history = resized_history(history, length);
  if (max_value != largest) {
    set_scale(scale * (largest / max_value));
    max_value = largest;
  }
  recipe = by;
}

namespace {

/// Moves the history on by the amax of this step and gives the one that counts, without a dozen
/// calls of torch for a handful of numbers.
float move_on_cpu(DelayedScale& delayed, bool most_recent) {
  float* const history = delayed.history.mutable_data_ptr<float>();
  float* const noted = delayed.amax.mutable_data_ptr<float>();
  const int64_t length = delayed.history.size(0);
  std::copy_backward(history, history + length - 1, history + length);
  history[0] = *noted;
  *noted = 0.0f;
  float largest = history[0];
  for (int64_t i = 1; i < length && !most_recent && !std::isnan(largest); ++i) {
    if (!(history[i] <= largest)) largest = history[i];
  }
  return largest;
}

void set_cpu_scale(DelayedScale& delayed, float amax, int64_t margin) {
  if (amax == 0.0f || !std::isfinite(amax)) return;
  const float scale = delayed.max_value / amax / std::ldexp(1.0f, static_cast<int>(margin));
  if (!std::isfinite(scale) || scale == 0.0f) return;
  delayed.set_scale(at::full({1}, scale, delayed.scale.options()));
}

bool is_plain_cpu(const at::Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() > 0;
}

}  // namespace

void DelayedScaling::update(DelayedScale& delayed) const {
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  at::Tensor& history = delayed.history;
  if (!options.amax_function && !options.scale_function && is_plain_cpu(history) &&
      is_plain_cpu(delayed.amax)) {
    const float amax = move_on_cpu(delayed, options.amax_compute_algo != "max");
    set_cpu_scale(delayed, amax, options.margin);
    return;
  }
  const int64_t length = history.size(0);
  if (length > 1) history.narrow(0, 1, length - 1).copy_(history.narrow(0, 0, length - 1).clone());
  history.narrow(0, 0, 1).copy_(delayed.amax);
  delayed.amax.zero_();
  const at::Tensor amax = options.amax_function ? options.amax_function(history).reshape({1})
                          : options.amax_compute_algo == "max" ? at::max(history).reshape({1})
                                                               : history.narrow(0, 0, 1);
  if (options.scale_function) {
    at::Tensor scale = options.scale_function(amax, delayed.scale, delayed.max_value);
    LIGATURE_CHECK(scale.numel() == 1,
                   "[DelayedScaling] scaling_factor_compute_algo must give one "
                   "scale, got ",
                   sizes_string(scale.sizes()));
    delayed.set_scale(scale.to(at::kFloat).reshape({1}).clone());
    return;
  }
  if (!amax.is_cpu()) {
    // As below, without a look at the values.
    const at::Tensor largest = at::full({1}, delayed.max_value, amax.options()).div_(amax);
    const at::Tensor scale = largest.div_(std::ldexp(1.0f, static_cast<int>(options.margin)));
    const at::Tensor good = at::isfinite(amax).logical_and_(amax.ne(0));
    const at::Tensor usable = good.logical_and_(at::isfinite(scale)).logical_and_(scale.ne(0));
    delayed.set_scale(at::where(usable, scale, delayed.scale));
    return;
  }
  set_cpu_scale(delayed, amax.item<float>(), options.margin);
}

namespace {

struct DelayedBatch {
  int64_t margin;
  bool most_recent;
  at::Device device;
  std::vector<kernels::DelayedState> states;
  std::vector<DelayedScale*> tensors;
};

DelayedBatch& batch_for(std::vector<DelayedBatch>& batches, const DelayedScalingOptions& options,
                        at::Device device) {
  const bool most_recent = options.amax_compute_algo != "max";
  for (DelayedBatch& batch : batches) {
    if (batch.margin == options.margin && batch.most_recent == most_recent &&
        batch.device == device) {
      return batch;
    }
  }
  return batches.emplace_back(DelayedBatch{options.margin, most_recent, device, {}, {}});
}

/// As its recipe's functions update it, where `noted` is not below 0.
void update_one(DelayedScale& tensor, const at::Tensor& noted) {
  if (!noted.defined()) {
    tensor.recipe->update(tensor);
    return;
  }
  DelayedScale updated = tensor;
  updated.amax = tensor.amax.clone();
  updated.history = tensor.history.clone();
  updated.graph_scale.reset();
  tensor.recipe->update(updated);
  const at::Tensor which = noted.ge(0);
  tensor.amax.copy_(at::where(which, updated.amax, tensor.amax));
  tensor.history.copy_(at::where(which, updated.history, tensor.history));
  tensor.set_scale(at::where(which, updated.scale, tensor.scale));
}

}  // namespace

void DelayedScaling::update_all(const std::vector<DelayedScale*>& tensors,
                                const at::Tensor& noted) {
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  std::vector<DelayedBatch> batches;
  for (size_t k = 0; k < tensors.size(); ++k) {
    DelayedScale* tensor = tensors[k];
    const at::Tensor one =
        noted.defined() ? noted.narrow(0, static_cast<int64_t>(k), 1) : at::Tensor();
    const FollowedRecipe::Pointer recipe = tensor->recipe.load();
    const DelayedScalingOptions& options = recipe->options;
    if (!kernels::has_update_delayed(tensor->amax) || options.amax_function ||
        options.scale_function || !tensor->history.is_contiguous()) {
      update_one(*tensor, one);
      continue;
    }
    DelayedBatch& batch = batch_for(batches, options, tensor->amax.device());
    batch.states.push_back({tensor->history, tensor->amax, tensor->scale, tensor->max_value,
                            tensor->graph_scale.defined(), one});
    batch.tensors.push_back(tensor);
  }
  for (const DelayedBatch& batch : batches) {
    const auto scales = kernels::update_delayed(batch.states, batch.margin, batch.most_recent);
    for (size_t i = 0; i < scales.size(); ++i) batch.tensors[i]->set_scale(scales[i]);
  }
}

}  // namespace ligature
