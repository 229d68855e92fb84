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
  for (const auto& name : parameter_names()) out.push_back(owned[name]);
}

namespace {

const std::string& no_channel() {
  static const std::string none;
  return none;
}

}  // namespace

void BasicOperation::set_extra_input_channel(size_t index, std::string channel) {
  LIGATURE_CHECK(index < num_extra_inputs(), "[", label(), "] has ", num_extra_inputs(),
                 " extra inputs, so there is none with index ", index);
  LIGATURE_CHECK(!channel.empty(), "[", label(), "] a channel's name must not be empty");
  LIGATURE_CHECK_STATE(!channels_locked_, "[", label(),
                       "] its channels are fixed once a fuser has read them; cannot bind extra "
                       "input ",
                       index, " to channel '", channel, "'");
  input_channels_.resize(num_extra_inputs());
  input_channels_[index] = std::move(channel);
}

void BasicOperation::set_extra_output_channel(size_t index, std::string channel,
                                              bool output_to_caller) {
  LIGATURE_CHECK(index < num_extra_outputs(), "[", label(), "] has ", num_extra_outputs(),
                 " extra outputs, so there is none with index ", index);
  LIGATURE_CHECK(!channel.empty(), "[", label(), "] a channel's name must not be empty");
  LIGATURE_CHECK_STATE(!channels_locked_, "[", label(),
                       "] its channels are fixed once a fuser has read them; cannot bind extra "
                       "output ",
                       index, " to channel '", channel, "'");
  output_channels_.resize(num_extra_outputs());
  output_channels_[index] = {std::move(channel), output_to_caller};
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

constexpr size_t kMaxRecipes = 8;  // states kept by one operation

std::vector<std::shared_ptr<Quantizer>> make_quantizers(const Recipe& recipe,
                                                        const std::vector<QuantizerRole>& roles,
                                                        at::Device device) {
  std::vector<std::shared_ptr<Quantizer>> out;
  for (const QuantizerRole& role : roles) out.push_back(recipe.make_quantizer(role, device));
  return out;
}

// An equal recipe is another object when it was made anew, or from a file without its functions.
void take_on(OpQuantization& state, const RecipePtr& recipe) {
  if (state.recipe == recipe) return;
  state.recipe = recipe;
  const auto delayed = std::dynamic_pointer_cast<const DelayedScaling>(recipe);
  for (auto* quantizers : {&state.forward, &state.backward}) {
    for (const auto& quantizer : *quantizers) {
      if (delayed == nullptr || quantizer == nullptr || quantizer->delayed == nullptr) continue;
      if (quantizer->delayed->recipe != nullptr) quantizer->delayed->recipe = delayed;
    }
  }
}

OpQuantizationPtr find(std::vector<OpQuantizationPtr>& states, const RecipePtr& recipe) {
  for (size_t i = states.size(); i-- > 0;) {
    if (states[i]->recipe->key() != recipe->key()) continue;
    std::rotate(states.begin() + i, states.begin() + i + 1, states.end());
    take_on(*states.back(), recipe);
    return states.back();
  }
  return nullptr;
}

}  // namespace

OpQuantizationPtr BasicOperation::quantization(const RecipePtr& recipe, at::Device device) {
  if (recipe == nullptr) return nullptr;
  {
    std::lock_guard<std::mutex> lock(quantization_mutex_);
    if (auto found = find(quantizations_, recipe)) return found;
  }
  // Roles and quantizers may come from a host language: nothing is locked meanwhile.
  const auto forward = forward_quantizer_roles();
  const auto backward = backward_quantizer_roles();
  if (forward.empty() && backward.empty()) return nullptr;
  auto made = std::make_shared<OpQuantization>();
  made->recipe = recipe;
  made->forward = make_quantizers(*recipe, forward, device);
  made->backward = make_quantizers(*recipe, backward, device);
  std::lock_guard<std::mutex> lock(quantization_mutex_);
  if (auto found = find(quantizations_, recipe)) return found;
  if (quantizations_.size() == kMaxRecipes) quantizations_.erase(quantizations_.begin());
  quantizations_.push_back(made);
  return made;
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
  state->weight.clear();
}

// ---- FusedOperation

FusedOperation::FusedOperation(std::string name, const OpList& ops)
    : FusibleOperation(std::move(name)) {
  LIGATURE_CHECK(!ops.empty(), "[", label(),
                 "] a fused operation stands for at least one basic "
                 "operation, got none");
  for (const auto& op : ops) {
    for (auto& basic : op->basic_ops()) basic_ops_.push_back(std::move(basic));
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
