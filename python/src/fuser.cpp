// OperationFuser in Python: collects what a call computes with, and runs it without the GIL.
#include "ligature/fuser/fuser.h"

#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"
#include "guest.h"
#include "host.h"
#include "ligature/compile/flat.h"

namespace ligature::python {
namespace {

Recompute recompute_from_string(const std::string& name) {
  if (name == "none") return Recompute::None;
  LIGATURE_CHECK(name == "cheap", "recompute must be 'none' or 'cheap', got '", name, "'");
  return Recompute::Cheap;
}

/// As pybind11's, without what that looks up for interpreters within the interpreter.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

class PythonFuser {
 public:
  /// `ops` is kept by the Python object, where the garbage collector sees it, not from here.
  PythonFuser(const py::list& ops, const std::string& recompute, bool fuse, bool use_channels,
              std::vector<std::string> open_channels, std::vector<std::string> strict)
      : shared_(std::make_shared<OperationFuser>(
            prepare(ops), FuserOptions{recompute_from_string(recompute), fuse, use_channels,
                                       std::move(open_channels), std::move(strict)})),
        fuser_(*shared_),
        kept_(ops) {
    for (const auto& op : fuser_.basic_ops()) {
      sources_.emplace_back(python_of(op), *op);
      reads_training_ = reads_training_ || sources_.back().uses_training();
    }
  }

  py::object call(const py::handle& input, const py::args& extra_inputs, const py::handle& kwargs) {
    const at::ArrayRef<PyObject*> extras(PySequence_Fast_ITEMS(extra_inputs.ptr()),
                                         extra_inputs.size());
    return run(input, extras, kwargs.is_none() ? std::vector<OpKwargs>() : unwrap_kwargs(kwargs));
  }

  py::object run(const py::handle& input, at::ArrayRef<PyObject*> extra_inputs,
                 std::vector<OpKwargs> kwargs) {
    fuser_.prepare();
    Call call;
    call.input = unwrap_input(input);
    call.extra_inputs.reserve(extra_inputs.size());
    for (PyObject* extra : extra_inputs) {
      call.extra_inputs.push_back(unwrap(extra, "an extra input"));
    }
    collect(call);
    call.kwargs = std::move(kwargs);
    std::vector<Tensor> outputs;
    {
      KeepScope scope(kept_);
      const WithoutGil no_gil;
      outputs = fuser_.run(std::move(call));
    }
    if (outputs.size() == 1) return wrap(outputs[0]);
    py::tuple result(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) result[i] = wrap(outputs[i]);
    return result;
  }

  /// `example`: the input and the extra inputs, or None for the last call. `device`: what tensors
  /// without memory stand for, or None. Gives the explanation and the outputs, without memory.
  py::tuple explain(const py::object& example, const std::optional<at::Device>& device) {
    Call call;
    std::optional<Situation> situation;
    if (!example.is_none()) fuser_.prepare();
    collect(call);
    if (!example.is_none()) {
      std::vector<Tensor> tensors = unwrap_list(example, "an example of explain()");
      LIGATURE_CHECK(!tensors.empty(), "explain: an example input is needed");
      situation = Situation::of(tensors[0], std::vector<Tensor>(tensors.begin() + 1, tensors.end()),
                                device ? *device : fuser_.device_of(call));
    }
    ExplainedCall explained;
    {
      KeepScope scope(kept_);
      py::gil_scoped_release no_gil;
      explained = fuser_.explain_call(std::move(call), situation);
    }
    py::list outputs;
    for (const Tensor& output : explained.outputs) outputs.append(wrap(output));
    return py::make_tuple(Explanation{{std::move(explained.part)}}, outputs);
  }

  py::object steps(bool forward) const {
    std::shared_ptr<const Plan> plan;
    {
      py::gil_scoped_release no_gil;
      plan = fuser_.plan();
    }
    if (plan == nullptr) return py::none();
    py::list out;
    for (const PlanStep& step : forward ? plan->forward : plan->backward) {
      py::list indices;
      for (size_t i = step.first; i < step.first + step.count; ++i) indices.append(i);
      out.append(py::make_tuple(kept_object(step.op), indices));
    }
    return out;
  }

  py::list considered() const {
    std::shared_ptr<const Plan> plan;
    {
      py::gil_scoped_release no_gil;
      plan = fuser_.plan();
    }
    py::list out;
    if (plan == nullptr) return out;
    for (const auto& report : plan->reports) {
      for (const Consideration& c : report.considered) {
        out.append(py::make_tuple(pass_name(report.pass), c.fusion, c.position, c.reason));
      }
    }
    return out;
  }

  py::list basic_ops() const {
    py::list out;
    for (const auto& op : fuser_.basic_ops()) out.append(python_of(op));
    return out;
  }

  OperationFuser& core() { return fuser_; }
  /// Under which a compiled graph finds it, as long as it lives.
  int64_t number() const { return compile::register_fuser(shared_); }

 private:
  static OpList prepare(const py::list& ops) {
    OpList list = operations_of(ops, "the operations of a fuser");
    for (const auto& op : list) {
      for (const auto& basic : op->basic_ops()) {
        if (auto* guest = dynamic_cast<GuestOperation*>(basic.get())) {
          const py::object self = python_of(basic);
          guest->set_num_extra(self.attr("num_extra_inputs").cast<size_t>(),
                               self.attr("num_extra_outputs").cast<size_t>());
        }
      }
    }
    return list;
  }

  void collect(Call& call) const {
    call.param_offsets.reserve(sources_.size() + 1);
    call.param_offsets.push_back(0);
    if (reads_training_) call.training.reserve(sources_.size());
    for (const ParameterSource& source : sources_) {
      source.collect(call.params);
      call.param_offsets.push_back(call.params.size());
      if (reads_training_) call.training.push_back(source.training());
    }
    call.keep_alive = hold(py::reinterpret_borrow<py::object>(kept_));
  }

  /// One Python object per operation of a plan, also for those made in C++.
  py::object kept_object(const OpPtr& op) const {
    if (op->host != nullptr) return python_of(op);
    for (const auto& item : kept_) {
      py::object handle = py::getattr(item, "_op", py::none());
      if (!handle.is_none() && handle.cast<FusibleOperation*>() == op.get()) {
        return py::reinterpret_borrow<py::object>(item);
      }
    }
    py::object made = python_of(op);
    kept_.attr("append")(made);
    return made;
  }

  Value unwrap_input(const py::handle& input) const {
    LIGATURE_CHECK_TYPE(THPVariable_Check(input.ptr()), "[", fuser_.basic_ops().front()->label(),
                        "] input must be a tensor, got ",
                        py::str(py::type::of(input)).cast<std::string>());
    return THPVariable_Unpack(input.ptr());
  }

  static std::vector<OpKwargs> unwrap_kwargs(const py::handle& list) {
    std::vector<OpKwargs> out;
    for (const auto& item : list) {
      OpKwargs& kwargs = out.emplace_back();
      const auto dict = py::cast<py::dict>(item);
      for (const auto& [name, value] : dict) {
        kwargs.names.push_back(name.cast<std::string>());
        if (auto plain = to_plain(value)) kwargs.values.set(kwargs.names.back(), std::move(*plain));
      }
      kwargs.host = hold(dict);
    }
    return out;
  }

  std::shared_ptr<OperationFuser> shared_;
  OperationFuser& fuser_;
  std::vector<ParameterSource> sources_;
  bool reads_training_ = false;
  py::handle kept_;
};

/// Tells whether the modules in a container, or the hooks on them, are still those that were
/// grouped. Everything it looks at is kept by the container.
class ModuleWatch {
 public:
  ModuleWatch(const py::dict& modules, const py::list& hook_dicts)
      : modules_(modules), hook_dicts_(hook_dicts) {
    for (const auto& item : modules) children_.push_back(item.second.ptr());
    for (const auto& dict : hook_dicts) counts_.push_back(PyDict_GET_SIZE(dict.ptr()));
  }

  bool changed() const {
    if (static_cast<size_t>(PyDict_GET_SIZE(modules_.ptr())) != children_.size()) return true;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (size_t i = 0; PyDict_Next(modules_.ptr(), &position, &key, &value) != 0; ++i) {
      if (children_[i] != value) return true;
    }
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (PyDict_GET_SIZE(PyList_GET_ITEM(hook_dicts_.ptr(), i)) != counts_[i]) return true;
    }
    return false;
  }

 private:
  py::handle modules_;
  py::handle hook_dicts_;
  std::vector<PyObject*> children_;
  std::vector<Py_ssize_t> counts_;
};

/// The C++ object of a class that pybind11 bound, with no base beside it.
template <class T>
T& bound(PyObject* object) {
  const auto* instance = reinterpret_cast<py::detail::instance*>(object);
  if (!instance->simple_layout) return py::handle(object).cast<T&>();
  return *static_cast<T*>(instance->simple_value_holder[0]);
}

/// `self`: a fuser and the watch of the container that runs it, or None. Gives NotImplemented where
/// the container has changed.
PyObject* run_watched(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  try {
    PyObject* watch = PyTuple_GET_ITEM(self, 1);
    if (watch != Py_None && bound<ModuleWatch>(watch).changed()) Py_RETURN_NOTIMPLEMENTED;
    LIGATURE_CHECK_TYPE(count > 0, "a fuser must be given an input, got none");
    const at::ArrayRef<PyObject*> extras(const_cast<PyObject**>(args) + 1, count - 1);
    return bound<PythonFuser>(PyTuple_GET_ITEM(self, 0)).run(args[0], extras, {}).release().ptr();
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }
}

/// A function of the input and the extra inputs. Python calls it without pybind11's search for an
/// overload, which takes as long as a small fuser's forward; the garbage collector sees through it.
py::object runner(const py::object& fuser, const py::object& watch) {
  static PyMethodDef definition = {
      "run_watched", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_watched)),
      METH_FASTCALL, nullptr};
  LIGATURE_CHECK_TYPE(py::isinstance<PythonFuser>(fuser), "runner: wanted a fuser");
  LIGATURE_CHECK_TYPE(watch.is_none() || py::isinstance<ModuleWatch>(watch),
                      "runner: wanted a watch or None");
  const py::tuple self = py::make_tuple(fuser, watch);
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

}  // namespace

void bind_fuser(py::module_& m) {
  py::class_<PythonFuser>(m, "OperationFuser")
      .def(py::init<const py::list&, const std::string&, bool, bool, std::vector<std::string>,
                    std::vector<std::string>>(),
           py::arg("ops"), py::arg("recompute"), py::arg("fuse"), py::arg("use_channels"),
           py::arg("open_channels"), py::arg("strict"))
      .def("_explain", &PythonFuser::explain, py::arg("example"), py::arg("device"))
      .def("__call__", &PythonFuser::call, py::arg("input"), py::kw_only(),
           py::arg("basic_op_kwargs") = py::none())
      .def_property_readonly("_forward_ops", [](const PythonFuser& f) { return f.steps(true); })
      .def_property_readonly("_backward_ops", [](const PythonFuser& f) { return f.steps(false); })
      .def_property_readonly("_considered", &PythonFuser::considered)
      .def_property_readonly("_basic_ops", &PythonFuser::basic_ops)
      .def_property_readonly("_number", &PythonFuser::number)
      .def_property_readonly("_num_basic_ops",
                             [](PythonFuser& f) { return f.core().num_basic_ops(); })
      .def_property_readonly("num_extra_inputs",
                             [](PythonFuser& f) { return f.core().num_extra_inputs(); })
      .def_property_readonly("num_extra_outputs",
                             [](PythonFuser& f) { return f.core().num_extra_outputs(); })
      .def_property_readonly("_caller_inputs",
                             [](PythonFuser& f) { return f.core().wiring().caller_inputs; })
      .def_property_readonly("_caller_outputs",
                             [](PythonFuser& f) { return f.core().wiring().caller_outputs; })
      .def_property_readonly("_output_to_user",
                             [](PythonFuser& f) { return f.core().wiring().output_to_user; });
  py::class_<ModuleWatch>(m, "ModuleWatch")
      .def(py::init<const py::dict&, const py::list&>())
      .def("changed", &ModuleWatch::changed);
  m.def("runner", &runner, py::arg("fuser"), py::arg("watch"));
}

}  // namespace ligature::python
