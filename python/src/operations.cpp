// Operations written in C++, as the handles that Python's modules hold, and their methods for
// Python code that calls them (a fused operation in Python may run its basic operations' halves).
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/Device.h>

#include "bindings.h"
#include "host.h"
#include "ligature/fuser/backward_run.h"
#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/registry.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/grouped_linear.h"
#include "ligature/readable.h"
#include "ligature/recipes/autocast.h"

namespace ligature::python {
namespace {

/// Arguments of one basic operation, read from its Python module, for a call outside a fuser.
struct DirectArgs {
  std::vector<Tensor> params;
  std::vector<Tensor> extra_inputs;
  OpQuantizationPtr quantization;
  OpArgs args;

  DirectArgs(const BasicOperation& op, const py::handle& module, const Value& input,
             bool requires_grad, const py::handle& extras, const OperationContext* ctx = nullptr) {
    ParameterSource source(module, op);
    source.collect(params);
    extra_inputs = unwrap_list(extras, "[" + op.label() + "] an extra input");
    if (!op.is_python_op()) read(op);
    args.params = params;
    args.extra_inputs = extra_inputs;
    args.training = source.training();
    args.autocast_dtype = autocast_dtype(input.device());
    quantize(module, input, ctx);
    if (ctx != nullptr && ctx->block != nullptr) {  // the fuser knows, of channels too
      if (requires_grad) args.requires_grad = ctx->requires_grad;
      return;
    }
    args.requires_grad.op = requires_grad;
    args.requires_grad.input = requires_grad;
    for (size_t i = 0; i < params.size(); ++i) {
      if (requires_grad && params[i].requires_grad()) args.requires_grad.params.set(i);
    }
    for (size_t i = 0; i < extra_inputs.size(); ++i) {
      if (requires_grad && extra_inputs[i].requires_grad()) args.requires_grad.extra_inputs.set(i);
    }
  }

 private:
  /// As kernels can read them.
  void read(const BasicOperation& op) {
    const auto names = op.parameter_names();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto name = [&] { return "[" + op.label() + "] " + names[i]; };
      const bool stays = quantized_of(params[i]) != nullptr && op.takes_quantized_parameter(i);
      if (stays) {
        readable(Value(params[i]), name);
      } else {
        params[i] = readable(params[i], name);
      }
    }
    for (size_t i = 0; i < extra_inputs.size(); ++i) {
      if (!extra_inputs[i].defined()) continue;  // a channel inside a fused operation
      const auto name = [&] { return "[" + op.label() + "] extra input " + std::to_string(i); };
      if (op.writes_extra_input(i)) {
        check_writable(extra_inputs[i], name);
      } else {
        extra_inputs[i] = readable(extra_inputs[i], name);
      }
    }
  }

  /// The quantizers that a fuser would give it: those of the operation that plans know.
  void quantize(const py::handle& module, const Value& input, const OperationContext* ctx) {
    if (ctx != nullptr && ctx->block != nullptr) {
      quantization = ctx->quantization;
    } else if (const RecipePtr recipe = autocast_state().active()) {
      const auto twin = module.attr("_op").cast<std::shared_ptr<BasicOperation>>();
      py::gil_scoped_release no_gil;
      quantization = twin->quantization(recipe, input.device());
    }
    args.quantization = quantization.get();
    args.calibrating = quantization != nullptr && !autocast_state().enabled;
  }
};

py::tuple wrap_values(const std::vector<Value>& values) {
  py::tuple out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = wrap(values[i]);
  return out;
}

py::tuple wrap_tensors(const std::vector<Tensor>& tensors) {
  py::tuple out(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) out[i] = wrap(tensors[i]);
  return out;
}

py::list wrap_lists(const std::vector<std::vector<Tensor>>& lists) {
  py::list out;
  for (const auto& list : lists) out.append(wrap_tensors(list));
  return out;
}

Value value_of(const FusibleOperation& op, const char* what, const py::handle& given) {
  const std::string name = "[" + op.label() + "] " + what;
  LIGATURE_CHECK_TYPE(!given.is_none(), name, " must be a tensor, got None");
  const Value value = unwrap(given, name);
  return op.is_python_op() || !value.defined() ? value : readable(value, [&] { return name; });
}

py::list list_from(const FusibleOperation& op, const char* what, const py::handle& given) {
  LIGATURE_CHECK_TYPE(py::isinstance<py::sequence>(given), "[", op.label(), "] ", what,
                      " must be a list with an entry for each basic operation, got ",
                      given.is_none() ? "None" : py::str(py::type::of(given)).cast<std::string>());
  return py::list(py::reinterpret_borrow<py::object>(given));
}

py::tuple op_forward_compute(BasicOperation& op, const py::handle& module, const py::handle& input,
                             bool requires_grad) {
  LIGATURE_CHECK_STATE(op.num_extra_inputs() == 0 && op.num_extra_outputs() == 0, "[", op.label(),
                       "] has ", op.num_extra_inputs(), " extra inputs and ",
                       op.num_extra_outputs(), " extra outputs; call its fuser_forward");
  const Value x = value_of(op, "input", input);
  DirectArgs direct(op, module, x, requires_grad, py::none());
  op.infer({ValueMeta::of(x), direct.params, {}, direct.args.training, direct.args.autocast_dtype});
  at::NoGradGuard no_grad;
  StepScope scope(op);
  OpForwardResult result = op.op_forward_compute(x, direct.args);
  return py::make_tuple(wrap(result.output), wrap_values(result.to_save.tensors));
}

void op_forward_save_ctx(BasicOperation& op, const py::handle& module, OperationContext& ctx,
                         const py::handle& input, const py::handle& tensors, bool requires_grad) {
  const Value x = value_of(op, "input", input);
  DirectArgs direct(op, module, x, requires_grad, py::none(), &ctx);
  ToSave to_save;
  for (const Tensor& t : unwrap_list(tensors, "a tensor to save")) to_save.tensors.emplace_back(t);
  ctx.requires_grad = direct.args.requires_grad;
  ctx.quantization = direct.quantization;
  if (requires_grad) op.op_forward_save_ctx(ctx, x, to_save, direct.args);
}

py::tuple op_backward(BasicOperation& op, OperationContext& ctx, const py::handle& grad_output) {
  at::NoGradGuard no_grad;
  StepScope scope(op);
  if (!op.is_python_op()) read_saved(ctx, op);
  OpBackwardResult result = op.op_backward(ctx, value_of(op, "grad_output", grad_output));
  return py::make_tuple(wrap(result.grad_input), wrap_tensors(result.grad_params));
}

std::vector<OperationContext*> context_pointers(const FusibleOperation& op,
                                                const py::handle& ctxs) {
  std::vector<OperationContext*> out;
  for (const auto& ctx : list_from(op, "basic_op_ctxs", ctxs)) {
    LIGATURE_CHECK_TYPE(py::isinstance<OperationContext>(ctx), "[", op.label(),
                        "] basic_op_ctxs must be OperationContexts, got ",
                        py::str(py::type::of(ctx)).cast<std::string>());
    out.push_back(ctx.cast<OperationContext*>());
  }
  return out;
}

py::tuple fuser_forward(const OpPtr& op, const py::handle& modules, const py::handle& ctxs,
                        const py::handle& input, const py::handle& extra_inputs) {
  std::vector<DirectArgs> direct;
  std::vector<OpArgs> args;
  const auto basic_ops = op->basic_ops();
  const auto contexts = context_pointers(*op, ctxs);
  py::list module_list(py::reinterpret_borrow<py::object>(modules));
  const py::list extra_list = list_from(*op, "basic_op_extra_inputs", extra_inputs);
  LIGATURE_CHECK(module_list.size() == basic_ops.size() && extra_list.size() == basic_ops.size() &&
                     contexts.size() == basic_ops.size(),
                 "[", op->label(), "] wants contexts and extra inputs for ", basic_ops.size(),
                 " basic operations, got ", contexts.size(), " and ", extra_list.size());
  const Value x = value_of(*op, "input", input);
  direct.reserve(basic_ops.size());
  for (size_t i = 0; i < basic_ops.size(); ++i) {
    direct.emplace_back(*basic_ops[i], module_list[i], x, contexts[i]->requires_grad.op,
                        extra_list[i], contexts[i]);
    contexts[i]->requires_grad = direct.back().args.requires_grad;
    contexts[i]->quantization = direct.back().quantization;
    args.push_back(direct.back().args);
  }
  at::NoGradGuard no_grad;
  StepScope scope(*op);
  FuserForwardResult result = op->fuser_forward(contexts, x, args);
  return py::make_tuple(wrap(result.output), wrap_lists(result.extra_outputs));
}

py::tuple fuser_backward(const OpPtr& op, const py::handle& ctxs, const py::handle& grad_output,
                         const py::handle& grad_extra_outputs) {
  std::vector<std::vector<Tensor>> grads;
  for (const auto& item : list_from(*op, "basic_op_grad_extra_outputs", grad_extra_outputs)) {
    grads.push_back(unwrap_list(item, "[" + op->label() + "] a gradient of an extra output"));
  }
  const auto contexts = context_pointers(*op, ctxs);
  const Value dy = value_of(*op, "grad_output", grad_output);
  at::NoGradGuard no_grad;
  StepScope scope(*op);
  const auto basic_ops = op->basic_ops();
  for (size_t i = 0; !op->is_python_op() && i < basic_ops.size(); ++i) {
    if (i < contexts.size()) read_saved(*contexts[i], *basic_ops[i]);
    if (i < grads.size()) read_extra_gradients(grads[i], *basic_ops[i]);
  }
  FuserBackwardResult result = op->fuser_backward(contexts, dy, grads);
  return py::make_tuple(wrap(result.grad_input), wrap_lists(result.grad_params),
                        wrap_lists(result.grad_extra_inputs));
}

py::list parameters_of(const BasicOperation& op) {
  py::list out;
  for (const auto& item : op.own_parameters()) {
    out.append(py::make_tuple(item.key(), py::tuple(py::cast(item.value().sizes().vec()))));
  }
  return out;
}

std::string text_of(const py::handle& value) { return py::repr(value).cast<std::string>(); }

int64_t channel_index(const BasicOperation& op, const char* what, size_t count,
                      const py::handle& index) {
  LIGATURE_CHECK_TYPE(PyLong_Check(index.ptr()), "[", op.label(), "] index must be an int, got ",
                      text_of(index));
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  LIGATURE_CHECK_INDEX(overflow == 0, "[", op.label(), "] has ", count, " extra ", what,
                       "s, so there is none with index ", text_of(index));
  return number;
}

std::optional<std::string> channel_name(const BasicOperation& op, const py::handle& channel) {
  if (channel.is_none()) return std::nullopt;
  LIGATURE_CHECK(PyUnicode_Check(channel.ptr()), "[", op.label(),
                 "] channel must be a non-empty string or None, got ", text_of(channel));
  return channel.cast<std::string>();
}

/// The built-in fused operation of this name over just these operations.
OpPtr make_fused(const std::string& name, const py::handle& ops) {
  const OpList given = operations_of(ops, "[" + name + "] basic_ops");
  PlanOptions options;
  options.recompute = Recompute::Cheap;
  options.of_every_device = true;
  for (Pass pass : {Pass::Joint, Pass::Forward, Pass::Backward}) {
    for (const FusionRule& rule : builtin_fusions(pass)) {
      const OpList fused = apply_rule(rule, given, options, nullptr);
      if (fused.size() == 1 && fused[0]->is_fused_op() && fused[0]->name() == name) return fused[0];
    }
  }
  LIGATURE_CHECK(false, "[", name, "] cannot stand for ", describe(given));
}

/// The operation may live longer than the object that stands for it, which it does not own.
void bind_object(const OpPtr& op, const py::object& object) { op->bound = borrow(object); }

MainGrad find_main_grad(const BasicOperation& op, const Tensor& parameter) {
  return with_python([&] {
    MainGrad found;
    py::object param = wrap(parameter);
    // A context that was filled by hand does not name the weight: it is the one of the module.
    const py::handle module = held(op.bound);
    const Tensor* own = op.parameter_owner().own_parameters().find("weight");
    if (module && own != nullptr && parameter.is_same(*own)) {
      param = module.attr("_parameter_owner").attr("weight");
    }
    if (py::hasattr(param, "__fsdp_param__") && py::hasattr(param, "get_main_grad")) {
      param.attr("main_grad") = param.attr("get_main_grad")();
    }
    if (!py::hasattr(param, "main_grad")) return found;
    found.buffer = unwrap(param.attr("main_grad"), "[" + op.label() + "] main_grad");
    if (!found.buffer.defined()) return found;
    check_main_grad(op, parameter, found.buffer);
    found.overwrite = py::getattr(param, "overwrite_main_grad", py::bool_(false)).cast<bool>();
    if (py::hasattr(param, "grad_added_to_main_grad")) {
      param.attr("grad_added_to_main_grad") = true;
      found.return_placeholder = true;
    }
    return found;
  });
}

}  // namespace

void bind_operations(py::module_& m) {
  py::class_<FusibleOperation, std::shared_ptr<FusibleOperation>>(m, "Operation")
      .def_property_readonly("name", [](const FusibleOperation& op) { return op.name(); })
      .def_property_readonly("is_fused_op", &FusibleOperation::is_fused_op)
      .def("bind", &bind_object)
      .def("basic_op_objects", [](const OpPtr& op) {
        py::list out;
        for (const auto& basic : op->basic_ops()) out.append(python_of(basic));
        return out;
      });
  py::class_<BasicOperation, FusibleOperation, std::shared_ptr<BasicOperation>>(m, "BasicOperation")
      .def_property("label", &BasicOperation::label, &BasicOperation::set_label)
      .def_property_readonly("num_extra_inputs", &BasicOperation::num_extra_inputs)
      .def_property_readonly("num_extra_outputs", &BasicOperation::num_extra_outputs)
      .def_property_readonly("parameters", &parameters_of)
      .def_property_readonly("parameter_names", &BasicOperation::parameter_names)
      .def_property_readonly("parameters_are_optional", &BasicOperation::parameters_are_optional)
      .def_property_readonly("uses_training", &BasicOperation::uses_training)
      .def("options", [](const BasicOperation& op) { return dict_from_state(op.options_state()); })
      .def("get_option",
           [](const BasicOperation& op, const std::string& name) {
             const PlainState options = op.options_state();
             const PlainValue* value = options.find(name);
             if (value == nullptr) throw py::attribute_error(op.name() + " has no option " + name);
             return from_plain(*value);
           })
      .def("set_option",
           [](BasicOperation& op, const std::string& name, const py::handle& value) {
             auto plain = to_plain(value);
             LIGATURE_CHECK_TYPE(plain.has_value(), "[", op.label(), "] option '", name,
                                 "' cannot be ", py::repr(value).cast<std::string>());
             op.set_option(name, *plain);
           })
      .def("initialize_parameter",
           [](BasicOperation& op, const std::string& name, Tensor parameter) {
             at::NoGradGuard no_grad;
             op.initialize_parameter(name, parameter);
           })
      .def("set_extra_input_channel",
           [](BasicOperation& op, const py::handle& index, const py::handle& channel) {
             op.set_extra_input_channel(channel_index(op, "input", op.num_extra_inputs(), index),
                                        channel_name(op, channel));
           })
      .def("set_extra_output_channel",
           [](BasicOperation& op, const py::handle& index, const py::handle& channel,
              const py::handle& to_caller) {
             LIGATURE_CHECK_TYPE(PyBool_Check(to_caller.ptr()), "[", op.label(),
                                 "] output_to_caller must be a bool, got ", text_of(to_caller));
             op.set_extra_output_channel(channel_index(op, "output", op.num_extra_outputs(), index),
                                         channel_name(op, channel), to_caller.ptr() == Py_True);
           })
      .def("extra_input_channel", &BasicOperation::extra_input_channel)
      .def("extra_output_channel", &BasicOperation::extra_output_channel)
      .def("extra_output_to_caller", &BasicOperation::extra_output_to_caller)
      .def("op_forward_compute", &op_forward_compute)
      .def("op_forward_save_ctx", &op_forward_save_ctx)
      .def("op_backward", &op_backward);
  py::class_<GroupedLinearImpl, BasicOperation, std::shared_ptr<GroupedLinearImpl>>(m,
                                                                                    "GroupedLinear")
      .def_property_readonly("num_delayed", &GroupedLinearImpl::num_delayed)
      .def("backward_dw", &GroupedLinearImpl::backward_dw,
           py::call_guard<py::gil_scoped_release>());

  m.def("make_operation", [](const std::string& name, const py::dict& options) {
    return make_operation(name, state_from_dict(options, "option"));
  });
  m.def("operation_names", &operation_names);
  m.def("make_fused", &make_fused);
  m.def("fuser_forward", &fuser_forward);
  m.def("fuser_backward", &fuser_backward);
  set_main_grad_lookup(&find_main_grad);
}

}  // namespace ligature::python
