// What an operation has of recipes: its quantizers and their state, by recipe, and what becomes of
// quantized parameters when it is copied or moved.
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "ligature/operation.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/recipe.h"
#include "ligature/recipes/recipe_state.h"
#include "ligature/recipes/weights.h"

namespace ligature {

// ---- copies and moves

namespace {

Tensor copy_of(const Tensor& parameter, const std::optional<torch::Device>& device) {
  const auto copy = [&](const Tensor& t) {
    return device ? t.to(*device, /*non_blocking=*/false, /*copy=*/true) : t.clone();
  };
  const QuantizedPtr quantized = quantized_of(parameter);
  if (quantized == nullptr) return copy(parameter.detach());
  const QuantizedPtr made = quantized->map(copy);
  made->set_quantizer(deep_copy(*quantizer_for(quantized)));
  Tensor wrapper = wrap_quantized(made);
  set_high_precision_init_val(wrapper, high_precision_init_val(parameter));
  return wrapper;
}

}  // namespace

void FusibleOperation::copy_parameters(const FusibleOperation& from, FusibleOperation& to,
                                       const std::optional<torch::Device>& device) {
  torch::NoGradGuard no_grad;
  for (const auto& item : from.parameters_) {
    to.parameters_[item.key()] =
        copy_of(item.value(), device).set_requires_grad(item.value().requires_grad());
  }
  const BasicOperation* source = const_cast<FusibleOperation&>(from).recipe_state_owner();
  BasicOperation* part = to.recipe_state_owner();
  if (source == nullptr || part == nullptr) return;
  for (const RecipeState& state : recipe_states(*source)) {
    load_recipe_state(*part, state, device.value_or(state.device()));
  }
  size_t weights = 0;
  for (const auto& item : to.parameters_) {
    if (quantized_of(item.value()) != nullptr) adopt_weight(*part, item.value(), weights++);
  }
}

void FusibleOperation::dequantize_for(torch::Dtype dtype) {
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) return;
  torch::NoGradGuard no_grad;
  for (auto& item : parameters_) {
    const QuantizedPtr quantized = quantized_of(item.value());
    if (quantized == nullptr) continue;
    Tensor plain = quantized->dequantize().to(dtype);
    if (item.value().requires_grad()) plain.set_requires_grad(true);
    const Tensor& grad = item.value().grad();
    if (grad.defined()) plain.mutable_grad() = grad.to(dtype);
    item.value() = plain;
  }
}

void FusibleOperation::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  dequantize_for(dtype);
  torch::nn::Module::to(device, dtype, non_blocking);
}

void FusibleOperation::to(torch::Dtype dtype, bool non_blocking) {
  dequantize_for(dtype);
  torch::nn::Module::to(dtype, non_blocking);
}

// ---- quantizers by recipe

namespace {

constexpr size_t kMostRecipes = 8;  // that one operation remembers
constexpr size_t kMostWeights = 2;  // formats in which it keeps its weight, of those used last

std::vector<std::shared_ptr<Quantizer>> make_quantizers(const Recipe& recipe,
                                                        const std::vector<QuantizerRole>& roles,
                                                        at::Device device) {
  std::vector<std::shared_ptr<Quantizer>> out;
  for (const QuantizerRole& role : roles) out.push_back(recipe.make_quantizer(role, device));
  return out;
}

/// `key`: of the first of them.
void share(const std::vector<std::shared_ptr<Quantizer>>& quantizers,
           std::vector<DelayedScalePtr>& states, uint64_t key) {
  states.resize(std::max(states.size(), quantizers.size()));
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (!has_recipe_state(quantizers[i])) continue;
    if (states[i] == nullptr) states[i] = quantizers[i]->delayed;
    quantizers[i]->delayed = states[i];
    if (states[i]->key == 0) know_delayed_scale(states[i], key + i);
  }
}

/// Quantizers of forward alternate: of an input, of a weight.
size_t count_weights(const std::vector<QuantizerRole>& forward) {
  return std::max<size_t>(1, forward.size() / 2);
}

/// Do both quantize all weights to the same bits, also in later steps?
bool quantize_weights_alike(const OpQuantization& a, const OpQuantization& b) {
  const size_t count = std::max(a.forward.size(), b.forward.size());
  for (size_t i = 1; i < std::max<size_t>(count, 2); i += 2) {
    const Quantizer* of_a = a.forward_quantizer(i);
    const Quantizer* of_b = b.forward_quantizer(i);
    if (of_a == nullptr || of_b == nullptr || !of_a->is_native() || !of_b->is_native() ||
        of_a->format_tag() != of_b->format_tag() || of_a->delayed != of_b->delayed ||
        of_a->reduce_amax || of_b->reduce_amax) {
      return false;
    }
  }
  return true;
}

/// What is kept of the weights for the recipes that were not used lately, or were forgotten.
std::vector<std::shared_ptr<WeightCaches>> weights_to_drop(
    const std::vector<OpQuantizationPtr>& known, const OpQuantizationPtr& forgotten = nullptr) {
  std::vector<std::shared_ptr<WeightCaches>> kept, out;
  const auto sort = [&](const std::shared_ptr<WeightCaches>& one, bool drop) {
    for (const auto* list : {&kept, &out}) {
      if (std::find(list->begin(), list->end(), one) != list->end()) return;
    }
    (drop ? out : kept).push_back(one);
  };
  for (size_t i = known.size(); i-- > 0;) sort(known[i]->weights, kept.size() == kMostWeights);
  if (forgotten != nullptr) sort(forgotten->weights, true);
  return out;
}

}  // namespace

OpQuantizationPtr BasicOperation::find_known(const RecipePtr& recipe) const {
  for (size_t i = quantizations_.size(); i-- > 0;) {
    if (quantizations_[i]->recipe->plan_key() == recipe->plan_key()) return quantizations_[i];
  }
  return nullptr;
}

uint64_t BasicOperation::next_serial() {
  static std::atomic<uint64_t> count{1};
  return count.fetch_add(1, std::memory_order_relaxed);
}

void BasicOperation::share_state(OpQuantization& made) {
  if (made.is_delayed) {
    share(made.forward, delayed_states_.forward, serial_ << 20);
    share(made.backward, delayed_states_.backward, serial_ << 20 | 1 << 19);
  }
  for (const OpQuantizationPtr& other : quantizations_) {
    if (quantize_weights_alike(*other, made)) made.weights = other->weights;
  }
}

OpQuantizationPtr BasicOperation::find_quantization(const RecipePtr& recipe, at::Device device) {
  if (recipe == nullptr) return nullptr;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    if (auto found = find_known(recipe)) return found;
  }
  // Roles and quantizers may come from a host language: nothing is locked meanwhile.
  const auto forward = forward_quantizer_roles();
  const auto backward = backward_quantizer_roles();
  if (forward.empty() && backward.empty()) return nullptr;
  auto made = std::make_shared<OpQuantization>();
  made->recipe = recipe;
  made->is_delayed = std::dynamic_pointer_cast<const DelayedScaling>(recipe) != nullptr;
  made->forward = make_quantizers(*recipe, forward, device);
  made->weights = std::make_shared<WeightCaches>(count_weights(forward));
  if (recipe->backward_override() == BackwardOverride::None) {
    made->backward = make_quantizers(*recipe, backward, device);
  } else {
    made->backward.resize(backward.size());
  }
  share_amax(*made);
  OpQuantizationPtr forgotten;  // destroyed after the lock: it may call a host language
  std::vector<std::shared_ptr<WeightCaches>> dropped;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    if (auto found = find_known(recipe)) return found;
    share_state(*made);
    if (quantizations_.size() == kMostRecipes) {
      forgotten = quantizations_.front();
      quantizations_.erase(quantizations_.begin());
    }
    quantizations_.insert(quantizations_.begin(), made);
    dropped = weights_to_drop(quantizations_, forgotten);
  }
  for (const auto& weights : dropped) weights->clear();
  return made;
}

OpQuantizationPtr BasicOperation::quantization(const RecipePtr& recipe, at::Device device) {
  OpQuantizationPtr found = find_quantization(recipe, device);
  if (found == nullptr) return nullptr;
  std::vector<std::shared_ptr<WeightCaches>> dropped;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    const auto place = std::find(quantizations_.begin(), quantizations_.end(), found);
    if (place != quantizations_.end()) std::rotate(place, place + 1, quantizations_.end());
    last_used_ = found.get();
    found->follow(recipe);
    dropped = weights_to_drop(quantizations_);
  }
  for (const auto& weights : dropped) weights->clear();
  return found;
}

BasicOperation::DelayedStates BasicOperation::delayed_states() const {
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  return delayed_states_;
}

std::vector<OpQuantizationPtr> BasicOperation::quantizations() const {
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  return quantizations_;
}

OpQuantizationPtr BasicOperation::quantization() const {
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  return quantizations_.empty() ? nullptr : quantizations_.back();
}

void BasicOperation::reset_recipe_state(const RecipePtr& recipe, at::Device device) {
  const OpQuantizationPtr state = quantization(recipe, device);
  if (state == nullptr) return;
  for (auto* quantizers : {&state->forward, &state->backward}) {
    for (const auto& quantizer : *quantizers) {
      if (quantizer == nullptr || quantizer->delayed == nullptr) continue;
      DelayedScale& delayed = *quantizer->delayed;
      delayed.set_scale(at::ones_like(delayed.scale));
      delayed.amax.zero_();
      delayed.history.zero_();
    }
  }
  state->weights->clear();
}

}  // namespace ligature
