// A quantizer makes tensors of one format. Those of delayed scaling share their factor and their
// largest values with the recipe's state.
#pragma once

#include <atomic>

#include "ligature/quantized/quantized_tensor.h"

namespace ligature {

/// Which orientations are wanted: row-wise data for products over a tensor's last dimension,
/// column-wise data for those over the others.
struct Usage {
  bool rowwise = true;
  bool columnwise = true;
  bool operator==(const Usage&) const = default;
};

/// What a quantizer is for.
struct QuantizerRole {
  std::string module_type;  ///< "linear"
  std::string tensor_type;  ///< "input", "weight" or "grad_output"
  std::string name;         ///< of the operation
};

class DelayedScaling;
/// Its margin (recipes/delayed_scaling.cpp).
int64_t margin_of(const DelayedScaling& recipe);

/// The recipe that delayed scaling follows. Threads may read it while another replaces it.
class FollowedRecipe {
 public:
  using Pointer = std::shared_ptr<const DelayedScaling>;
  FollowedRecipe() = default;
  FollowedRecipe(const FollowedRecipe& other) { *this = other.load(); }
  FollowedRecipe& operator=(const FollowedRecipe& other) { return *this = other.load(); }
  FollowedRecipe& operator=(Pointer recipe) {
    address_.store(recipe.get(), std::memory_order_relaxed);
    recipe_.store(std::move(recipe));
    return *this;
  }
  Pointer load() const { return recipe_.load(); }
  Pointer operator->() const { return load(); }
  bool is(const DelayedScaling* recipe) const {
    return address_.load(std::memory_order_relaxed) == recipe;
  }
  explicit operator bool() const { return !is(nullptr); }

 private:
  std::atomic<Pointer> recipe_;
  std::atomic<const DelayedScaling*> address_{nullptr};  // to be compared, without a count
};

/// What delayed scaling remembers of one tensor from step to step.
struct DelayedScale {
  /// float [1]: values are multiplied by it; replaced, not overwritten (but by a captured or a
  /// compiled graph)
  at::Tensor scale;
  at::Tensor amax;     ///< float [1]: the largest magnitude since the last update
  at::Tensor history;  ///< float [amax_history_len]: earlier ones, the newest first
  float max_value = 448.0f;
  /// By which it is updated; null: by nobody, it is the user's own.
  FollowedRecipe recipe;
  /// The same tensor, where captured or compiled graphs read it: then it is overwritten.
  at::Tensor graph_scale;
  uint64_t updates = 0;  ///< how often it was set from here: a graph that runs is not counted
  uint64_t key = 0;      ///< tells it from the others of a model, on every process alike

  void set_scale(at::Tensor value);
  /// From now on this recipe updates it. Scale and history stay: the scale in relation to the
  /// largest number of the format, the history as far as it is long enough, its newest entries.
  void follow(const std::shared_ptr<const DelayedScaling>& by, float largest);
};
using DelayedScalePtr = std::shared_ptr<DelayedScale>;
/// As long as `length`: the newest entries, and zeros where there are too few.
at::Tensor resized_history(const at::Tensor& history, int64_t length);

class Quantizer : public std::enable_shared_from_this<Quantizer> {
 public:
  explicit Quantizer(Format format, Usage usage = {});
  virtual ~Quantizer() = default;

  virtual std::string format() const { return format_.name(); }
  /// Can kernels quantize for it? One of a host language only hands out itself.
  virtual bool is_native() const { return true; }
  const Format& format_tag() const { return format_; }

  /// Both orientations as asked for; where one can stand in for the other on this device, only it.
  Usage usage_for(Usage wanted, at::Device device) const;

  virtual QuantizedPtr quantize(const at::Tensor& x, Usage usage) const;
  QuantizedPtr quantize(const at::Tensor& x) const { return quantize(x, usage); }
  /// The same for values that are to be kept: with delayed scaling they get a scale of their own,
  /// that holds their amax, and nothing is noted.
  QuantizedPtr fit(const at::Tensor& x, Usage usage) const;
  /// For a kernel that quantizes its own result: what it has to know ...
  virtual kernels::QuantizeArgs args(Usage usage, at::Device device) const;
  /// ... and the tensor made of what it gives.
  QuantizedPtr assemble(kernels::QuantizedPair parts, at::IntArrayRef sizes,
                        at::ScalarType dtype) const;

  /// Writes x into the memory of `to`, in to's format and orientations. A quantizer that a recipe
  /// updates gives it a scale of its own, as `fit`; one of the user's its scale.
  void update(const at::Tensor& x, QuantizedTensor& to) const;
  /// Of this shape, all zeros.
  QuantizedPtr make_empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) const;
  /// Why this tensor cannot be quantized; empty when it can.
  std::string why_not(const at::Tensor& x) const;
  /// Notes the largest magnitude without quantizing; nothing for formats that need none.
  void calibrate(const at::Tensor& x) const;
  /// The same for a tensor that was quantized before and is computed with as it is.
  void calibrate(const QuantizedTensor& x) const;

  /// Delayed scaling: the factor used now; undefined for other formats.
  at::Tensor delayed_scale() const;
  /// Itself, with a factor of delayed scaling that was used before; nothing is noted.
  QuantizerPtr again(const at::Tensor& scale) const;

  virtual std::shared_ptr<Quantizer> copy() const { return std::make_shared<Quantizer>(*this); }

  Usage usage;              ///< when none is given
  DelayedScalePtr delayed;  ///< Delayed only
  /// Current and NV: shares the largest magnitude with other processes; may be empty.
  std::function<void(at::Tensor&)> reduce_amax;

 private:
  at::Tensor noted_amax() const;
  Format format_;
};

/// A quantizer of delayed scaling with a factor of 1 and an empty history of this length.
std::shared_ptr<Quantizer> make_delayed_quantizer(Element element, int64_t history,
                                                  at::Device device);

/// Where quantizers of delayed scaling read their factor and note their largest values: set by
/// whoever runs operations. Without one they use their own.
class DelayedSource {
 public:
  virtual ~DelayedSource() = default;
  /// The factor to use now; `record`: whether to note the largest value.
  virtual at::Tensor scale_of(const DelayedScalePtr& delayed, bool& record) = 0;
  /// Where to note it.
  virtual at::Tensor amax_of(const DelayedScalePtr& delayed) { return delayed->amax; }
  static DelayedSource* current();
  /// Sets it for this thread and returns the one before.
  static DelayedSource* exchange(DelayedSource* source);
};

}  // namespace ligature
