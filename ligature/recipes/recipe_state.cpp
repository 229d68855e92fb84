#include "ligature/recipes/recipe_state.h"

#include "ligature/recipes/recipe.h"
#include "ligature/recipes/weights.h"

namespace ligature {
namespace {

using QuantizerList = std::vector<std::shared_ptr<Quantizer>>;

std::vector<DelayedTensors> tensors_of(const std::vector<DelayedScalePtr>& states,
                                       RecipePtr& recipe) {
  std::vector<DelayedTensors> out;
  for (const DelayedScalePtr& state : states) {
    DelayedTensors& tensors = out.emplace_back();
    if (state == nullptr) continue;
    const FollowedRecipe::Pointer followed = state->recipe.load();
    // Graphs may have one of another length.
    const Tensor history = resized_history(state->history, followed->options.amax_history_len);
    tensors = {state->scale.clone(), state->amax.clone(), history.clone()};
    recipe = followed;
  }
  return out;
}

void check_fits(const BasicOperation& op, const QuantizerList& quantizers,
                const std::vector<DelayedTensors>& given) {
  LIGATURE_CHECK(given.size() == quantizers.size(), "[", op.label(), "] has ", quantizers.size(),
                 " quantizers, got recipe state for ", given.size());
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (!given[i].scale.defined() || !has_recipe_state(quantizers[i])) continue;
    const int64_t length = quantizers[i]->delayed->recipe->options.amax_history_len;
    LIGATURE_CHECK(given[i].scale.numel() == 1 && given[i].amax.numel() == 1 &&
                       given[i].history.sizes() == at::IntArrayRef({length}),
                   "[", op.label(), "] recipe state must have a history of ",
                   sizes_string({length}), ", got ", sizes_string(given[i].history.sizes()));
  }
}

void take(const QuantizerList& quantizers, const std::vector<DelayedTensors>& given) {
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (!given[i].scale.defined() || !has_recipe_state(quantizers[i])) continue;
    DelayedScale& to = *quantizers[i]->delayed;
    to.set_scale(given[i].scale.detach().to(to.amax.options()).reshape({1}).clone());
    to.amax.copy_(given[i].amax.detach().reshape({1}));
    to.history.copy_(resized_history(given[i].history.detach(), to.history.size(0)));
  }
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
  const BasicOperation::DelayedStates states = op.delayed_states();
  RecipeState one;
  one.forward = tensors_of(states.forward, one.recipe);
  one.backward = tensors_of(states.backward, one.recipe);
  return one.recipe != nullptr ? std::vector<RecipeState>{one} : std::vector<RecipeState>();
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
