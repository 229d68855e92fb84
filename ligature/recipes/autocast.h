// The low-precision context of a thread: what recipe computes now, and what delayed scaling has
// seen since the outermost context began.
#pragma once

#include <mutex>
#include <unordered_map>

#include "ligature/recipes/recipe.h"

namespace ligature {

/// All-reduce (max) of one flat float tensor over the processes that share amax.
using AmaxReduction = std::function<void(at::Tensor&)>;

/// The tensors that delayed scaling met in one outermost context, or in one backward pass, with the
/// factors that were used there. They are updated together, once.
class DelayedSession : public DelayedSource {
 public:
  at::Tensor scale_of(const DelayedScalePtr& delayed, bool& record) override;
  /// A graph has noted its largest value: it is updated with the others.
  void meet(const DelayedScalePtr& delayed);
  void set_reduction(const AmaxReduction& reduce) { reduce_ = reduce; }
  const AmaxReduction& reduction() const { return reduce_; }
  /// Other processes reduce amax when this ends, so this one does, also where it met nothing.
  void join_always() { joins_ = true; }
  /// Reduces all amax in one call and chooses new factors.
  void update();

 private:
  /// Adds to the tensors those that only other processes met, which are given back.
  std::vector<DelayedScalePtr> share_amax(std::vector<DelayedScale*>& tensors) const;

  struct Met {
    DelayedScalePtr delayed;
    at::Tensor scale;  // undefined until it is asked for
    bool recorded;
    float max_value = 0;  // that the scale is for
  };
  std::mutex mutex_;
  std::vector<Met> met_;
  std::unordered_map<const DelayedScale*, size_t> index_;
  AmaxReduction reduce_;
  bool updated_ = false;
  bool captured_ = false;  // some of it belongs to a graph
  bool joins_ = false;
};

/// An operation's state has this key from now on, by which processes know it (DelayedScale::key).
void know_delayed_scale(const DelayedScalePtr& delayed, uint64_t key);

struct AutocastState {
  bool enabled = false;
  bool calibrating = false;
  RecipePtr recipe;
  AmaxReduction reduce_amax;
  bool only_where_faster = false;
  std::shared_ptr<DelayedSession> session;  ///< of the outermost context

  /// The recipe that plans depend on; null when nothing is quantized or calibrated.
  const RecipePtr& active() const;
};

struct AutocastOptions {
  bool enabled = true;
  bool calibrating = false;    ///< without `enabled`: compute in high precision, but note amax
  RecipePtr recipe = nullptr;  ///< by default DelayedScaling
  AmaxReduction reduce_amax = nullptr;
  bool only_where_faster = false;  ///< high precision for calls that low precision makes slower
};

/// Of this thread.
const AutocastState& autocast_state();
int autocast_depth();
RecipePtr default_recipe();

/// A context that was entered: by it the context is left, in whichever thread.
struct EnteredAutocast;
using AutocastHandle = std::shared_ptr<EnteredAutocast>;

AutocastHandle enter_autocast(AutocastOptions options);
/// Leaves the innermost context of this thread. `update`: without an error, so that the outermost
/// one updates delayed scaling.
void exit_autocast(bool update);
/// Leaves this context, once. It ends in the thread that entered it, when all inside it have been
/// left: at once, or, left by another thread, before that thread's next call.
void exit_autocast(const AutocastHandle& context, bool update);
/// A recipe was changed while contexts may use it: those of this thread take on the new one.
void replace_recipe(const Recipe* before, const RecipePtr& now);

/// The context of the thread that makes it, while it lives. Example:
/// ```
/// {
///   Autocast autocast({.recipe = std::make_shared<Float8CurrentScaling>()});
///   y = model(x);
/// }
/// y.sum().backward();
/// ```
class Autocast {
 public:
  explicit Autocast(AutocastOptions options = {});
  /// Ends it. What end() would throw is thrown by the next call of the thread that made it.
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// Ends it now, and throws what the update of delayed scaling throws. A second time does nothing.
  void end();

 private:
  AutocastHandle context_;
  int exceptions_;
};

/// Runs a forward again as it ran before: same recipe, same factors, nothing is noted.
class RecomputeScope {
 public:
  explicit RecomputeScope(const AutocastState& state);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  AutocastState before_;
  DelayedSource* source_;
};
bool is_recomputing();

/// What backward of the running autograd pass notes; updated when the pass ends. Null outside one.
std::shared_ptr<DelayedSession> backward_session(const AmaxReduction& reduce);

class DelayedSourceScope {
 public:
  explicit DelayedSourceScope(DelayedSource* source) : before_(DelayedSource::exchange(source)) {}
  ~DelayedSourceScope() { DelayedSource::exchange(before_); }
  DelayedSourceScope(const DelayedSourceScope&) = delete;
  DelayedSourceScope& operator=(const DelayedSourceScope&) = delete;

 private:
  DelayedSource* before_;
};

}  // namespace ligature
