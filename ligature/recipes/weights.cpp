#include "ligature/recipes/weights.h"

namespace ligature {
namespace {

const std::shared_ptr<Quantizer>& weight_quantizer(const OpQuantization& state) {
  static const std::shared_ptr<Quantizer> none;
  return state.forward.size() > 1 ? state.forward[1] : none;
}

}  // namespace

QuantizedPtr quantize_weight(BasicOperation& op, const RecipePtr& recipe, const Tensor& weight) {
  const OpQuantizationPtr state = op.quantization(recipe, weight.device());
  const auto quantizer = state != nullptr ? weight_quantizer(*state) : nullptr;
  if (quantizer == nullptr) return nullptr;
  const std::string why = quantizer->why_not(weight);
  LIGATURE_CHECK_TYPE(why.empty(), "[", op.label(), "] weight: ", why);
  at::NoGradGuard no_grad;
  const Usage usage = quantizer->usage_for({true, true}, weight.device());
  return has_recipe_state(quantizer) && !weight.is_meta()
             ? quantizer->fit(weight.detach(), usage)
             : quantizer->quantize(weight.detach(), usage);
}

void adopt_weight(const BasicOperation& op, const Tensor& weight) {
  const QuantizedPtr quantized = quantized_of(weight);
  if (quantized == nullptr) return;
  const auto states = op.quantizations();
  for (size_t i = states.size(); i-- > 0;) {
    const auto& quantizer = weight_quantizer(*states[i]);
    if (quantizer == nullptr || quantizer->format_tag() != quantized->format_tag()) continue;
    quantized->set_quantizer(quantizer);
    return;
  }
}

}  // namespace ligature
