#include "ligature/recipes/weights.h"

namespace ligature {
namespace {

const std::shared_ptr<Quantizer>& weight_quantizer(const OpQuantization& state, size_t index) {
  static const std::shared_ptr<Quantizer> none;
  const size_t i = 2 * index + 1;
  return i < state.forward.size() ? state.forward[i] : none;
}

}  // namespace

QuantizedPtr quantize_weight(BasicOperation& op, const RecipePtr& recipe, const Tensor& weight,
                             size_t index) {
  const OpQuantizationPtr state = op.quantization(recipe, weight.device());
  const auto quantizer = state != nullptr ? weight_quantizer(*state, index) : nullptr;
  if (quantizer == nullptr) return nullptr;
  const std::string why = quantizer->why_not(weight);
  LIGATURE_CHECK_TYPE(why.empty(), "[", op.label(), "] weight: ", why);
  at::NoGradGuard no_grad;
  const Usage usage = quantizer->usage_for({true, true}, weight.device());
  return has_recipe_state(quantizer) && !weight.is_meta()
             ? quantizer->fit(weight.detach(), usage)
             : quantizer->quantize(weight.detach(), usage);
}

void adopt_weight(const BasicOperation& op, const Tensor& weight, size_t index) {
  const QuantizedPtr quantized = quantized_of(weight);
  if (quantized == nullptr) return;
  const auto states = op.quantizations();
  for (size_t i = states.size(); i-- > 0;) {
    const auto& quantizer = weight_quantizer(*states[i], index);
    if (quantizer == nullptr || quantizer->format_tag() != quantized->format_tag()) continue;
    quantized->set_quantizer(quantizer);
    return;
  }
}

}  // namespace ligature
