#include "ligature/operation.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "ligature/options.h"
#include "ligature/quantization/model_init.h"
#include "ligature/quantization/recipe_state.h"
#include "ligature/quantization/weights.h"

namespace ligature {

std::string to_string(const PlainValue& value) {
  struct Printer {
    std::ostringstream out;
    void operator()(std::monostate) { out << "None"; }
    void operator()(bool v) { out << (v ? "True" : "False"); }
    void operator()(int64_t v) { out << v; }
    void operator()(double v) { out << v; }
    void operator()(const std::string& v) { out << "'" << v << "'"; }
    void operator()(const std::vector<int64_t>& v) { out << sizes_string(v); }
    void operator()(at::ScalarType v) { out << c10::toString(v); }
  } printer;
  std::visit(printer, value);
  return printer.out.str();
}

std::string sizes_string(at::IntArrayRef sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(sizes[i]);
  }
  return out + "]";
}

std::string to_string(const ValueMeta& meta) {
  return std::string(c10::toString(meta.dtype)) + sizes_string(meta.sizes);
}

at::TensorOptions ParameterOptions::tensor_options() const {
  at::Device where = at::kCPU;
  if (device) {
    where = *device;
  } else if (at::hasCUDA()) {
    const auto* cuda = c10::impl::getDeviceGuardImpl(at::kCUDA);
    if (cuda->deviceCount() > 0) where = cuda->getDevice();
  }
  return at::TensorOptions().device(where).dtype(dtype ? *dtype
                                                       : c10::get_default_dtype_as_scalartype());
}

std::string describe(const OpList& ops) {
  std::string out;
  for (const auto& op : ops) out += (out.empty() ? "" : ", ") + op->name();
  return "[" + out + "]";
}

std::string describe(const std::vector<BasicOpPtr>& ops) {
  return describe(OpList(ops.begin(), ops.end()));
}

// ---- FusibleOperation

FuserForwardResult FusibleOperation::fuser_forward_compute(const Value&, ArgsList) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no forward pass");
}

void FusibleOperation::fuser_forward_save_ctx(CtxList, const Value&, FuserForwardResult&,
                                              ArgsList) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no fuser_forward_save_ctx");
}

FuserForwardResult FusibleOperation::fuser_forward(CtxList ctxs, const Value& input,
                                                   ArgsList args) {
  FuserForwardResult result = fuser_forward_compute(input, args);
  bool requires_grad = false;
  for (const OpArgs& op : args) requires_grad = requires_grad || op.requires_grad.op;
  if (requires_grad) fuser_forward_save_ctx(ctxs, input, result, args);
  return result;
}

FuserBackwardResult FusibleOperation::fuser_backward(CtxList, const Value&, GradList) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no backward pass");
}

namespace {

Tensor copy_of(const Tensor& parameter, const std::optional<torch::Device>& device) {
  const auto copy = [&](const Tensor& t) {
    return device ? t.to(*device, /*non_blocking=*/false, /*copy=*/true) : t.clone();
  };
  const QuantizedPtr quantized = quantized_of(parameter);
  if (quantized == nullptr) return copy(parameter.detach());
  const QuantizedPtr made = quantized->map(copy);
  made->set_quantizer(deep_copy(*quantizer_for(quantized)));
  Tensor wrapper = wrap_quantized(made);
  set_high_precision_init_val(wrapper, high_precision_init_val(parameter));
  return wrapper;
}

}  // namespace

void FusibleOperation::copy_parameters(const FusibleOperation& from, FusibleOperation& to,
                                       const std::optional<torch::Device>& device) {
  torch::NoGradGuard no_grad;
  for (const auto& item : from.parameters_) {
    to.parameters_[item.key()] =
        copy_of(item.value(), device).set_requires_grad(item.value().requires_grad());
  }
  const BasicOperation* source = const_cast<FusibleOperation&>(from).recipe_state_owner();
  BasicOperation* part = to.recipe_state_owner();
  if (source == nullptr || part == nullptr) return;
  for (const RecipeState& state : recipe_states(*source)) {
    load_recipe_state(*part, state, device.value_or(state.device()));
  }
  for (const auto& item : to.parameters_) adopt_weight(*part, item.value());
}

void FusibleOperation::dequantize_for(torch::Dtype dtype) {
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) return;
  torch::NoGradGuard no_grad;
  for (auto& item : parameters_) {
    const QuantizedPtr quantized = quantized_of(item.value());
    if (quantized == nullptr) continue;
    Tensor plain = quantized->dequantize().to(dtype);
    if (item.value().requires_grad()) plain.set_requires_grad(true);
    const Tensor& grad = item.value().grad();
    if (grad.defined()) plain.mutable_grad() = grad.to(dtype);
    item.value() = plain;
  }
}

void FusibleOperation::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  dequantize_for(dtype);
  torch::nn::Module::to(device, dtype, non_blocking);
}

void FusibleOperation::to(torch::Dtype dtype, bool non_blocking) {
  dequantize_for(dtype);
  torch::nn::Module::to(dtype, non_blocking);
}

// ---- BasicOperation

std::vector<BasicOpPtr> BasicOperation::basic_ops() {
  return {std::static_pointer_cast<BasicOperation>(shared_from_this())};
}

OpForwardResult BasicOperation::op_forward_compute(const Value&, const OpArgs&) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no op_forward_compute");
}

void BasicOperation::op_forward_save_ctx(OperationContext&, const Value&, Kept&, const OpArgs&) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no op_forward_save_ctx");
}

Value BasicOperation::op_forward(OperationContext& ctx, const Value& input, const OpArgs& args) {
  OpForwardResult result = op_forward_compute(input, args);
  if (args.requires_grad.op) {
    ctx.state = result.kept.state;
    op_forward_save_ctx(ctx, input, result.kept, args);
  }
  return std::move(result.output);
}

OpBackwardResult BasicOperation::op_backward(OperationContext&, const Value&) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no backward pass");
}

namespace {

void check_no_extra(const BasicOperation& op, const char* form) {
  LIGATURE_CHECK_STATE(op.num_extra_inputs() == 0 && op.num_extra_outputs() == 0, "[", op.label(),
                       "] has ", op.num_extra_inputs(), " extra inputs and ",
                       op.num_extra_outputs(), " extra outputs, so it must define ", form);
}

}  // namespace

FuserForwardResult BasicOperation::fuser_forward_compute(const Value& input, ArgsList args) {
  check_no_extra(*this, "fuser_forward_compute");
  OpForwardResult result = op_forward_compute(input, args[0]);
  FuserForwardResult out;
  out.output = std::move(result.output);
  out.extra_outputs.resize(1);
  out.kept.push_back(std::move(result.kept));
  return out;
}

void BasicOperation::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                            FuserForwardResult& result, ArgsList args) {
  ctxs[0]->state = result.kept[0].state;
  op_forward_save_ctx(*ctxs[0], input, result.kept[0], args[0]);
}

// The path of every plain step: straight to op_forward, without the lists of the general form.
FuserForwardResult BasicOperation::fuser_forward(CtxList ctxs, const Value& input, ArgsList args) {
  if (num_extra_inputs() > 0 || num_extra_outputs() > 0) {
    return FusibleOperation::fuser_forward(ctxs, input, args);
  }
  FuserForwardResult out;
  out.output = op_forward(*ctxs[0], input, args[0]);
  out.extra_outputs.resize(1);
  return out;
}

FuserBackwardResult BasicOperation::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                   GradList) {
  check_no_extra(*this, "fuser_backward");
  OpBackwardResult result = op_backward(*ctxs[0], grad_output);
  FuserBackwardResult out;
  out.grad_input = std::move(result.grad_input);
  out.grad_params.push_back(std::move(result.grad_params));
  out.grad_extra_inputs.resize(1);
  return out;
}

void BasicOperation::set_option(const std::string& name, const PlainValue&) {
  LIGATURE_CHECK(false, "[", label(), "] has no option '", name, "'");
}

void BasicOperation::initialize_parameter(const std::string& name, Tensor&) {
  LIGATURE_CHECK(false, "[", label(), "] does not know how to initialize '", name, "'");
}

Tensor& BasicOperation::add_parameter(const std::string& name, at::IntArrayRef sizes,
                                      const at::TensorOptions& options) {
  Tensor parameter = at::empty(sizes, options);
  if (!parameter.is_meta()) {
    torch::NoGradGuard no_grad;
    initialize_parameter(name, parameter);
  }
  return register_parameter(name, parameter);
}

std::vector<std::string> BasicOperation::parameter_names() const { return parameters_.keys(); }

void BasicOperation::collect_parameters(std::vector<Tensor>& out) const {
  const auto& owned = parameter_owner().own_parameters();
  if (owner_ == nullptr) {
    for (const auto& item : owned) out.push_back(item.value());
    return;
  }
  for (const auto& name : parameter_names()) {
    const Tensor* found = owned.find(name);
    if (found == nullptr && parameters_are_optional()) continue;
    out.push_back(found != nullptr ? *found : Tensor());
  }
}

namespace {

const std::string& no_channel() {
  static const std::string none;
  return none;
}

}  // namespace

void BasicOperation::check_channel(const char* what, int64_t index, size_t count,
                                   const std::optional<std::string>& channel) const {
  LIGATURE_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(count), "[", label(), "] has ",
                       count, " extra ", what, "s, so there is none with index ", index);
  LIGATURE_CHECK(!channel || !channel->empty(), "[", label(),
                 "] channel must be a non-empty string or None, got ''");
  LIGATURE_CHECK_STATE(!channels_locked_, "[", label(),
                       "] its channels are fixed once a fuser has read them; cannot bind extra ",
                       what, " ", index, " to channel '", channel.value_or(""), "'");
}

void BasicOperation::set_extra_input_channel(int64_t index, std::optional<std::string> channel) {
  check_channel("input", index, num_extra_inputs(), channel);
  input_channels_.resize(num_extra_inputs());
  input_channels_[index] = std::move(channel).value_or("");
}

void BasicOperation::set_extra_output_channel(int64_t index, std::optional<std::string> channel,
                                              bool output_to_caller) {
  check_channel("output", index, num_extra_outputs(), channel);
  output_channels_.resize(num_extra_outputs());
  output_channels_[index] = {channel.value_or(""), output_to_caller || !channel};
}

const std::string& BasicOperation::extra_input_channel(size_t index) const {
  return index < input_channels_.size() ? input_channels_[index] : no_channel();
}

const std::string& BasicOperation::extra_output_channel(size_t index) const {
  return index < output_channels_.size() ? output_channels_[index].name : no_channel();
}

bool BasicOperation::extra_output_to_caller(size_t index) const {
  return index >= output_channels_.size() || output_channels_[index].to_caller;
}

namespace {

constexpr size_t kMostRecipes = 8;  // that one operation remembers
constexpr size_t kMostWeights = 2;  // formats in which it keeps its weight, of those used last

std::vector<std::shared_ptr<Quantizer>> make_quantizers(const Recipe& recipe,
                                                        const std::vector<QuantizerRole>& roles,
                                                        at::Device device) {
  std::vector<std::shared_ptr<Quantizer>> out;
  for (const QuantizerRole& role : roles) out.push_back(recipe.make_quantizer(role, device));
  return out;
}

void share(const std::vector<std::shared_ptr<Quantizer>>& quantizers,
           std::vector<DelayedScalePtr>& states) {
  states.resize(std::max(states.size(), quantizers.size()));
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (!has_recipe_state(quantizers[i])) continue;
    if (states[i] == nullptr) states[i] = quantizers[i]->delayed;
    quantizers[i]->delayed = states[i];
  }
}

/// Do both quantize a weight to the same bits, also in later steps?
bool quantize_weight_alike(const OpQuantization& a, const OpQuantization& b) {
  const Quantizer* of_a = a.forward_quantizer(1);
  const Quantizer* of_b = b.forward_quantizer(1);
  if (of_a == nullptr || of_b == nullptr || !of_a->is_native() || !of_b->is_native()) return false;
  return of_a->format_tag() == of_b->format_tag() && of_a->delayed == of_b->delayed &&
         !of_a->reduce_amax && !of_b->reduce_amax;
}

/// What is kept of the weight for the recipes that were not used lately, or were forgotten.
std::vector<std::shared_ptr<WeightCache>> weights_to_drop(
    const std::vector<OpQuantizationPtr>& known, const OpQuantizationPtr& forgotten = nullptr) {
  std::vector<std::shared_ptr<WeightCache>> kept, out;
  const auto sort = [&](const std::shared_ptr<WeightCache>& one, bool drop) {
    for (const auto* list : {&kept, &out}) {
      if (std::find(list->begin(), list->end(), one) != list->end()) return;
    }
    (drop ? out : kept).push_back(one);
  };
  for (size_t i = known.size(); i-- > 0;) sort(known[i]->weight, kept.size() == kMostWeights);
  if (forgotten != nullptr) sort(forgotten->weight, true);
  return out;
}

}  // namespace

OpQuantizationPtr BasicOperation::find_known(const RecipePtr& recipe) const {
  for (size_t i = quantizations_.size(); i-- > 0;) {
    if (quantizations_[i]->recipe->plan_key() == recipe->plan_key()) return quantizations_[i];
  }
  return nullptr;
}

void BasicOperation::share_state(OpQuantization& made) {
  if (made.is_delayed) {
    share(made.forward, delayed_states_.forward);
    share(made.backward, delayed_states_.backward);
  }
  for (const OpQuantizationPtr& other : quantizations_) {
    if (quantize_weight_alike(*other, made)) made.weight = other->weight;
  }
}

OpQuantizationPtr BasicOperation::find_quantization(const RecipePtr& recipe, at::Device device) {
  if (recipe == nullptr) return nullptr;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    if (auto found = find_known(recipe)) return found;
  }
  // Roles and quantizers may come from a host language: nothing is locked meanwhile.
  const auto forward = forward_quantizer_roles();
  const auto backward = backward_quantizer_roles();
  if (forward.empty() && backward.empty()) return nullptr;
  auto made = std::make_shared<OpQuantization>();
  made->recipe = recipe;
  made->is_delayed = std::dynamic_pointer_cast<const DelayedScaling>(recipe) != nullptr;
  made->forward = make_quantizers(*recipe, forward, device);
  if (recipe->backward_override() == BackwardOverride::None) {
    made->backward = make_quantizers(*recipe, backward, device);
  } else {
    made->backward.resize(backward.size());
  }
  OpQuantizationPtr forgotten;  // destroyed after the lock: it may call a host language
  std::vector<std::shared_ptr<WeightCache>> dropped;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    if (auto found = find_known(recipe)) return found;
    share_state(*made);
    if (quantizations_.size() == kMostRecipes) {
      forgotten = quantizations_.front();
      quantizations_.erase(quantizations_.begin());
    }
    quantizations_.insert(quantizations_.begin(), made);
    dropped = weights_to_drop(quantizations_, forgotten);
  }
  for (const auto& weight : dropped) weight->clear();
  return made;
}

OpQuantizationPtr BasicOperation::quantization(const RecipePtr& recipe, at::Device device) {
  OpQuantizationPtr found = find_quantization(recipe, device);
  if (found == nullptr) return nullptr;
  std::vector<std::shared_ptr<WeightCache>> dropped;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    const auto place = std::find(quantizations_.begin(), quantizations_.end(), found);
    if (place != quantizations_.end()) std::rotate(place, place + 1, quantizations_.end());
    last_used_ = found.get();
    found->follow(recipe);
    dropped = weights_to_drop(quantizations_);
  }
  for (const auto& weight : dropped) weight->clear();
  return found;
}

BasicOperation::DelayedStates BasicOperation::delayed_states() const {
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  return delayed_states_;
}

std::vector<OpQuantizationPtr> BasicOperation::quantizations() const {
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  return quantizations_;
}

OpQuantizationPtr BasicOperation::quantization() const {
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  return quantizations_.empty() ? nullptr : quantizations_.back();
}

void BasicOperation::reset_recipe_state(const RecipePtr& recipe, at::Device device) {
  const OpQuantizationPtr state = quantization(recipe, device);
  if (state == nullptr) return;
  for (auto* quantizers : {&state->forward, &state->backward}) {
    for (const auto& quantizer : *quantizers) {
      if (quantizer == nullptr || quantizer->delayed == nullptr) continue;
      DelayedScale& delayed = *quantizer->delayed;
      delayed.set_scale(at::ones_like(delayed.scale));
      delayed.amax.zero_();
      delayed.history.zero_();
    }
  }
  state->weight->clear();
}

// ---- FusedOperation

FusedOperation::FusedOperation(std::string name, const OpList& ops)
    : FusibleOperation(std::move(name)) {
  LIGATURE_CHECK(!ops.empty(), "[", label(),
                 "] a fused operation stands for at least one basic "
                 "operation, got none");
  for (size_t i = 0; i < ops.size(); ++i) {
    LIGATURE_CHECK_TYPE(ops[i] != nullptr, "[", label(), "] operation ", i, " is null");
    for (auto& basic : ops[i]->basic_ops()) basic_ops_.push_back(std::move(basic));
  }
}

void FusedOperation::pre_first_fuser_forward() {
  for (const auto& op : basic_ops_) op->pre_first_fuser_forward();
}

void FusedOperation::pre_fuser_forward(bool requires_grad) {
  for (const auto& op : basic_ops_) op->pre_fuser_forward(requires_grad);
}

QuantizerPtr FusedOperation::get_input_quantizer() {
  return basic_ops_.front()->get_input_quantizer();
}

QuantizerPtr FusedOperation::get_grad_output_quantizer() {
  return basic_ops_.back()->get_grad_output_quantizer();
}

// ---- operations by name

namespace {

std::map<std::string, OpFactory>& factories() {
  static std::map<std::string, OpFactory> table;
  return table;
}

}  // namespace

bool register_operation(std::string name, OpFactory factory) {
  return factories().emplace(std::move(name), std::move(factory)).second;
}

BasicOpPtr make_operation(const std::string& name, const PlainState& options) {
  auto found = factories().find(name);
  LIGATURE_CHECK(found != factories().end(), "there is no operation named '", name, "'");
  const QuantizedModelInit describing({.enabled = false});
  return found->second(options);
}

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const auto& item : factories()) names.push_back(item.first);
  return names;
}

}  // namespace ligature
