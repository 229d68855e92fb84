#include "ligature/recipes/model_init.h"

#include <atomic>

#include "ligature/kernels/run_context.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/weights.h"

namespace ligature {

struct EnteredModelInit {
  QuantizedModelInitOptions options;
  std::atomic<bool> left{false};
};

namespace {

struct EnteredModelInits : kernels::ThreadPart {
  std::vector<ModelInitHandle> all;
};

/// Of this thread, the innermost last; without those that have been left.
std::vector<ModelInitHandle>& contexts() {
  auto& entered = kernels::thread_part<EnteredModelInits>(&kernels::RunContext::model_init).all;
  while (!entered.empty() && entered.back()->left) entered.pop_back();
  return entered;
}

}  // namespace

const QuantizedModelInitOptions* quantized_model_init() {
  const auto& all = contexts();
  return all.empty() || !all.back()->options.enabled ? nullptr : &all.back()->options;
}

ModelInitHandle enter_quantized_model_init(QuantizedModelInitOptions options) {
  if (options.recipe == nullptr) options.recipe = default_recipe();
  auto context = std::make_shared<EnteredModelInit>();
  context->options = std::move(options);
  contexts().push_back(context);
  return context;
}

void exit_quantized_model_init() {
  LIGATURE_CHECK_STATE(!contexts().empty(),
                       "quantized_model_init was left more often than it was entered");
  contexts().pop_back();
}

void exit_quantized_model_init(const ModelInitHandle& context) {
  if (context != nullptr) context->left = true;
}

void replace_model_init_recipe(const Recipe* before, const RecipePtr& now) {
  for (const ModelInitHandle& context : contexts()) {
    if (context->options.recipe.get() == before) context->options.recipe = now;
  }
}

Tensor new_weight(BasicOperation& op, const Tensor& weight, size_t index) {
  const QuantizedModelInitOptions* wanted = quantized_model_init();
  if (wanted == nullptr) return weight;
  // On the meta device there are no values yet: only the format of those that will come.
  const bool preserve = wanted->preserve_high_precision_init_val && !weight.is_meta();
  const QuantizedPtr quantized = quantize_weight(op, wanted->recipe, weight, index);
  if (quantized == nullptr) return weight;
  Tensor made = wrap_quantized(quantized);
  if (preserve) set_high_precision_init_val(made, weight.detach().to(at::kCPU, false, true));
  return made;
}

}  // namespace ligature
