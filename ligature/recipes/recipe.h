// Recipes: which tensor is computed with in which format. A recipe is a constant; what changes from
// step to step belongs to the operations.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ligature/quantized/quantizer.h"

namespace ligature {

/// Which FP8 type: one for everything, or E4M3 in forward and E5M2 for gradients.
enum class Fp8Format { E4M3, E5M2, Hybrid };
const char* fp8_format_name(Fp8Format format);

/// Which products of a linear layer move their sums to float32 now and then, where they are a
/// device's own products of FP8 with one factor per tensor. Others have nothing to choose.
struct SplitAccumulation {
  bool forward = false, input_grad = true, weight_grad = true;
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
BackwardOverride backward_override_from(const std::string& recipe, const std::string& name);

class Recipe : public std::enable_shared_from_this<Recipe> {
 public:
  virtual ~Recipe() = default;
  /// "DelayedScaling"
  virtual std::string name() const = 0;
  /// Equal keys mean equal recipes: the type and every field.
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
  /// What stands for it in a host language; not owned.
  void* host = nullptr;

 protected:
  /// Also makes it a part of the key.
  void override_backward(BackwardOverride given);

  std::string key_;
  std::string plan_key_;  ///< empty: the same
  SplitAccumulation split_accumulation_;
  BackwardOverride backward_override_ = BackwardOverride::None;
};
using RecipePtr = std::shared_ptr<const Recipe>;

struct DelayedScalingOptions {
  int64_t margin = 0;
  Fp8Format fp8_format = Fp8Format::Hybrid;
  int64_t amax_history_len = 1024;
  std::string amax_compute_algo = "max";  ///< or "most_recent"
  bool reduce_amax = true;
  /// Instead of the above: the largest value from a history, newest first; the scale from it.
  std::function<at::Tensor(const at::Tensor& history)> amax_function = nullptr;
  std::function<at::Tensor(const at::Tensor& amax, const at::Tensor& scale, double max_value)>
      scale_function = nullptr;
  std::string functions_key = "";  ///< tells such functions apart
};

/// One factor per tensor, chosen from the largest values of earlier steps. An operation has one
/// state for all recipes of this kind: fields may change from step to step. Example:
/// ```
/// auto recipe = std::make_shared<DelayedScaling>(DelayedScalingOptions{.amax_history_len = 16});
/// Autocast autocast({.recipe = recipe});
/// ```
class DelayedScaling : public Recipe {
 public:
  explicit DelayedScaling(DelayedScalingOptions options = {});
  std::string name() const override { return "DelayedScaling"; }
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
  /// Moves amax into the history and chooses the factor anew. On a GPU nothing waits for it.
  void update(DelayedScale& delayed) const;
  /// The same for the tensors of a step, each by its own recipe; on a GPU in one kernel, except
  /// with functions of the user's.
  /// `noted`: undefined, or a number for each of them, below 0 where nothing is to be changed.
  static void update_all(const std::vector<DelayedScale*>& tensors, const at::Tensor& noted = {});
  const DelayedScalingOptions options;
};

struct Float8CurrentScalingOptions {
  Fp8Format fp8_format = Fp8Format::Hybrid;
  bool use_power_2_scales = false;
  float amax_epsilon = 0;
  SplitAccumulation split_accumulation = {};
  BackwardOverride backward_override = BackwardOverride::None;
};

/// One factor per tensor, from its own largest value.
class Float8CurrentScaling : public Recipe {
 public:
  explicit Float8CurrentScaling(Float8CurrentScalingOptions options = {});
  std::string name() const override { return "Float8CurrentScaling"; }
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
  const Float8CurrentScalingOptions options;
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
};

/// One factor per 1x128 block of activations and gradients and per 128x128 block of weights.
class Float8BlockScaling : public Recipe {
 public:
  explicit Float8BlockScaling(Float8BlockScalingOptions options = {});
  std::string name() const override { return "Float8BlockScaling"; }
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
  const Float8BlockScalingOptions options;
};

struct MXFP8BlockScalingOptions {
  Fp8Format fp8_format = Fp8Format::E4M3;
  bool enable_2d_quantization = false;  ///< of weights
  BackwardOverride backward_override = BackwardOverride::None;
};

/// A power of two per block of 32.
class MXFP8BlockScaling : public Recipe {
 public:
  explicit MXFP8BlockScaling(MXFP8BlockScalingOptions options = {});
  std::string name() const override { return "MXFP8BlockScaling"; }
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
  const MXFP8BlockScalingOptions options;
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
};

/// FP4 values with an E4M3 factor per block of 16 and a float factor above.
class NVFP4BlockScaling : public Recipe {
 public:
  explicit NVFP4BlockScaling(NVFP4BlockScalingOptions options = {});
  std::string name() const override { return "NVFP4BlockScaling"; }
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;
  const NVFP4BlockScalingOptions options;
};

/// A quantizer for each role from a function of the user's; null for high precision.
class CustomRecipe : public Recipe {
 public:
  using Factory = std::function<std::shared_ptr<Quantizer>(const QuantizerRole& role)>;
  /// `factory_key` tells factories apart; by default every recipe is another.
  explicit CustomRecipe(Factory factory, const std::string& factory_key = "",
                        BackwardOverride backward_override = BackwardOverride::None);
  std::string name() const override { return "CustomRecipe"; }
  std::shared_ptr<Quantizer> make_quantizer(const QuantizerRole& role,
                                            at::Device device) const override;

 private:
  Factory factory_;
};

}  // namespace ligature
