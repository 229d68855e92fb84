#include "ligature/quantization/recipe_state.h"

#include "ligature/quantization/weights.h"

namespace ligature {
namespace {

using QuantizerList = std::vector<std::shared_ptr<Quantizer>>;

std::vector<DelayedTensors> tensors_of(const QuantizerList& quantizers) {
  std::vector<DelayedTensors> out;
  for (const auto& quantizer : quantizers) {
    DelayedTensors& tensors = out.emplace_back();
    if (!has_recipe_state(quantizer)) continue;
    const DelayedScale& delayed = *quantizer->delayed;
    tensors = {delayed.scale.clone(), delayed.amax.clone(), delayed.history.clone()};
  }
  return out;
}

void check_fits(const BasicOperation& op, const QuantizerList& quantizers,
                const std::vector<DelayedTensors>& given) {
  LIGATURE_CHECK(given.size() == quantizers.size(), "[", op.label(), "] has ", quantizers.size(),
                 " quantizers, got recipe state for ", given.size());
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (!given[i].scale.defined() || !has_recipe_state(quantizers[i])) continue;
    const Tensor& history = quantizers[i]->delayed->history;
    LIGATURE_CHECK(given[i].scale.numel() == 1 && given[i].amax.numel() == 1 &&
                       given[i].history.sizes() == history.sizes(),
                   "[", op.label(), "] recipe state must have a history of ",
                   sizes_string(history.sizes()), ", got ", sizes_string(given[i].history.sizes()));
  }
}

void take(const QuantizerList& quantizers, const std::vector<DelayedTensors>& given) {
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (!given[i].scale.defined() || !has_recipe_state(quantizers[i])) continue;
    DelayedScale& to = *quantizers[i]->delayed;
    to.set_scale(given[i].scale.detach().to(to.amax.options()).reshape({1}).clone());
    to.amax.copy_(given[i].amax.detach().reshape({1}));
    to.history.copy_(given[i].history.detach());
  }
}

bool has_any(const std::vector<DelayedTensors>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const DelayedTensors& t) { return t.scale.defined(); });
}

}  // namespace

at::Device RecipeState::device() const {
  for (const auto* tensors : {&forward, &backward}) {
    for (const DelayedTensors& t : *tensors) {
      if (t.scale.defined()) return t.scale.device();
    }
  }
  return at::kCPU;
}

std::vector<RecipeState> recipe_states(const BasicOperation& op) {
  std::vector<RecipeState> out;
  for (const OpQuantizationPtr& state : op.quantizations()) {
    RecipeState one{state->recipe, tensors_of(state->forward), tensors_of(state->backward)};
    if (has_any(one.forward) || has_any(one.backward)) out.push_back(std::move(one));
  }
  return out;
}

void load_recipe_state(BasicOperation& op, const RecipeState& given, at::Device device) {
  const OpQuantizationPtr state = op.quantization(given.recipe, device);
  LIGATURE_CHECK(state != nullptr, "[", op.label(), "] has no quantizers for recipe state");
  check_fits(op, state->forward, given.forward);
  check_fits(op, state->backward, given.backward);
  at::NoGradGuard no_grad;
  take(state->forward, given.forward);
  take(state->backward, given.backward);
}

}  // namespace ligature
