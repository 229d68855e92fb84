#include "ligature/recipes/recipe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/max.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <sstream>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/meta.h"

namespace ligature {
namespace {

bool is_gradient(const QuantizerRole& role) { return role.tensor_type.starts_with("grad"); }
bool is_weight(const QuantizerRole& role) { return role.tensor_type == "weight"; }

Element element_of(Fp8Format format, const QuantizerRole& role) {
  if (format == Fp8Format::Hybrid) return is_gradient(role) ? Element::E5M2 : Element::E4M3;
  return format == Fp8Format::E5M2 ? Element::E5M2 : Element::E4M3;
}

template <class... Fields>
std::string make_key(const char* name, const Fields&... fields) {
  std::ostringstream out;
  out << name << "(";
  ((out << fields << ","), ...);
  out << ")";
  return out.str();
}

std::string key_of(const SplitAccumulation& split) {
  return make_key("split", split.forward, split.input_grad, split.weight_grad);
}

void check_block_dim(const char* what, int64_t dim) {
  LIGATURE_CHECK(dim == 1 || dim == 2, "[Float8BlockScaling] ", what, " must be 1 or 2, got ", dim);
}

}  // namespace

const char* fp8_format_name(Fp8Format format) {
  LIGATURE_CHECK(format >= Fp8Format::E4M3 && format <= Fp8Format::Hybrid,
                 "fp8_format must be E4M3, E5M2 or Hybrid, got number ", static_cast<int>(format));
  return format == Fp8Format::E4M3 ? "E4M3" : format == Fp8Format::E5M2 ? "E5M2" : "HYBRID";
}

const char* backward_override_name(BackwardOverride override_) {
  return override_ == BackwardOverride::None            ? ""
         : override_ == BackwardOverride::HighPrecision ? "high_precision"
                                                        : "dequantized";
}

BackwardOverride backward_override_from(const std::string& recipe, const std::string& name) {
  for (const auto known :
       {BackwardOverride::None, BackwardOverride::HighPrecision, BackwardOverride::Dequantized}) {
    if (name == backward_override_name(known)) return known;
  }
  LIGATURE_CHECK(false, "[", recipe,
                 "] backward_override must be None, 'high_precision' or 'dequantized', got '", name,
                 "'");
}

void Recipe::override_backward(BackwardOverride given) {
  backward_override_ = given;
  if (given != BackwardOverride::None) key_ += backward_override_name(given);
}

// ---- DelayedScaling

namespace {

// The name of an algorithm that a function stands in for tells nothing apart.
DelayedScalingOptions normalized(DelayedScalingOptions options) {
  if (options.amax_function) options.amax_compute_algo = "function";
  return options;
}

}  // namespace

DelayedScaling::DelayedScaling(DelayedScalingOptions given)
    : options(normalized(std::move(given))) {
  LIGATURE_CHECK(options.amax_history_len > 0,
                 "[DelayedScaling] amax_history_len must be positive, got ",
                 options.amax_history_len);
  LIGATURE_CHECK(options.amax_function || options.amax_compute_algo == "max" ||
                     options.amax_compute_algo == "most_recent",
                 "[DelayedScaling] amax_compute_algo must be 'max', 'most_recent' or a function, "
                 "got '",
                 options.amax_compute_algo, "'");
  plan_key_ = make_key("DelayedScaling", options.margin, fp8_format_name(options.fp8_format),
                       options.amax_history_len, options.amax_compute_algo, options.reduce_amax);
  key_ = plan_key_ + options.functions_key;
}

std::shared_ptr<Quantizer> DelayedScaling::make_quantizer(const QuantizerRole& role,
                                                          at::Device device) const {
  auto made = make_delayed_quantizer(element_of(options.fp8_format, role), options.amax_history_len,
                                     device);
  made->delayed->recipe = std::static_pointer_cast<const DelayedScaling>(shared_from_this());
  return made;
}

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

// ---- Float8CurrentScaling

Float8CurrentScaling::Float8CurrentScaling(Float8CurrentScalingOptions given)
    : options(std::move(given)) {
  key_ = make_key("Float8CurrentScaling", fp8_format_name(options.fp8_format),
                  options.use_power_2_scales, options.amax_epsilon,
                  key_of(options.split_accumulation));
  split_accumulation_ = options.split_accumulation;
  override_backward(options.backward_override);
}

std::shared_ptr<Quantizer> Float8CurrentScaling::make_quantizer(const QuantizerRole& role,
                                                                at::Device) const {
  Format format;
  format.scaling = Scaling::Current;
  format.element = element_of(options.fp8_format, role);
  format.power_of_2_scales = options.use_power_2_scales;
  format.amax_epsilon = options.amax_epsilon;
  return std::make_shared<Quantizer>(format);
}

// ---- Float8BlockScaling

Float8BlockScaling::Float8BlockScaling(Float8BlockScalingOptions given)
    : options(std::move(given)) {
  check_block_dim("x_block_scaling_dim", options.x_block_scaling_dim);
  check_block_dim("w_block_scaling_dim", options.w_block_scaling_dim);
  check_block_dim("grad_block_scaling_dim", options.grad_block_scaling_dim);
  LIGATURE_CHECK(options.x_block_scaling_dim == 1 || options.w_block_scaling_dim == 1 ||
                     options.grad_block_scaling_dim == 1,
                 "[Float8BlockScaling] one operand of a product has blocks of 1x128");
  key_ = make_key("Float8BlockScaling", fp8_format_name(options.fp8_format), options.use_f32_scales,
                  options.x_block_scaling_dim, options.w_block_scaling_dim,
                  options.grad_block_scaling_dim, options.amax_epsilon,
                  key_of(options.split_accumulation));
  split_accumulation_ = options.split_accumulation;
  override_backward(options.backward_override);
}

std::shared_ptr<Quantizer> Float8BlockScaling::make_quantizer(const QuantizerRole& role,
                                                              at::Device) const {
  Format format;
  format.scaling = Scaling::Block;
  format.element = element_of(options.fp8_format, role);
  format.power_of_2_scales = !options.use_f32_scales;
  format.amax_epsilon = options.amax_epsilon;
  const int64_t dim = is_weight(role)     ? options.w_block_scaling_dim
                      : is_gradient(role) ? options.grad_block_scaling_dim
                                          : options.x_block_scaling_dim;
  format.block_2d = dim == 2;
  return std::make_shared<Quantizer>(format);
}

// ---- MXFP8BlockScaling

MXFP8BlockScaling::MXFP8BlockScaling(MXFP8BlockScalingOptions given) : options(std::move(given)) {
  key_ = make_key("MXFP8BlockScaling", fp8_format_name(options.fp8_format),
                  options.enable_2d_quantization);
  override_backward(options.backward_override);
}

std::shared_ptr<Quantizer> MXFP8BlockScaling::make_quantizer(const QuantizerRole& role,
                                                             at::Device) const {
  Format format;
  format.scaling = Scaling::MX;
  format.element = element_of(options.fp8_format, role);
  format.block_2d = options.enable_2d_quantization && is_weight(role);
  return std::make_shared<Quantizer>(format);
}

// ---- NVFP4BlockScaling

namespace {

void check_scope(const char* what, const std::string& where) {
  LIGATURE_CHECK(where == "none" || where == "weights" || where == "activations" || where == "all",
                 "[NVFP4BlockScaling] ", what,
                 " must be 'none', 'weights', 'activations' or 'all', got '", where, "'");
}

bool is_in_scope(const std::string& where, const QuantizerRole& role) {
  if (is_gradient(role)) return false;
  return where == "all" || where == (is_weight(role) ? "weights" : "activations");
}

}  // namespace

NVFP4BlockScaling::NVFP4BlockScaling(NVFP4BlockScalingOptions given) : options(std::move(given)) {
  check_scope("nvfp4_4over6", options.nvfp4_4over6);
  check_scope("nvfp4_4over6_e4m3_use_256", options.nvfp4_4over6_e4m3_use_256);
  LIGATURE_CHECK(options.nvfp4_4over6_err_mode == "MAE" || options.nvfp4_4over6_err_mode == "MSE",
                 "[NVFP4BlockScaling] nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got '",
                 options.nvfp4_4over6_err_mode, "'");
  key_ =
      make_key("NVFP4BlockScaling", options.disable_rht, options.disable_stochastic_rounding,
               options.disable_2d_quantization, options.row_scaled_activation, options.nvfp4_4over6,
               options.nvfp4_4over6_e4m3_use_256, options.nvfp4_4over6_err_mode);
  override_backward(options.backward_override);
}

std::shared_ptr<Quantizer> NVFP4BlockScaling::make_quantizer(const QuantizerRole& role,
                                                             at::Device) const {
  Format format;
  format.scaling = Scaling::NV;
  format.element = Element::E2M1;
  const bool weight = is_weight(role);
  const bool gradient = is_gradient(role);
  format.block_2d = weight && !options.disable_2d_quantization;
  format.hadamard = !weight && !options.disable_rht;
  format.stochastic_rounding = gradient && !options.disable_stochastic_rounding;
  format.row_scaled = !weight && !gradient && options.row_scaled_activation;
  if (is_in_scope(options.nvfp4_4over6, role)) {
    format.four_over_six = options.nvfp4_4over6_err_mode == "MAE" ? FourOverSix::MeanAbsolute
                                                                  : FourOverSix::MeanSquare;
    format.scales_to_448 = !is_in_scope(options.nvfp4_4over6_e4m3_use_256, role);
  }
  return std::make_shared<Quantizer>(format);
}

// ---- CustomRecipe

CustomRecipe::CustomRecipe(Factory factory, const std::string& factory_key,
                           BackwardOverride backward_override)
    : factory_(std::move(factory)) {
  static std::atomic<uint64_t> made{0};
  LIGATURE_CHECK(factory_ != nullptr, "[CustomRecipe] qfactory must be a function, got none");
  key_ = make_key("CustomRecipe", factory_key.empty() ? std::to_string(++made) : factory_key);
  override_backward(backward_override);
}

std::shared_ptr<Quantizer> CustomRecipe::make_quantizer(const QuantizerRole& role,
                                                        at::Device) const {
  return factory_(role);
}

}  // namespace ligature
