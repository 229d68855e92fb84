// What one operation has of a recipe: its quantizers, and the weight it quantized last.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "ligature/quantized/quantizer.h"
#include "ligature/value.h"

namespace ligature {

class Recipe;
using RecipePtr = std::shared_ptr<const Recipe>;

/// Says that weights on a GPU may have been written in a way that does not count as a new version
/// of a tensor: by an optimizer of C++ or one that is not torch's, through `.data`, or by a
/// captured graph. What was kept of them in low precision is made anew. torch's own optimizers say
/// so by themselves in Python. In a C++ program weights on a GPU are quantized in every forward
/// until the first call, and kept between calls from then on. Weights on the CPU need it not: their
/// bytes are looked at.
void note_weights_changed();

/// Says that a graph that is captured now writes these weights: outside of graphs they are
/// quantized in every forward from here on, since nobody says when the graph runs.
void note_graph_writes(at::TensorList weights);

/// A weight in low precision, made once per version of the parameter.
class WeightCache : public std::enable_shared_from_this<WeightCache> {
 public:
  /// The weight as it was quantized last, or quantized anew when it has changed. `owner`: whose
  /// part it is, if it is a view that is made for each call.
  QuantizedPtr get(const Tensor& weight, const Quantizer& quantizer, Usage usage,
                   const Tensor& owner);
  void clear();
  /// Is this a part of what it keeps?
  bool keeps(const Tensor& part);

 private:
  /// What the counters say; a write that they miss is found by the hash.
  bool holds(const Tensor& weight, Usage usage, const Tensor& owner) const;
  bool has_factor_of(const Quantizer& quantizer) const;

  std::mutex mutex_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  uint32_t version_ = 0;
  const void* data_ = nullptr;
  /// On the CPU a hash of the weight's bytes, unknown where it was not asked for a second time
  /// lately; on a GPU the number of note_weights_changed().
  std::optional<uint64_t> content_;
  bool asked_again_ = true;            // since it was last seen to have changed
  std::optional<c10::Stream> stream_;  // on a GPU: where it was made, the only one to wait for it
  Tensor factor_;                      // delayed scaling on a GPU: what it was made with,
  uint64_t updates_ = 0;               // how often that had been set,
  bool settled_ = false;               // and whether its own largest value has a part in that
  std::shared_ptr<const std::atomic<bool>> launched_;  // on a GPU: is the kernel that makes it?
  std::thread::id maker_;
  Usage usage_{false, false};
  QuantizedPtr quantized_;
};

/// Those of one operation: one weight, or one of each group.
class WeightCaches {
 public:
  explicit WeightCaches(size_t count);
  WeightCache& operator[](size_t i) { return *all_[i]; }
  void clear();
  bool keeps(const Tensor& part) const;

 private:
  std::vector<std::shared_ptr<WeightCache>> all_;
};

struct OpQuantization {
  RecipePtr recipe;                                 ///< the first of those with its plan key
  std::vector<std::shared_ptr<Quantizer>> forward;  ///< null entries stay in high precision
  std::vector<std::shared_ptr<Quantizer>> backward;
  /// Shared by the recipes of an operation that quantize its weights alike.
  std::shared_ptr<WeightCaches> weights;

  bool is_delayed = false;  ///< is the recipe DelayedScaling?

  /// From now on the state of delayed scaling follows this recipe: its own, or one with the same
  /// plan key.
  void follow(const RecipePtr& by) const;
  /// Does it follow it? True for other recipes.
  bool follows(const RecipePtr& by) const;
  /// What delayed scaling remembers goes where the operation computes now.
  void move_to(at::Device device);

  const Quantizer* forward_quantizer(size_t i) const {
    return i < forward.size() ? forward[i].get() : nullptr;
  }
  const Quantizer* backward_quantizer(size_t i) const {
    return i < backward.size() ? backward[i].get() : nullptr;
  }
};
using OpQuantizationPtr = std::shared_ptr<OpQuantization>;

/// What to quantize with, in one call: null when the value stays as it is.
struct Target {
  const Quantizer* quantizer = nullptr;
  Usage usage;

  explicit operator bool() const {
    return quantizer != nullptr && quantizer->is_native() && (usage.rowwise || usage.columnwise);
  }
  /// Where a kernel can write this format from values of `dtype`.
  Target from(at::ScalarType dtype) const { return dtype == at::kDouble ? Target() : *this; }
  Usage usage_on(at::Device device) const { return quantizer->usage_for(usage, device); }
  kernels::QuantizeArgs args(at::Device device) const {
    return quantizer->args(usage_on(device), device);
  }
};

/// `x` in the format of `target`: as it is, when it is in it already or there is no target.
Value quantize_to(const Value& x, const Target& target, at::ScalarType dtype);

}  // namespace ligature
