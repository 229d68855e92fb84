#include "ligature/op_quantization.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/small_buffers.h"
#include "ligature/prepare.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/graphed_segment.h"
#include "ligature/recipes/recipe.h"

namespace ligature {
namespace {

std::atomic<uint64_t> weights_changed{0};

std::optional<c10::Stream> stream_of(const Tensor& weight) {
  if (weight.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(weight.device().type()).getStream(weight.device());
}

// Writes through `.data`, through NumPy and by torch's fused optimizers do not count as a new
// version of a tensor, so every byte is looked at: a fraction of what quantizing would cost. The
// bytes of a weight on a GPU cannot be looked at without waiting for it.
uint64_t content_of(const Tensor& weight) {
  if (!weight.is_cpu()) return weights_changed.load(std::memory_order_relaxed);
  return kernels::content_hash(weight.const_data_ptr(),
                               static_cast<size_t>(weight.numel() * weight.element_size()));
}

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Weights that graphs write: nobody says when such a graph runs.
struct WrittenByGraphs {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<WeakTensor> weights;

  bool has(const Tensor& weight) {
    if (!any.load(std::memory_order_relaxed)) return false;
    const std::lock_guard<std::mutex> lock(mutex);
    return std::any_of(weights.begin(), weights.end(), [&](const WeakTensor& one) {
      return one._unsafe_get_target() == weight.unsafeGetTensorImpl();
    });
  }
};

WrittenByGraphs& written_by_graphs() {
  static auto* all = new WrittenByGraphs;  // outlives every thread
  return *all;
}

// On a GPU a weight is kept where somebody says when weights change: torch's C++ optimizers write
// through `.data()`.
bool can_be_kept(const Tensor& weight) {
  if (weight.is_inference() || weight.is_meta() || !weight.is_non_overlapping_and_dense()) {
    return false;
  }
  if (weight.is_cpu()) return true;
  return kernels::own_backend(weight.device().type()) != nullptr &&
         weights_changed.load(std::memory_order_relaxed) > 0 && !written_by_graphs().has(weight);
}

}  // namespace

void note_weights_changed() { weights_changed.fetch_add(1, std::memory_order_relaxed); }

void note_graph_writes(at::TensorList weights) {
  WrittenByGraphs& all = written_by_graphs();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.weights, [](const WeakTensor& one) { return one.expired(); });
  for (const Tensor& weight : weights) {
    if (weight.defined()) all.weights.emplace_back(weight.getIntrusivePtr());
  }
  all.any = !all.weights.empty();
}

// Delayed scaling: was it made with the factor that holds now? Without a change of the weight that
// would be forever the first one, which is chosen from nothing. On a GPU factors are not compared
// by value: a weight that stays as it is gets quantized once more, with the factor that its own
// largest value has given.
bool WeightCache::has_factor_of(const Quantizer& quantizer) const {
  if (quantizer.delayed == nullptr) return true;
  if (settled_ && !quantizer.delayed->scale.is_cpu()) return true;
  // Where graphs read it, it is one tensor that is overwritten.
  if (quantizer.delayed->graph_scale.defined() && !quantizer.delayed->scale.is_cpu()) {
    return updates_ == quantizer.delayed->updates;
  }
  const Tensor now = quantizer.delayed_scale();
  if (!now.is_cpu()) return factor_.is_same(now);
  const auto& rows = quantized_->rowwise();
  const auto& part = rows.defined() ? rows : quantized_->columnwise();
  return part.scale.item<float>() == 1.0f / now.item<float>();
}

bool WeightCache::holds(const Tensor& weight, Usage usage, const Tensor& owner) const {
  if (quantized_ == nullptr) return false;
  const auto alive = weight_.lock();
  return alive.get() == owner.unsafeGetTensorImpl() && version_ == weight._version() &&
         data_ == weight.const_data_ptr() && stream_ == stream_of(weight) &&
         (usage_.rowwise || !usage.rowwise) && (usage_.columnwise || !usage.columnwise);
}

QuantizedPtr WeightCache::get(const Tensor& weight, const Quantizer& quantizer, Usage usage,
                              const Tensor& owner) {
  if (kernels::is_captured(weight)) {
    const OwnBuffers own;
    const auto make = [&] { return quantizer.quantize(weight, usage); };
    const auto part = CapturedPart::recorded();
    return part != nullptr ? part->weight(shared_from_this(), make) : make();
  }
  if (!can_be_kept(weight)) return quantizer.quantize(weight, usage);
  std::lock_guard<std::mutex> lock(mutex_);
  // Another thread may be about to launch what makes it.
  if (launched_ != nullptr && !launched_->load(std::memory_order_acquire) &&
      maker_ != std::this_thread::get_id()) {
    return quantizer.quantize(weight, usage);
  }
  // A counter that has moved on means a change, one that has not says nothing. So the bytes of a
  // weight that is written in every step, and asked for once, need not be looked at.
  const bool held = holds(weight, usage, owner);
  const bool wanted = held || asked_again_ || !weight.is_cpu();
  const std::optional<uint64_t> content =
      wanted ? std::make_optional(content_of(weight)) : std::nullopt;
  const bool unchanged = held && content_ == content;
  if (unchanged && has_factor_of(quantizer)) {
    asked_again_ = true;
    return quantized_;
  }
  // What runs again in a checkpoint has the factors of its first run: those of later steps are
  // kept.
  if (is_recomputing()) return quantizer.quantize(weight, usage);
  // What is kept may be used in training later.
  const c10::InferenceMode no_inference(false);
  const Tensor factor = quantizer.delayed_scale();
  quantized_ = nullptr;  // its memory serves the new one, step by step the same
  const OwnBuffers own;
  quantized_ = quantizer.quantize(weight, usage);
  launched_ = kernels::when_launched();
  maker_ = std::this_thread::get_id();
  weight_ =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(owner.getIntrusivePtr());
  version_ = weight._version();
  data_ = weight.const_data_ptr();
  content_ = content;
  asked_again_ = held;
  stream_ = stream_of(weight);
  factor_ = factor;
  updates_ = quantizer.delayed != nullptr ? quantizer.delayed->updates : 0;
  settled_ = unchanged;
  usage_ = usage;
  return quantized_;
}

void WeightCache::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  quantized_ = nullptr;
}

bool WeightCache::keeps(const Tensor& part) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (quantized_ == nullptr || !part.has_storage()) return false;
  for (const Tensor& own : quantized_->tensors()) {
    if (own.storage().is_alias_of(part.storage())) return true;
  }
  return false;
}

WeightCaches::WeightCaches(size_t count) {
  for (size_t i = 0; i < count; ++i) all_.push_back(std::make_shared<WeightCache>());
}

void WeightCaches::clear() {
  for (const auto& one : all_) one->clear();
}

bool WeightCaches::keeps(const Tensor& part) const {
  return std::any_of(all_.begin(), all_.end(), [&](const auto& one) { return one->keeps(part); });
}

namespace {

template <class F>
void each_state(const OpQuantization& own, F&& f) {
  for (const auto* quantizers : {&own.forward, &own.backward}) {
    for (const auto& quantizer : *quantizers) {
      if (quantizer == nullptr || quantizer->delayed == nullptr) continue;
      if (quantizer->delayed->recipe) f(*quantizer, *quantizer->delayed);
    }
  }
}

}  // namespace

void OpQuantization::follow(const RecipePtr& by) const {
  if (!is_delayed) return;
  const auto now = std::static_pointer_cast<const DelayedScaling>(by);
  each_state(*this, [&](const Quantizer& quantizer, DelayedScale& state) {
    state.follow(now, max_value(quantizer.format_tag().element));
  });
}

bool OpQuantization::follows(const RecipePtr& by) const {
  if (!is_delayed) return true;
  bool all = true;
  each_state(*this, [&](const Quantizer&, const DelayedScale& state) {
    all = all && state.recipe.is(static_cast<const DelayedScaling*>(by.get()));
  });
  return all;
}

void OpQuantization::move_to(at::Device device) {
  if (device.is_meta()) return;
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  each_state(*this, [&](const Quantizer&, DelayedScale& delayed) {
    for (Tensor* tensor : {&delayed.scale, &delayed.amax, &delayed.history}) {
      if (tensor->device() == device) continue;
      LIGATURE_CHECK_STATE(!kernels::is_captured(device),
                           "what delayed scaling remembers cannot move to ", device,
                           " while a CUDA graph is captured; run a step there before");
      *tensor = tensor->to(device);
    }
    if (delayed.graph_scale.defined()) delayed.graph_scale = delayed.scale;
  });
}

Value quantize_to(const Value& x, const Target& target, at::ScalarType dtype) {
  if (!target) return x.is_quantized() ? x : Value(prepare(x, dtype));
  const Usage usage = target.quantizer->usage_for(target.usage, x.device());
  if (x.is_quantized()) {
    const QuantizedTensor& q = *x.quantized();
    const bool enough =
        q.format_tag().orientations_agree() || ((!usage.rowwise || q.rowwise().defined()) &&
                                                (!usage.columnwise || q.columnwise().defined()));
    if (q.format_tag() == target.quantizer->format_tag() && enough) return x;
  }
  return target.quantizer->quantize(prepare(x, dtype), usage);
}

}  // namespace ligature
