// The context in which operations are built with weights in low precision.
#pragma once

#include "ligature/operation.h"

namespace ligature {

struct QuantizedModelInitOptions {
  RecipePtr recipe = nullptr;  ///< by default DelayedScaling
  bool enabled = true;         ///< false builds in high precision, also inside another context
  /// Keep the initial values on the CPU, for an optimizer with weights of its own:
  /// high_precision_init_val(weight) gives them, clear_high_precision_init_val(weight) drops them.
  bool preserve_high_precision_init_val = false;
};

/// Of this thread: the innermost context; null outside of any and where it is not enabled.
const QuantizedModelInitOptions* quantized_model_init();
/// A context that was entered: by it the context is left, in whichever thread.
struct EnteredModelInit;
using ModelInitHandle = std::shared_ptr<EnteredModelInit>;

ModelInitHandle enter_quantized_model_init(QuantizedModelInitOptions options);
/// Leaves the innermost context of this thread.
void exit_quantized_model_init();
/// Leaves this context; it ends in the thread that entered it, when all inside it have been left.
void exit_quantized_model_init(const ModelInitHandle& context);
/// A recipe was changed while contexts may use it: those of this thread take on the new one.
void replace_model_init_recipe(const Recipe* before, const RecipePtr& now);

/// Linear layers built in its scope keep their weights in the recipe's format only. Biases and
/// norms stay in high precision. Scopes nest, and each thread has its own. Example:
/// ```
/// QuantizedModelInit lean({.recipe = std::make_shared<MXFP8BlockScaling>()});
/// Linear linear(256, 128);
/// ```
class QuantizedModelInit {
 public:
  explicit QuantizedModelInit(QuantizedModelInitOptions options = {})
      : context_(enter_quantized_model_init(std::move(options))) {}
  ~QuantizedModelInit() { exit_quantized_model_init(context_); }
  QuantizedModelInit(const QuantizedModelInit&) = delete;
  QuantizedModelInit& operator=(const QuantizedModelInit&) = delete;

 private:
  ModelInitHandle context_;
};

/// A new weight of `op` in low precision, where this thread asks for it and the recipe does not
/// leave it in high precision; otherwise as it is. `index`: which of the operation's weights.
Tensor new_weight(BasicOperation& op, const Tensor& weight, size_t index = 0);

}  // namespace ligature
