#include "ligature/recipes/autocast.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/run_context.h"
#include "ligature/recipes/graphed_segment.h"

namespace ligature {
namespace {

/// How other threads reach a thread's contexts.
struct Mailbox {
  std::mutex mutex;  // of the two together: a thread may end while another leaves its context
  std::atomic<bool> some_left{false};
  bool gone = false;
};

}  // namespace

struct EnteredAutocast {
  enum Left : uint8_t { No, AfterAnError, Well };
  std::shared_ptr<Mailbox> thread;
  std::shared_ptr<DelayedSession> session;  // of the outermost context only
  std::atomic<Left> left{No};
};

namespace {

struct Frame {
  AutocastState state;  // around the context
  DelayedSource* source = nullptr;
  AutocastHandle context;
  bool recomputes = false;
};

struct ThreadState : kernels::ThreadPart {
  AutocastState now;
  std::vector<Frame> outer;
  int recomputing = 0;
  std::exception_ptr error;  // of an end that could not throw
  std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();

  ~ThreadState() override {
    const std::lock_guard<std::mutex> lock(mailbox->mutex);
    mailbox->gone = true;
  }
};

ThreadState& thread_state() {
  return kernels::thread_part<ThreadState>(&kernels::RunContext::autocast);
}

// A forward pass inside a running backward pass is one that is run again.
bool inside_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0 && at::GradMode::is_enabled();
}

/// Ends the innermost contexts as far as they have been left. Throws what the update does, when all
/// of them have ended.
void end_left(ThreadState& thread) {
  std::shared_ptr<DelayedSession> to_update;
  while (!thread.outer.empty() && thread.outer.back().context->left != EnteredAutocast::No) {
    Frame frame = std::move(thread.outer.back());
    thread.outer.pop_back();
    const bool update = frame.context->left == EnteredAutocast::Well;
    if (update && thread.outer.empty() && thread.recomputing == 0) to_update = thread.now.session;
    thread.now = std::move(frame.state);
    DelayedSource::exchange(frame.source);
    if (frame.recomputes) --thread.recomputing;
  }
  if (to_update == nullptr) return;
  // Other processes may not run what only looks on.
  if (to_update->reduction() && !at::GradMode::is_enabled()) return;
  to_update->update();
}

/// What other threads, and ends that could not throw, have left to do.
void settle(ThreadState& thread) {
  if (thread.error) std::rethrow_exception(std::exchange(thread.error, nullptr));
  if (!thread.mailbox->some_left.load(std::memory_order_acquire)) return;
  // Backward and recomputation have put contexts of their own in place.
  if (thread.recomputing > 0 || torch::autograd::get_current_graph_task_id() >= 0) return;
  thread.mailbox->some_left.store(false, std::memory_order_release);
  end_left(thread);
}

/// Says so where the context's thread is gone, and nobody else will end it.
bool left_by_another_thread(EnteredAutocast& context, EnteredAutocast::Left how) {
  const std::lock_guard<std::mutex> lock(context.thread->mutex);
  context.left = how;
  context.thread->some_left.store(true, std::memory_order_release);
  return !context.thread->gone;
}

}  // namespace

const RecipePtr& AutocastState::active() const {
  static const RecipePtr none;
  return enabled || calibrating ? recipe : none;
}

at::Tensor DelayedSession::scale_of(const DelayedScalePtr& delayed, bool& record) {
  if (!delayed->recipe) return delayed->scale;
  record = record && !is_recomputing();
  const bool captured = kernels::is_captured(delayed->scale);
  std::lock_guard<std::mutex> lock(mutex_);
  if (captured) delayed->graph_scale = delayed->scale;
  const bool overwritten = delayed->graph_scale.defined();
  auto found = index_.find(delayed.get());
  if (found == index_.end()) {
    if (!record && !overwritten) return delayed->scale;
    found = index_.emplace(delayed.get(), met_.size()).first;
    met_.push_back({delayed, {}, false});
  }
  Met& met = met_[found->second];
  // Graphs overwrite factors: what this pass uses, also when it is run again, is a copy.
  if (!met.scale.defined()) {
    met.scale = overwritten ? delayed->scale.clone() : delayed->scale;
    met.max_value = delayed->max_value;
  } else if (met.max_value != delayed->max_value) {  // a recipe of another format, in one context
    met.scale = met.scale * (delayed->max_value / met.max_value);
    met.max_value = delayed->max_value;
  }
  if (!record) return met.scale;
  captured_ = captured_ || captured;
  if (!met.recorded) {
    if (const auto part = CapturedPart::recorded()) part->meet(delayed);
  }
  met.recorded = true;
  return met.scale;
}

void DelayedSession::meet(const DelayedScalePtr& delayed) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, fresh] = index_.emplace(delayed.get(), met_.size());
  if (fresh) met_.push_back({delayed, {}, true});
  met_[found->second].recorded = true;
}

void DelayedSession::update() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (updated_) return;
  updated_ = true;
  std::vector<DelayedScale*> tensors;
  tensors.reserve(met_.size());
  for (const Met& met : met_) {
    if (met.recorded) tensors.push_back(met.delayed.get());
  }
  const bool joins = reduce_ && joins_;
  if (tensors.empty() && !joins) return;
  if (const auto part = CapturedPart::recorded()) return part->leave_update(reduce_);
  LIGATURE_CHECK_STATE(tensors.empty() || captured_ == kernels::is_captured(tensors.front()->amax),
                       "delayed scaling is updated when the outermost autocast, or the backward "
                       "pass, ends: a CUDA graph must hold the calls inside and that end, or "
                       "neither; enter and leave autocast while the graph is captured");
  at::NoGradGuard no_grad;
  c10::InferenceMode no_inference(false);
  std::vector<DelayedScalePtr> joined;
  if (reduce_) joined = share_amax(tensors);
  DelayedScaling::update_all(tensors);
}

namespace {

/// Those of operations, which have keys.
struct KnownDelayed {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<DelayedScale>> all;
};

KnownDelayed& known_delayed() {
  static auto* known = new KnownDelayed;
  return *known;
}

std::vector<DelayedScalePtr> known_delayed_scales() {
  KnownDelayed& known = known_delayed();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::vector<DelayedScalePtr> out;
  for (const auto& [key, one] : known.all) {
    if (auto alive = one.lock()) out.push_back(std::move(alive));
  }
  return out;
}

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  return x ^ (x >> 29);
}

/// Of the tensors that processes met: a float holds 24 bits exactly.
at::Tensor signature_of(const std::vector<DelayedScale*>& shared) {
  uint64_t hash = shared.size();
  for (const DelayedScale* delayed : shared) hash = mixed(hash ^ mixed(delayed->key));
  const auto low = static_cast<float>(hash & 0xffffff);
  const auto high = static_cast<float>(hash >> 24 & 0xffffff);
  return at::tensor({low, -low, high, -high}, at::TensorOptions(at::kFloat));
}

constexpr int64_t kPlaces = 1 << 14;

}  // namespace

void know_delayed_scale(const DelayedScalePtr& delayed, uint64_t key) {
  delayed->key = key;
  KnownDelayed& known = known_delayed();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (known.all.size() % 256 == 255) {
    std::erase_if(known.all, [](const auto& one) { return one.second.expired(); });
  }
  known.all[key] = delayed;
}

// Every process takes part, whatever it met. Where all met the same, their amax are reduced as one
// tensor. Where one left out a branch, each amax has a place by its key, and what any process met
// is updated on all of them; should two keys have the same place, all take both for one.
std::vector<DelayedScalePtr> DelayedSession::share_amax(std::vector<DelayedScale*>& tensors) const {
  std::vector<DelayedScale*> shared;
  for (DelayedScale* delayed : tensors) {
    if (delayed->recipe->options.reduce_amax) shared.push_back(delayed);
  }
  if (shared.empty() && !joins_) return {};
  const bool on_cpu = shared.empty() || shared[0]->amax.is_cpu();
  bool same = true;
  if (on_cpu) {  // on a GPU the host would have to wait for it
    at::Tensor signature = signature_of(shared);
    reduce_(signature);
    const float* bits = signature.const_data_ptr<float>();
    same = bits[0] == -bits[1] && bits[2] == -bits[3];
  }
  if (same) {
    if (shared.empty()) return {};
    std::vector<at::Tensor> parts;
    for (const DelayedScale* delayed : shared) parts.push_back(delayed->amax);
    at::Tensor reduced = at::cat(parts);
    reduce_(reduced);
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].copy_(reduced.narrow(0, static_cast<int64_t>(i), 1));
    }
    return {};
  }
  at::Tensor places = at::full({kPlaces}, -1.0f, at::TensorOptions(at::kFloat));
  float* const values = places.mutable_data_ptr<float>();
  for (const DelayedScale* delayed : shared) {
    float& place = values[mixed(delayed->key) % kPlaces];
    place = std::max(place, delayed->amax.item<float>());
  }
  reduce_(places);
  std::vector<DelayedScalePtr> joined;
  for (DelayedScalePtr& one : known_delayed_scales()) {
    const float amax = values[mixed(one->key) % kPlaces];
    if (amax < 0.0f || !one->recipe || !one->amax.is_cpu()) continue;
    one->amax.fill_(amax);
    if (std::find(tensors.begin(), tensors.end(), one.get()) == tensors.end()) {
      tensors.push_back(one.get());
    }
    joined.push_back(std::move(one));
  }
  return joined;
}

const AutocastState& autocast_state() {
  ThreadState& thread = thread_state();
  settle(thread);
  return thread.now;
}

int autocast_depth() {
  ThreadState& thread = thread_state();
  settle(thread);
  return static_cast<int>(thread.outer.size());
}

bool is_recomputing() { return thread_state().recomputing > 0; }

RecipePtr default_recipe() {
  static const RecipePtr recipe = std::make_shared<DelayedScaling>();
  return recipe;
}

AutocastHandle enter_autocast(AutocastOptions options) {
  ThreadState& thread = thread_state();
  settle(thread);
  AutocastState next;
  next.enabled = options.enabled;
  next.calibrating = options.calibrating;
  next.recipe = options.recipe != nullptr ? std::move(options.recipe) : default_recipe();
  next.reduce_amax = std::move(options.reduce_amax);
  next.only_where_faster = options.only_where_faster;
  next.session = thread.now.session != nullptr ? thread.now.session  // also one that runs again
                                               : std::make_shared<DelayedSession>();
  if (next.reduce_amax && !next.session->reduction()) {
    next.session->set_reduction(next.reduce_amax);
  }
  if (next.enabled || next.calibrating) {
    const auto* delayed = dynamic_cast<const DelayedScaling*>(next.recipe.get());
    if (delayed != nullptr && delayed->options.reduce_amax) next.session->join_always();
  }
  auto context = std::make_shared<EnteredAutocast>();
  context->thread = thread.mailbox;
  if (thread.outer.empty()) context->session = next.session;
  const bool recomputes = inside_backward();
  if (recomputes) ++thread.recomputing;
  DelayedSource* source = DelayedSource::exchange(next.session.get());
  thread.outer.push_back({std::move(thread.now), source, context, recomputes});
  thread.now = std::move(next);
  return context;
}

void exit_autocast(bool update) {
  ThreadState& thread = thread_state();
  LIGATURE_CHECK_STATE(!thread.outer.empty(), "autocast was left more often than it was entered");
  thread.outer.back().context->left =
      update ? EnteredAutocast::Well : EnteredAutocast::AfterAnError;
  end_left(thread);
}

void exit_autocast(const AutocastHandle& context, bool update) {
  if (context == nullptr || context->left != EnteredAutocast::No) return;
  const auto how = update ? EnteredAutocast::Well : EnteredAutocast::AfterAnError;
  ThreadState& thread = thread_state();
  if (context->thread == thread.mailbox) {
    context->left = how;
    end_left(thread);
    return;
  }
  const bool ends_there = left_by_another_thread(*context, how);
  if (!ends_there && update && context->session != nullptr) context->session->update();
}

void replace_recipe(const Recipe* before, const RecipePtr& now) {
  ThreadState& thread = thread_state();
  if (thread.now.recipe.get() == before) thread.now.recipe = now;
  for (Frame& frame : thread.outer) {
    if (frame.state.recipe.get() == before) frame.state.recipe = now;
  }
}

Autocast::Autocast(AutocastOptions options)
    : context_(enter_autocast(std::move(options))), exceptions_(std::uncaught_exceptions()) {}

void Autocast::end() {
  const AutocastHandle context = std::move(context_);
  exit_autocast(context, std::uncaught_exceptions() <= exceptions_);
}

Autocast::~Autocast() {
  try {
    end();
  } catch (...) {
    std::exception_ptr& error = thread_state().error;
    if (!error) error = std::current_exception();
  }
}

RecomputeScope::RecomputeScope(const AutocastState& state)
    : source_(DelayedSource::exchange(state.session.get())) {
  ThreadState& thread = thread_state();
  before_ = std::exchange(thread.now, state);
  ++thread.recomputing;
}

RecomputeScope::~RecomputeScope() {
  ThreadState& thread = thread_state();
  --thread.recomputing;
  thread.now = std::move(before_);
  DelayedSource::exchange(source_);
}

std::shared_ptr<DelayedSession> backward_session(const AmaxReduction& reduce) {
  static std::mutex mutex;
  static std::map<int, std::shared_ptr<DelayedSession>> sessions;
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || is_recomputing()) return nullptr;
  std::shared_ptr<DelayedSession> session;
  bool fresh = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto& entry = sessions[task];
    fresh = entry == nullptr;
    if (fresh) entry = std::make_shared<DelayedSession>();
    session = entry;
    // Passes that failed never end; their entries are dropped when many newer ones exist.
    while (sessions.size() > 64) sessions.erase(sessions.begin());
  }
  if (reduce && !session->reduction()) session->set_reduction(reduce);
  if (!fresh) return session;
  torch::autograd::Engine::get_default_engine().queue_callback([task] {
    std::shared_ptr<DelayedSession> ended;
    {
      std::lock_guard<std::mutex> lock(mutex);
      const auto found = sessions.find(task);
      if (found == sessions.end()) return;
      ended = std::move(found->second);
      sessions.erase(found);
    }
    ended->update();
  });
  return session;
}

}  // namespace ligature
