// Recipes: which tensor is computed with in which format. A recipe is a constant; what changes from
// step to step belongs to the operations.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ligature/base/bound.h"
#include "ligature/options.h"
#include "ligature/quantized/quantizer.h"

namespace ligature {

/// Which FP8 type: one for everything, or E4M3 in forward and E5M2 for gradients.
enum class Fp8Format { E4M3, E5M2, Hybrid };
/// "E4M3", "E5M2", "HYBRID"; so in options as data.
const char* fp8_format_name(Fp8Format format);
PlainValue to_plain(Fp8Format format);
void from_plain(const std::string& what, const PlainValue& plain, Fp8Format& format);

/// Which GEMMs of a linear layer move their sums to float32 now and then, where they are a device's
/// own GEMMs of FP8 with one scale per tensor. Others have nothing to choose.
struct SplitAccumulation {
  bool forward = false, input_grad = true, weight_grad = true;

  template <class F>
  void fields(F&& f) {
    f("fp8_gemm_fprop", forward);
    f("fp8_gemm_dgrad", input_grad);
    f("fp8_gemm_wgrad", weight_grad);
  }
};

/// What the GEMMs of a linear's backward compute with. Unless it is None, gradients are not
/// quantized, and backward runs in the compute dtype.
enum class BackwardOverride {
  None,           ///< operands as the recipe quantizes them
  HighPrecision,  ///< the input and the weight as they were before they were quantized
  Dequantized,    ///< what the forward GEMM computed with, dequantized
};
/// None as "", "high_precision", "dequantized".
const char* backward_override_name(BackwardOverride override_);
/// None as no value, the others by their names.
PlainValue to_plain(BackwardOverride override_);
void from_plain(const std::string& what, const PlainValue& plain, BackwardOverride& override_);

/// How FP8 tensors of one role are quantized, where that is not as the recipe's other fields say.
struct Fp8RoleParams {
  std::optional<bool> power_2_scale;
  std::optional<float> amax_epsilon;

  template <class F>
  void fields(F&& f) {
    f("power_2_scale", power_2_scale);
    f("amax_epsilon", amax_epsilon);
  }
  void apply_to(Format& format) const;
};

/// The same for NVFP4.
struct Fp4RoleParams {
  std::optional<bool> random_hadamard_transform, stochastic_rounding, fp4_2d_quantization;

  template <class F>
  void fields(F&& f) {
    f("random_hadamard_transform", random_hadamard_transform);
    f("stochastic_rounding", stochastic_rounding);
    f("fp4_2d_quantization", fp4_2d_quantization);
  }
  void apply_to(Format& format) const;
};

class Recipe : public std::enable_shared_from_this<Recipe> {
 public:
  virtual ~Recipe() = default;
  /// "DelayedScaling"
  virtual std::string name() const = 0;
  /// Its options as data.
  virtual PlainState options_state() const { return {}; }
  /// Equal keys mean equal recipes: the type and every field, in words.
  const std::string& key() const { return key_; }
  /// Equal ones mean equal plans and equal formats: all but functions that choose scales.
  const std::string& plan_key() const { return plan_key_.empty() ? key_ : plan_key_; }
  /// Null: this tensor stays in high precision.
  virtual std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                                    at::Device device) const = 0;
  const SplitAccumulation& split_accumulation() const { return split_accumulation_; }
  BackwardOverride backward_override() const { return backward_override_; }
  /// Of the orientations that an operation computes with, those that it is given in low precision.
  Usage quantized_usage(Usage wanted) const {
    return {wanted.rowwise, wanted.columnwise && backward_override_ == BackwardOverride::None};
  }
  /// Must an operation that uses its input like this in forward and backward be given it in high
  /// precision?
  bool takes_high_precision(Usage wanted) const {
    return wanted.columnwise && backward_override_ == BackwardOverride::HighPrecision;
  }
  /// What stands for it in a language binding.
  BoundPtr bound;

 protected:
  /// "Name(field=value, ...)"
  static std::string key_from(const std::string& name, const PlainState& fields);
  /// Refuses formats that there are not, for a recipe whose quantizers have no state.
  void check_formats() const;

  std::string key_;
  std::string plan_key_;  ///< empty: the same
  SplitAccumulation split_accumulation_;
  BackwardOverride backward_override_ = BackwardOverride::None;
};
using RecipePtr = std::shared_ptr<const Recipe>;

/// Base of a recipe with options, a struct that lists its fields as those of operations do. Its key
/// is made of them; a `split_accumulation` and a `backward_override` among them are the recipe's.
template <class Given>
class RecipeOf : public Recipe {
 public:
  using Options = Given;
  std::string name() const override { return name_; }
  PlainState options_state() const override { return options_to_state(options); }
  const Options options;

 protected:
  RecipeOf(std::string name, Options given) : options(std::move(given)), name_(std::move(name)) {
    key_ = key_from(name_, options_to_state(options));
    if constexpr (requires { options.split_accumulation; }) {
      split_accumulation_ = options.split_accumulation;
    }
    if constexpr (requires { options.backward_override; }) {
      backward_override_ = options.backward_override;
    }
  }

 private:
  std::string name_;
};

// Recipes by name, from plain values of their fields: for bindings, and for configurations. What is
// not plain, as functions, is not among the fields.
using RecipeFactory = std::function<std::shared_ptr<Recipe>(const PlainState& fields)>;
bool register_recipe(std::string name, PlainState defaults, RecipeFactory factory);
/// Fields that are not given have their defaults.
std::shared_ptr<Recipe> make_recipe(const std::string& name, const PlainState& fields = {});
/// Every field with its default.
const PlainState& recipe_fields(const std::string& name);
std::vector<std::string> recipe_names();

/// In a recipe's .cpp: makes it known by name.
#define LIGATURE_REGISTER_RECIPE(Name)                                                  \
  static const bool Name##_is_registered = ::ligature::register_recipe(                 \
      #Name, ::ligature::options_to_state(Name::Options{}),                             \
      [](const ::ligature::PlainState& fields) -> std::shared_ptr<::ligature::Recipe> { \
        return std::make_shared<Name>(                                                  \
            ::ligature::options_from_state<Name::Options>(fields, #Name));              \
      })

struct DelayedScalingOptions {
  int64_t margin = 0;
  Fp8Format fp8_format = Fp8Format::Hybrid;
  int64_t amax_history_len = 1024;
  std::string amax_compute_algo = "max";  ///< or "most_recent"
  bool reduce_amax = true;
  /// Instead of the above: the amax from a history, newest first; the scale from it.
  std::function<at::Tensor(const at::Tensor& history)> amax_function = nullptr;
  std::function<at::Tensor(const at::Tensor& amax, const at::Tensor& scale, double max_value)>
      scale_function = nullptr;
  std::string functions_key = "";  ///< tells such functions apart

  template <class F>
  void fields(F&& f) {
    f("margin", margin);
    f("fp8_format", fp8_format);
    f("amax_history_len", amax_history_len);
    f("amax_compute_algo", amax_compute_algo);
    f("reduce_amax", reduce_amax);
  }
};

/// One scale per tensor, chosen from the amax of earlier steps. An operation has one state for all
/// recipes of this kind: fields may change from step to step. Example:
/// ```
/// auto recipe = std::make_shared<DelayedScaling>(DelayedScalingOptions{.amax_history_len = 16});
/// Autocast autocast({.recipe = recipe});
/// ```
class DelayedScaling : public RecipeOf<DelayedScalingOptions> {
 public:
  explicit DelayedScaling(Options options = {});
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
  /// Moves amax into the history and chooses the scale anew. On a GPU nothing waits for it.
  void update(DelayedScale& delayed) const;
  /// The same for the tensors of a step, each by its own recipe; on a GPU in one kernel, except
  /// with functions of the user's.
  /// `noted`: undefined, or a number for each of them, below 0 where nothing is to be changed.
  static void update_all(const std::vector<DelayedScale*>& tensors, const at::Tensor& noted = {});
};

struct Float8CurrentScalingOptions {
  Fp8Format fp8_format = Fp8Format::Hybrid;
  bool use_power_2_scales = false;
  float amax_epsilon = 0;
  SplitAccumulation split_accumulation = {};
  BackwardOverride backward_override = BackwardOverride::None;
  Fp8RoleParams fp8_quant_fwd_inp = {}, fp8_quant_fwd_weight = {}, fp8_quant_bwd_grad = {};

  template <class F>
  void fields(F&& f) {
    f("fp8_format", fp8_format);
    f("use_power_2_scales", use_power_2_scales);
    f("amax_epsilon", amax_epsilon);
    split_accumulation.fields(f);
    f("backward_override", backward_override);
    f("fp8_quant_fwd_inp", fp8_quant_fwd_inp);
    f("fp8_quant_fwd_weight", fp8_quant_fwd_weight);
    f("fp8_quant_bwd_grad", fp8_quant_bwd_grad);
  }
};

/// One scale per tensor, from its own amax.
class Float8CurrentScaling : public RecipeOf<Float8CurrentScalingOptions> {
 public:
  explicit Float8CurrentScaling(Options options = {});
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
};

struct Float8BlockScalingOptions {
  Fp8Format fp8_format = Fp8Format::E4M3;
  bool use_f32_scales = false;
  int64_t x_block_scaling_dim = 1;
  int64_t w_block_scaling_dim = 2;
  int64_t grad_block_scaling_dim = 1;
  float amax_epsilon = 0;
  SplitAccumulation split_accumulation = {true, true, true};
  BackwardOverride backward_override = BackwardOverride::None;
  Fp8RoleParams fp8_quant_fwd_inp = {}, fp8_quant_fwd_weight = {}, fp8_quant_bwd_grad = {};

  template <class F>
  void fields(F&& f) {
    f("fp8_format", fp8_format);
    f("use_f32_scales", use_f32_scales);
    f("x_block_scaling_dim", x_block_scaling_dim);
    f("w_block_scaling_dim", w_block_scaling_dim);
    f("grad_block_scaling_dim", grad_block_scaling_dim);
    f("amax_epsilon", amax_epsilon);
    split_accumulation.fields(f);
    f("backward_override", backward_override);
    f("fp8_quant_fwd_inp", fp8_quant_fwd_inp);
    f("fp8_quant_fwd_weight", fp8_quant_fwd_weight);
    f("fp8_quant_bwd_grad", fp8_quant_bwd_grad);
  }
};

/// One scale per 1x128 block of activations and gradients and per 128x128 block of weights.
class Float8BlockScaling : public RecipeOf<Float8BlockScalingOptions> {
 public:
  explicit Float8BlockScaling(Options options = {});
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
};

struct MXFP8BlockScalingOptions {
  Fp8Format fp8_format = Fp8Format::E4M3;
  bool enable_2d_quantization = false;  ///< of weights
  BackwardOverride backward_override = BackwardOverride::None;

  template <class F>
  void fields(F&& f) {
    f("fp8_format", fp8_format);
    f("enable_2d_quantization", enable_2d_quantization);
    f("backward_override", backward_override);
  }
};

/// A power of two per block of 32.
class MXFP8BlockScaling : public RecipeOf<MXFP8BlockScalingOptions> {
 public:
  explicit MXFP8BlockScaling(Options options = {});
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
};

struct NVFP4BlockScalingOptions {
  bool disable_rht = false;
  bool disable_stochastic_rounding = false;
  bool disable_2d_quantization = false;
  bool row_scaled_activation = false;
  std::string nvfp4_4over6 = "none";  ///< "weights", "activations" or "all"
  /// Of which of them the block scales reach up to 256, so that both candidates can be stored;
  /// those of the others reach up to 448.
  std::string nvfp4_4over6_e4m3_use_256 = "all";
  std::string nvfp4_4over6_err_mode = "MAE";  ///< or "MSE"
  BackwardOverride backward_override = BackwardOverride::None;
  Fp4RoleParams fp4_quant_fwd_inp = {}, fp4_quant_fwd_weight = {}, fp4_quant_bwd_grad = {};

  template <class F>
  void fields(F&& f) {
    f("disable_rht", disable_rht);
    f("disable_stochastic_rounding", disable_stochastic_rounding);
    f("disable_2d_quantization", disable_2d_quantization);
    f("row_scaled_activation", row_scaled_activation);
    f("nvfp4_4over6", nvfp4_4over6);
    f("nvfp4_4over6_e4m3_use_256", nvfp4_4over6_e4m3_use_256);
    f("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode);
    f("backward_override", backward_override);
    f("fp4_quant_fwd_inp", fp4_quant_fwd_inp);
    f("fp4_quant_fwd_weight", fp4_quant_fwd_weight);
    f("fp4_quant_bwd_grad", fp4_quant_bwd_grad);
  }
};

/// FP4 values with an E4M3 scale per block of 16 and a global scale.
class NVFP4BlockScaling : public RecipeOf<NVFP4BlockScalingOptions> {
 public:
  explicit NVFP4BlockScaling(Options options = {});
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
};

struct CustomRecipeOptions {
  std::function<std::shared_ptr<Quantizer>(const QuantizerRole& role)> factory = nullptr;
  std::string factory_key = "";  ///< tells factories apart; empty: every recipe is another
  BackwardOverride backward_override = BackwardOverride::None;

  template <class F>
  void fields(F&& f) {
    f("factory_key", factory_key);
    f("backward_override", backward_override);
  }
};

/// A quantizer for each role from a function of the user's; null for high precision.
class CustomRecipe : public RecipeOf<CustomRecipeOptions> {
 public:
  using Factory = std::function<std::shared_ptr<Quantizer>(const QuantizerRole& role)>;
  explicit CustomRecipe(Options options);
  explicit CustomRecipe(Factory factory, std::string factory_key = "",
                        BackwardOverride backward_override = BackwardOverride::None)
      : CustomRecipe(Options{std::move(factory), std::move(factory_key), backward_override}) {}
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
};

}  // namespace ligature
