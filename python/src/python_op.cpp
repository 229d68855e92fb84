#include "python_op.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "bindings.h"
#include "quantized.h"
#include "recipes.h"

namespace ligature::python {

Form form_from_string(const std::string& name) {
  if (name == "op_split") return Form::OpSplit;
  if (name == "op_classic") return Form::OpClassic;
  if (name == "fuser_split") return Form::FuserSplit;
  if (name == "fuser_classic") return Form::FuserClassic;
  LIGATURE_CHECK(name == "none", "no such form: '", name, "'");
  return Form::None;
}

std::string PythonQuantizer::format() const {
  return with_python([&] { return py::str(py::type::of(object())).cast<std::string>(); });
}

QuantizedPtr PythonQuantizer::quantize(const at::Tensor&, Usage) const {
  LIGATURE_CHECK_STATE(false, "a quantizer written in Python works for operations in Python only");
}

namespace {

py::handle object_of(const FusibleOperation& op) {
  const py::handle object = held(op.bound);
  LIGATURE_CHECK_STATE(object, "[", op.label(), "] its Python object is gone");
  return object;
}

bool is_op_form(Form form) { return form == Form::OpSplit || form == Form::OpClassic; }

/// A neighbour's quantizer, set to the orientations that the neighbour wants now; None when it
/// wants neither.
py::object quantizer_object(const Quantizer* quantizer, const Usage& wanted) {
  if (quantizer == nullptr || !(wanted.rowwise || wanted.columnwise)) return py::none();
  const auto shared = const_cast<Quantizer*>(quantizer)->shared_from_this();
  if (shared->is_native()) shared->usage = wanted;
  return python_of(QuantizerPtr(shared));
}

py::dict kwargs_of(const OpArgs& args) {
  if (args.kwargs == nullptr || args.kwargs->bound == nullptr) return {};
  return py::reinterpret_borrow<py::dict>(held(args.kwargs->bound));
}

py::tuple wrap_all(at::ArrayRef<Tensor> tensors) {
  py::tuple out(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) out[i] = wrap(tensors[i]);
  return out;
}

/// What one forward method is given. Its tensors say whether they need a gradient: one that does
/// not say so by itself is given as an alias that does, which is the tensor itself again wherever
/// the method hands it back.
class Given {
 public:
  py::object tensor(const Tensor& tensor, bool needs_grad) {
    if (!needs_grad || !tensor.defined() || tensor.requires_grad() ||
        !torch::autograd::isDifferentiableType(tensor.scalar_type())) {
      return wrap(tensor);
    }
    for (const auto& [alias, original] : aliases_) {
      if (original.is_same(tensor)) return wrap(alias);
    }
    // Not detach(): a trace that is under way must not see it.
    aliases_.emplace_back(tensor.tensor_data().set_requires_grad(true), tensor);
    return wrap(aliases_.back().first);
  }
  py::object value(const Value& value, bool needs_grad) {
    if (!value.is_quantized()) return tensor(value.tensor(), needs_grad);
    if (!needs_grad || value.identity().requires_grad()) return wrap(value);
    return wrap(wrap_quantized(value.quantized()).set_requires_grad(true));
  }
  py::tuple extra_inputs(const OpArgs& args) {
    py::tuple out(args.extra_inputs.size());
    for (size_t j = 0; j < args.extra_inputs.size(); ++j) {
      out[j] = tensor(args.extra_inputs[j], args.requires_grad.extra_input(j));
    }
    return out;
  }

  Tensor back(Tensor returned) const {
    for (const auto& [alias, original] : aliases_) {
      if (alias.is_same(returned)) return original;
    }
    return returned;
  }
  std::vector<Tensor> back(std::vector<Tensor> returned) const {
    for (Tensor& tensor : returned) tensor = back(std::move(tensor));
    return returned;
  }
  /// What the method saved in a context.
  void restore(OperationContext& ctx) const {
    if (aliases_.empty()) return;
    std::vector<Value> saved = ctx.saved();
    for (Value& value : saved) {
      if (!value.is_quantized()) value = back(value.tensor());
    }
    ctx.save_for_backward(std::move(saved));
  }

 private:
  c10::SmallVector<std::pair<Tensor, Tensor>, 2> aliases_;
};

/// The keyword arguments that every forward method is given.
py::dict forward_kwargs(Form form, ArgsList args, Given& given) {
  py::dict out;
  const Quantizer* before = args.front().prev_op_grad_output_quantizer;
  out["prev_op_grad_output_quantizer"] =
      quantizer_object(before, before != nullptr ? before->usage : Usage{});
  out["next_op_input_quantizer"] =
      quantizer_object(args.back().next_op_input_quantizer, args.back().next_op_input_usage);
  const bool split = form == Form::OpSplit || form == Form::FuserSplit;
  if (is_op_form(form)) {
    if (split) out["requires_grad"] = args.front().requires_grad.op;
    for (const auto& [name, value] : kwargs_of(args.front())) out[name] = value;
    return out;
  }
  py::list extra_inputs;
  py::list kwargs;
  py::list requires_grad;
  for (const OpArgs& op : args) {
    extra_inputs.append(given.extra_inputs(op));
    kwargs.append(kwargs_of(op));
    requires_grad.append(op.requires_grad.op);
  }
  out["basic_op_extra_inputs"] = extra_inputs;
  out["basic_op_kwargs"] = kwargs;
  if (split) out["requires_grad"] = requires_grad;
  return out;
}

py::list context_list(CtxList ctxs) {
  py::list out;
  for (OperationContext* ctx : ctxs) out.append(py::cast(share(*ctx)));
  return out;
}

std::vector<py::object> tuple_of(const FusibleOperation& op, const char* method,
                                 const py::object& result, size_t least, size_t most) {
  LIGATURE_CHECK_TYPE(py::isinstance<py::tuple>(result), "[", op.label(), "] ", method,
                      " must return a tuple, got ",
                      py::str(py::type::of(result)).cast<std::string>());
  std::vector<py::object> items;
  for (const auto& item : result) items.push_back(py::reinterpret_borrow<py::object>(item));
  LIGATURE_CHECK(items.size() >= least && items.size() <= most, "[", op.label(), "] ", method,
                 " must return ", least, most == least ? "" : " or " + std::to_string(most),
                 " results, got ", items.size());
  return items;
}

std::vector<py::object> list_of(const FusibleOperation& op, const char* what,
                                const py::handle& result, size_t count) {
  LIGATURE_CHECK_TYPE(
      py::isinstance<py::sequence>(result), "[", op.label(), "] ", what, " must be a list with ",
      count, " entries, one per basic operation, got ",
      result.is_none() ? "None" : py::str(py::type::of(result)).cast<std::string>());
  std::vector<py::object> items;
  for (const auto& item : result) items.push_back(py::reinterpret_borrow<py::object>(item));
  LIGATURE_CHECK(items.size() == count, "[", op.label(), "] ", what, " must be a list with ", count,
                 " entries, one per basic operation, got ", items.size());
  return items;
}

bool aliases(const Tensor& a, const Tensor& b) {
  if (quantized_of(a) != nullptr || quantized_of(b) != nullptr) {
    return quantized_of(a) == quantized_of(b);
  }
  return a.defined() && b.defined() &&
         (a.is_same(b) || (a.has_storage() && b.has_storage() &&
                           a.storage().is_alias_of(b.storage()) && a.numel() > 0));
}

void check_fresh(const FusibleOperation& op, const Tensor& to_save, const Value& input,
                 ArgsList args) {
  bool alias = !input.is_quantized() && aliases(to_save, input.tensor());
  for (const OpArgs& basic : args) {
    for (const Tensor& t : basic.params) alias = alias || aliases(to_save, t);
    for (const Tensor& t : basic.extra_inputs) alias = alias || aliases(to_save, t);
  }
  LIGATURE_CHECK_STATE(
      !alias, "[", op.label(),
      "] the compute half of its forward returned an input (or a view of one) to be "
      "saved; save it by name in the other half, with ctx.save_for_backward");
}

ToSave kept_from(const FusibleOperation& op, const py::handle& tensors, const py::handle& state,
                 const Value& input, ArgsList args) {
  ToSave to_save;
  for (const Tensor& t : unwrap_list(tensors, "[" + op.label() + "] a tensor to save")) {
    check_fresh(op, t, input, args);
    to_save.tensors.emplace_back(t);
  }
  if (state && !state.is_none()) {
    const auto dict = py::reinterpret_borrow<py::dict>(state);
    to_save.state = state_from_dict(dict, "state to keep");
    to_save.bound = hold(dict.attr("copy")());
  }
  return to_save;
}

}  // namespace

FuserForwardResult PythonOpCalls::call_compute(const FusibleOperation& op, const Value& input,
                                               ArgsList args) {
  return with_python([&] {
    const py::handle self = object_of(op);
    FuserForwardResult out;
    Given given;
    const py::object x = given.value(input, args.front().requires_grad.input);
    if (form_ == Form::OpSplit) {
      const auto items =
          tuple_of(op, "op_forward_compute",
                   self.attr("op_forward_compute")(x, **forward_kwargs(form_, args, given)), 2, 3);
      out.output = given.back(unwrap(items[0], "[" + op.label() + "] the output"));
      out.extra_outputs.resize(1);
      out.to_save.push_back(
          kept_from(op, items[1], items.size() > 2 ? items[2] : py::object(), input, args));
      return out;
    }
    LIGATURE_CHECK_STATE(form_ == Form::FuserSplit, "[", op.label(), "] has no split forward");
    const auto items =
        tuple_of(op, "fuser_forward_compute",
                 self.attr("fuser_forward_compute")(x, **forward_kwargs(form_, args, given)), 3, 4);
    out.output = given.back(unwrap(items[0], "[" + op.label() + "] the output"));
    for (const auto& extra : list_of(op, "extra outputs", items[1], args.size())) {
      out.extra_outputs.push_back(
          given.back(unwrap_list(extra, "[" + op.label() + "] an extra output")));
    }
    const auto tensors = list_of(op, "tensors to save", items[2], args.size());
    std::vector<py::object> states(args.size());
    if (items.size() > 3) states = list_of(op, "state to keep", items[3], args.size());
    for (size_t k = 0; k < args.size(); ++k) {
      out.to_save.push_back(kept_from(op, tensors[k], states[k], input, args));
    }
    return out;
  });
}

void PythonOpCalls::call_save_ctx(const FusibleOperation& op, CtxList ctxs, const Value& input,
                                  FuserForwardResult& result, ArgsList args) {
  with_python([&] {
    const py::handle self = object_of(op);
    py::list tensors;
    for (size_t k = 0; k < ctxs.size(); ++k) {
      ctxs[k]->state = result.to_save[k].state;
      ctxs[k]->bound = result.to_save[k].bound;
      py::tuple to_save(result.to_save[k].tensors.size());
      for (size_t i = 0; i < to_save.size(); ++i) to_save[i] = wrap(result.to_save[k].tensors[i]);
      tensors.append(to_save);
    }
    Given given;
    const py::object x = given.value(input, args.front().requires_grad.input);
    if (form_ == Form::OpSplit) {
      self.attr("op_forward_save_ctx")(py::cast(share(*ctxs[0])), x, tensors[0],
                                       **forward_kwargs(form_, args, given));
    } else {
      self.attr("fuser_forward_save_ctx")(context_list(ctxs), x, tensors,
                                          **forward_kwargs(form_, args, given));
    }
    for (OperationContext* ctx : ctxs) given.restore(*ctx);
  });
}

FuserForwardResult PythonOpCalls::call_forward(FusibleOperation& op, CtxList ctxs,
                                               const Value& input, ArgsList args) {
  if (is_op_form(form_)) {
    const auto& basic = static_cast<const BasicOperation&>(op);
    LIGATURE_CHECK_STATE(basic.num_extra_inputs() == 0 && basic.num_extra_outputs() == 0, "[",
                         op.label(), "] has ", basic.num_extra_inputs(), " extra inputs and ",
                         basic.num_extra_outputs(),
                         " extra outputs, so it must define fuser_forward and fuser_backward");
  }
  if (form_ == Form::OpSplit || form_ == Form::FuserSplit) {
    return op.FusibleOperation::fuser_forward(ctxs, input, args);
  }
  LIGATURE_CHECK_STATE(form_ != Form::None, "[", op.label(), "] has no forward pass");
  return with_python([&] {
    const py::handle self = object_of(op);
    FuserForwardResult out;
    Given given;
    const py::object x = given.value(input, args.front().requires_grad.input);
    if (form_ == Form::OpClassic) {
      const py::object y = self.attr("op_forward")(py::cast(share(*ctxs[0])), x,
                                                   **forward_kwargs(form_, args, given));
      out.output = given.back(unwrap(y, "[" + op.label() + "] the output"));
      out.extra_outputs.resize(1);
    } else {
      const auto items = tuple_of(
          op, "fuser_forward",
          self.attr("fuser_forward")(context_list(ctxs), x, **forward_kwargs(form_, args, given)),
          2, 2);
      out.output = given.back(unwrap(items[0], "[" + op.label() + "] the output"));
      for (const auto& extra : list_of(op, "extra outputs", items[1], args.size())) {
        out.extra_outputs.push_back(
            given.back(unwrap_list(extra, "[" + op.label() + "] an extra output")));
      }
    }
    // What is not needed is not kept, whatever the method saved.
    for (size_t k = 0; k < ctxs.size(); ++k) {
      if (args[k].requires_grad.op) {
        given.restore(*ctxs[k]);
      } else {
        ctxs[k]->save_for_backward({});
      }
    }
    return out;
  });
}

FuserBackwardResult PythonOpCalls::call_backward(const FusibleOperation& op, CtxList ctxs,
                                                 const Value& grad_output,
                                                 GradList grad_extra_outputs) {
  return with_python([&] {
    const py::handle self = object_of(op);
    FuserBackwardResult out;
    const Target before = ctxs[0]->grad_input_target();
    if (before) const_cast<Quantizer*>(before.quantizer)->usage = before.usage;
    const std::string what = "[" + op.label() + "] a gradient";
    if (is_op_form(form_)) {
      const auto items =
          tuple_of(op, "op_backward",
                   self.attr("op_backward")(py::cast(share(*ctxs[0])), wrap(grad_output)), 2, 2);
      out.grad_input = unwrap(items[0], what);
      out.grad_params.push_back(unwrap_list(items[1], what));
      out.grad_extra_inputs.resize(1);
      return out;
    }
    py::list grads;
    for (const auto& per_op : grad_extra_outputs) grads.append(wrap_all(per_op));
    const auto items =
        tuple_of(op, "fuser_backward",
                 self.attr("fuser_backward")(context_list(ctxs), wrap(grad_output),
                                             py::arg("basic_op_grad_extra_outputs") = grads),
                 3, 3);
    out.grad_input = unwrap(items[0], what);
    for (const auto& item : list_of(op, "parameter gradients", items[1], ctxs.size())) {
      out.grad_params.push_back(unwrap_list(item, what));
    }
    for (const auto& item : list_of(op, "extra input gradients", items[2], ctxs.size())) {
      out.grad_extra_inputs.push_back(unwrap_list(item, what));
    }
    return out;
  });
}

void PythonOperation::pre_first_fuser_forward() {
  if (!methods_.pre_forward) return;
  with_python([&] { object_of(*this).attr("pre_first_fuser_forward")(); });
}

void PythonOperation::pre_fuser_forward(bool requires_grad) {
  if (!methods_.pre_forward) return;
  with_python([&] {
    object_of(*this).attr("pre_fuser_forward")(py::arg("requires_grad") = requires_grad);
  });
}

// None, where a recipe would give it a quantizer, means that nobody is to quantize for it.
QuantizerPtr PythonOperation::ask_for_quantizer(const char* method) {
  return with_python([&]() -> QuantizerPtr {
    py::object quantizer = object_of(*this).attr(method)();
    if (quantizer.is_none() && methods_.quantizer_roles) {
      return std::make_shared<PythonQuantizer>(quantizer);
    }
    return quantizer_from(quantizer);
  });
}

QuantizerPtr PythonOperation::get_input_quantizer() {
  return methods_.input_quantizer ? ask_for_quantizer("get_input_quantizer") : nullptr;
}

QuantizerPtr PythonOperation::get_grad_output_quantizer() {
  return methods_.grad_output_quantizer ? ask_for_quantizer("get_grad_output_quantizer") : nullptr;
}

std::vector<QuantizerRole> PythonOperation::ask_for_roles(const char* mode) const {
  if (!methods_.quantizer_roles) return {};
  return with_python([&] {
    std::vector<QuantizerRole> roles;
    for (const auto& role : object_of(*this).attr("_quantizer_roles")(mode)) {
      roles.push_back(role_from(role));
    }
    return roles;
  });
}

std::vector<QuantizerRole> PythonOperation::forward_quantizer_roles() const {
  return ask_for_roles("forward");
}

std::vector<QuantizerRole> PythonOperation::backward_quantizer_roles() const {
  return ask_for_roles("backward");
}

void bind_guests(py::module_& m) {
  py::class_<PythonOperation, BasicOperation, std::shared_ptr<PythonOperation>>(m,
                                                                                "PythonOperation")
      .def(py::init([](std::string name, const std::string& form, bool pre_forward,
                       bool input_quantizer, bool grad_output_quantizer, bool quantizer_roles) {
             const PythonOpMethods methods{pre_forward, input_quantizer, grad_output_quantizer,
                                           quantizer_roles};
             return std::make_shared<PythonOperation>(std::move(name), form_from_string(form),
                                                      methods);
           }),
           py::arg("name"), py::arg("form"), py::arg("pre_forward"), py::arg("input_quantizer"),
           py::arg("grad_output_quantizer"), py::arg("quantizer_roles"))
      .def("set_num_extra", &PythonOperation::set_num_extra);
  py::class_<PythonFusedOperation, FusibleOperation, std::shared_ptr<PythonFusedOperation>>(
      m, "PythonFusedOperation")
      .def(py::init([](std::string name, const py::handle& ops, const std::string& form,
                       bool internal_channels) {
             return std::make_shared<PythonFusedOperation>(
                 name, operations_of(ops, "[" + name + "] basic_ops"), form_from_string(form),
                 internal_channels);
           }),
           py::arg("name"), py::arg("ops"), py::arg("form"), py::arg("internal_channels"));
}

}  // namespace ligature::python
