#include "ligature/operation.h"

#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>

#include <sstream>

#include "ligature/options.h"

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

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string to_string(const ValueMeta& meta) {
  return std::string(c10::toString(meta.dtype)) + sizes_string(meta.sizes);
}

at::TensorOptions ParameterOptions::tensor_options() const {
  return at::TensorOptions()
      .device(device ? *device : default_device())
      .dtype(dtype ? *dtype : c10::get_default_dtype_as_scalartype());
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

// ---- BasicOperation

std::vector<BasicOpPtr> BasicOperation::basic_ops() {
  return {std::static_pointer_cast<BasicOperation>(shared_from_this())};
}

OpForwardResult BasicOperation::op_forward_compute(const Value&, const OpArgs&) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no op_forward_compute");
}

void BasicOperation::op_forward_save_ctx(OperationContext&, const Value&, ToSave&, const OpArgs&) {
  LIGATURE_CHECK_STATE(false, "[", label(), "] has no op_forward_save_ctx");
}

Value BasicOperation::op_forward(OperationContext& ctx, const Value& input, const OpArgs& args) {
  OpForwardResult result = op_forward_compute(input, args);
  if (args.requires_grad.op) {
    ctx.state = result.to_save.state;
    op_forward_save_ctx(ctx, input, result.to_save, args);
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
  out.to_save.push_back(std::move(result.to_save));
  return out;
}

void BasicOperation::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                            FuserForwardResult& result, ArgsList args) {
  ctxs[0]->state = result.to_save[0].state;
  op_forward_save_ctx(*ctxs[0], input, result.to_save[0], args[0]);
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

}  // namespace ligature
