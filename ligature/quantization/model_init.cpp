#include "ligature/quantization/model_init.h"

#include "ligature/quantization/autocast.h"
#include "ligature/quantization/weights.h"

namespace ligature {
namespace {

thread_local std::vector<QuantizedModelInitOptions> contexts;

}  // namespace

const QuantizedModelInitOptions* quantized_model_init() {
  return contexts.empty() || !contexts.back().enabled ? nullptr : &contexts.back();
}

void enter_quantized_model_init(QuantizedModelInitOptions options) {
  if (options.recipe == nullptr) options.recipe = default_recipe();
  contexts.push_back(std::move(options));
}

void exit_quantized_model_init() {
  LIGATURE_CHECK_STATE(!contexts.empty(),
                       "quantized_model_init was left more often than it was entered");
  contexts.pop_back();
}

void replace_model_init_recipe(const Recipe* before, const RecipePtr& now) {
  for (QuantizedModelInitOptions& context : contexts) {
    if (context.recipe.get() == before) context.recipe = now;
  }
}

Tensor new_weight(BasicOperation& op, const Tensor& weight) {
  const QuantizedModelInitOptions* wanted = quantized_model_init();
  if (wanted == nullptr) return weight;
  TORCH_CHECK_NOT_IMPLEMENTED(!weight.is_meta(), "[", op.label(),
                              "] a weight without memory (on the meta device) cannot be quantized");
  const bool preserve = wanted->preserve_high_precision_init_val;
  const QuantizedPtr quantized = quantize_weight(op, wanted->recipe, weight);
  if (quantized == nullptr) return weight;
  Tensor made = wrap_quantized(quantized);
  if (preserve) set_high_precision_init_val(made, weight.detach().to(at::kCPU, false, true));
  return made;
}

}  // namespace ligature
