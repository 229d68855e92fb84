// OperationFuser in Python: collects what a call computes with, and runs it without the GIL.
#include "ligature/fuser/fuser.h"

#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>

#include "bindings.h"
#include "collected.h"
#include "distributed.h"
#include "host.h"
#include "ligature/base/modes.h"
#include "ligature/compile/flat.h"
#include "ligature/explain/explain.h"
#include "odd_tensors.h"
#include "python_op.h"

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
  /// `kept` holds one list: that of the modules, then the fused operations of plans. Graphs hold
  /// that inner list; so what they need stays when plans are dropped, and another list takes its
  /// place.
  PythonFuser(const py::list& ops, const py::list& kept, const std::string& recompute, bool fuse,
              bool use_channels, std::vector<std::string> open_channels,
              std::vector<std::string> strict)
      : shared_(std::make_shared<OperationFuser>(
            prepare(ops), FuserOptions{recompute_from_string(recompute), fuse, use_channels,
                                       std::move(open_channels), std::move(strict)})),
        fuser_(*shared_),
        refs{kept} {
    for (const auto& op : fuser_.basic_ops()) {
      sources_.emplace_back(python_of(op), *op);
      reads_training_ = reads_training_ || sources_.back().uses_training();
      if (!op->is_python_op()) add_first(python_of(op));
    }
  }

  py::object call(const py::handle& self, const py::handle& input, const py::args& extra_inputs,
                  const py::handle& kwargs) {
    const at::ArrayRef<PyObject*> extras(PySequence_Fast_ITEMS(extra_inputs.ptr()),
                                         extra_inputs.size());
    return run(self, input, extras, kwargs);
  }

  /// `kwargs`: of each basic operation, or None.
  py::object run(const py::handle& self, const py::handle& input,
                 at::ArrayRef<PyObject*> extra_inputs, const py::handle& kwargs) {
    check_alive();
    const bool traced = has_tracer();
    if (traced) views().attr("refuse_onnx")();
    prepare();
    Call call;
    Overriding overriding;
    const auto take = [&](PyObject* tensor) {
      if (overrides_functions(tensor)) overriding.push_back(tensor);
      return THPVariable_Unpack(tensor);
    };
    call.input = take(checked_input(input));
    call.extra_inputs.reserve(extra_inputs.size());
    for (PyObject* extra : extra_inputs) {
      const bool none = extra == Py_None;  // reported later, with its number
      LIGATURE_CHECK_TYPE(none || THPVariable_Check(extra), "an extra input must be a tensor, got ",
                          py::str(py::type::of(py::handle(extra))).cast<std::string>());
      call.extra_inputs.push_back(none ? Tensor() : take(extra));
    }
    collect(call, &overriding);
    if (!overriding.empty()) return run_overridden(self, overriding, input, extra_inputs, kwargs);
    if (!kwargs.is_none()) call.kwargs = unwrap_kwargs(kwargs);
    if (!traced && (has_modes() || is_fake(call.input.identity()))) {
      py::object seen = run_watched_by_modes(self, input, extra_inputs, kwargs, call);
      if (!seen.is(py::handle(Py_NotImplemented))) return seen;
    }
    std::vector<Tensor> outputs;
    {
      const RunScope scope(*this, call);
      const WithoutGil no_gil;
      outputs = fuser_.run(std::move(call));
    }
    if (fuser_.dropped_plans() != dropped_) drop_operations();
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
    check_alive();
    if (!example.is_none()) prepare();
    collect(call);
    if (!example.is_none()) {
      std::vector<Tensor> tensors = unwrap_list(example, "an example of explain()");
      LIGATURE_CHECK(!tensors.empty(), "explain: an example input is needed");
      situation = Situation::of(tensors[0], std::vector<Tensor>(tensors.begin() + 1, tensors.end()),
                                device ? *device : fuser_.device_of(call));
    }
    ExplainedCall explained;
    {
      const RunScope scope(*this, call);
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

  /// Lets go of the fused operations that no plan has any more.
  void drop_operations() {
    if (refs.empty()) return;
    const py::object before = py::reinterpret_borrow<py::object>(kept_now());
    const size_t size = py::len(before);
    const uint64_t dropped = fuser_.dropped_plans();
    std::unordered_set<const FusibleOperation*> used;
    {
      py::gil_scoped_release no_gil;
      std::vector<std::shared_ptr<const Plan>> plans = fuser_.plans();
      for (auto& plan : compile::traced_plans(fuser_)) plans.push_back(std::move(plan));
      for (const auto& plan : plans) {
        for (const auto* steps : {&plan->forward, &plan->backward}) {
          for (const PlanStep& step : *steps) used.insert(step.op.get());
        }
      }
    }
    // A call in another thread may be about to add some: then it is done after a later one.
    if (running_ > 0 || py::len(before) != size || !kept_now().is(before)) return;
    dropped_ = dropped;
    py::list now;
    for (const auto& item : before) {
      const py::object op = py::getattr(item, "_op", py::none());
      const bool modules = py::isinstance<py::list>(item);
      if (modules || used.contains(op.cast<FusibleOperation*>())) now.append(item);
    }
    py::reinterpret_borrow<py::list>(refs[0])[0] = now;
  }

  /// That it keeps.
  size_t num_plans() const {
    py::gil_scoped_release no_gil;
    std::unordered_set<const Plan*> all;
    for (const auto& plan : fuser_.plans()) all.insert(plan.get());
    return all.size();
  }

  OperationFuser& core() { return fuser_; }
  /// Under which a compiled graph finds it, as long as it lives.
  int64_t number() const { return compile::register_fuser(shared_); }

 private:
  /// A built-in operation whose module does something before the first forward.
  void add_first(const py::object& module) {
    constexpr const char* kName = "pre_first_fuser_forward";
    static auto* base =
        new py::object(py::module_::import("ligature.ops.fusible").attr("FusibleOperation"));
    if (!py::type::of(module).attr(kName).is(base->attr(kName))) first_.push_back(module);
  }

  void prepare() {
    fuser_.prepare();
    for (const py::handle& module : std::exchange(first_, {})) {
      module.attr("pre_first_fuser_forward")();
    }
  }

  static OpList prepare(const py::list& ops) {
    OpList list = operations_of(ops, "the operations of a fuser");
    for (const auto& op : list) {
      for (const auto& basic : op->basic_ops()) {
        if (auto* written = dynamic_cast<PythonOperation*>(basic.get())) {
          const py::object self = python_of(basic);
          written->set_num_extra(self.attr("num_extra_inputs").cast<size_t>(),
                                 self.attr("num_extra_outputs").cast<size_t>());
        }
      }
    }
    return list;
  }

  /// As a function of torch's that is given tensors of classes with __torch_function__: those
  /// decide what it does and of which class its results are.
  static py::object run_overridden(const py::handle& self, const Overriding& overriding,
                                   const py::handle& input, at::ArrayRef<PyObject*> extra_inputs,
                                   const py::handle& kwargs) {
    py::list args;
    args.append(input);
    for (PyObject* extra : extra_inputs) args.append(py::handle(extra));
    py::tuple relevant(overriding.size());
    for (size_t i = 0; i < overriding.size(); ++i) relevant[i] = py::handle(overriding[i]);
    py::dict named;
    if (!kwargs.is_none()) named["basic_op_kwargs"] = kwargs;
    return py::module_::import("torch.overrides")
        .attr("handle_torch_function")(self, relevant, *args, **named);
  }

  void collect(Call& call, Overriding* overriding = nullptr) const {
    call.param_offsets.reserve(sources_.size() + 1);
    call.param_offsets.push_back(0);
    if (reads_training_) call.training.reserve(sources_.size());
    for (const ParameterSource& source : sources_) {
      source.collect(call.params, overriding);
      call.param_offsets.push_back(call.params.size());
      if (reads_training_) call.training.push_back(source.training());
    }
    call.keep_alive = hold(py::reinterpret_borrow<py::object>(kept_now()));
  }

  void check_alive() const {
    LIGATURE_CHECK_STATE(!refs.empty(), "a fuser that is being destroyed cannot be called");
  }

  py::handle kept_now() const {
    check_alive();
    return PyList_GET_ITEM(refs[0].ptr(), 0);
  }

  /// While it may plan for this call; entered and left with the GIL.
  class RunScope {
   public:
    RunScope(PythonFuser& fuser, Call& call)
        : fuser_(fuser),
          kept_(py::reinterpret_borrow<py::object>(fuser.kept_now()), Held::Ownership::Owned) {
      call.planner = &kept_;
      ++fuser_.running_;
    }
    ~RunScope() { --fuser_.running_; }
    RunScope(const RunScope&) = delete;
    RunScope& operator=(const RunScope&) = delete;

   private:
    PythonFuser& fuser_;
    Held kept_;
  };

  /// One Python object per operation of a plan, also for those made in C++.
  py::object kept_object(const OpPtr& op) const {
    if (held(op->bound)) return python_of(op);
    for (const auto& item : kept_now()) {
      py::object handle = py::getattr(item, "_op", py::none());
      if (!handle.is_none() && handle.cast<FusibleOperation*>() == op.get()) {
        return py::reinterpret_borrow<py::object>(item);
      }
    }
    py::object made = python_of(op);
    kept_now().attr("append")(made);
    return made;
  }

  static py::module_ views() { return py::module_::import("ligature.ops._traced.watched"); }

  /// NotImplemented where it cannot be, and need not be, one call that modes see.
  py::object run_watched_by_modes(const py::handle& self, const py::handle& input,
                                  at::ArrayRef<PyObject*> extra_inputs, const py::handle& kwargs,
                                  Call& call) {
    std::string why_high_precision;
    {
      const RunScope scope(*this, call);
      const WithoutGil no_gil;
      why_high_precision = fuser_.prepare_flat(call);
    }
    py::list params;
    for (const Tensor& param : call.params) params.append(wrap(param));
    py::list counts, training, extras;
    for (size_t i = 0; i < fuser_.num_basic_ops(); ++i) {
      counts.append(call.param_offsets[i + 1] - call.param_offsets[i]);
      training.append(call.is_training(i));
    }
    for (PyObject* extra : extra_inputs) extras.append(py::handle(extra));
    return views().attr("call")(self, input, params, extras, kwargs, py::tuple(counts),
                                py::tuple(training), !why_high_precision.empty());
  }

  PyObject* checked_input(const py::handle& input) const {
    const auto type = [&] { return py::str(py::type::of(input)).cast<std::string>(); };
    LIGATURE_CHECK_TYPE(THPVariable_Check(input.ptr()), "[", fuser_.basic_ops().front()->label(),
                        "] input must be a tensor, got ", type(),
                        type().find("torch.fx") == std::string::npos
                            ? ""
                            : ": torch.fx.symbolic_trace cannot look into operations; make them "
                              "leaves of the graph (Tracer.is_leaf_module), or use torch.export");
    return input.ptr();
  }

  static std::vector<OpKwargs> unwrap_kwargs(const py::handle& list) {
    std::vector<OpKwargs> out;
    const auto name = [](const py::handle& given) {
      return given.is_none() ? "None" : py::str(py::type::of(given)).cast<std::string>();
    };
    LIGATURE_CHECK_TYPE(py::isinstance<py::sequence>(list),
                        "basic_op_kwargs must be a list of dicts, one per basic operation, got ",
                        name(list));
    for (const auto& item : list) {
      LIGATURE_CHECK_TYPE(py::isinstance<py::dict>(item), "basic_op_kwargs must be a list of ",
                          "dicts, one per basic operation, got ", name(item), " in it");
      OpKwargs& kwargs = out.emplace_back();
      const auto dict = py::cast<py::dict>(item);
      for (const auto& [key, value] : dict) {
        kwargs.names.push_back(key.cast<std::string>());
        if (THPVariable_Check(value.ptr())) {
          kwargs.tensors.emplace_back(kwargs.names.back(), THPVariable_Unpack(value.ptr()));
        } else if (auto plain = to_plain(value)) {
          kwargs.values.set(kwargs.names.back(), std::move(*plain));
        }
      }
      kwargs.bound = hold(dict);
    }
    return out;
  }

  std::shared_ptr<OperationFuser> shared_;
  OperationFuser& fuser_;
  std::vector<ParameterSource> sources_;  // they borrow modules that `refs` keeps
  std::vector<py::handle> first_;         // likewise: those to be prepared in the first call
  bool reads_training_ = false;
  int running_ = 0;
  uint64_t dropped_ = 0;

 public:
  Refs refs;  ///< `kept`
};

/// Tells whether a container's modules, and the hooks on them, are still those that were grouped.
class ModuleWatch {
 public:
  ModuleWatch(const py::dict& modules, const py::list& hook_dicts) : refs{modules} {
    for (const auto& item : modules)
      refs.push_back(py::reinterpret_borrow<py::object>(item.second));
    num_children_ = refs.size() - 1;
    for (const auto& dict : hook_dicts) {
      counts_.push_back(PyDict_Size(dict.ptr()));
      refs.push_back(py::reinterpret_borrow<py::object>(dict));
    }
  }

  bool changed() const {
    if (refs.empty()) return true;  // cleared by the garbage collector
    PyObject* modules = refs[0].ptr();
    if (static_cast<size_t>(PyDict_GET_SIZE(modules)) != num_children_) return true;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    const py::object* next = &refs[1];
    while (PyDict_Next(modules, &position, &key, &value) != 0) {
      if ((next++)->ptr() != value) return true;
    }
    for (const Py_ssize_t count : counts_) {
      if (PyDict_GET_SIZE((next++)->ptr()) != count) return true;
    }
    return false;
  }

  Refs refs;  ///< the dict of modules, each of them, the dicts of hooks

 private:
  size_t num_children_ = 0;
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
    PyObject* fuser = PyTuple_GET_ITEM(self, 0);
    return bound<PythonFuser>(fuser).run(fuser, args[0], extras, Py_None).release().ptr();
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
  py::class_<PythonFuser>(m, "OperationFuser", collected<PythonFuser>())
      .def(py::init<const py::list&, const py::list&, const std::string&, bool, bool,
                    std::vector<std::string>, std::vector<std::string>>(),
           py::arg("ops"), py::arg("kept"), py::arg("recompute"), py::arg("fuse"),
           py::arg("use_channels"), py::arg("open_channels"), py::arg("strict"))
      .def("_explain", &PythonFuser::explain, py::arg("example"), py::arg("device"))
      .def(
          "__call__",
          [](const py::object& self, const py::handle& input, const py::args& extra_inputs,
             const py::handle& kwargs) {
            return self.cast<PythonFuser&>().call(self, input, extra_inputs, kwargs);
          },
          py::arg("input"), py::kw_only(), py::arg("basic_op_kwargs") = py::none())
      .def_property_readonly("_forward_ops", [](const PythonFuser& f) { return f.steps(true); })
      .def_property_readonly("_backward_ops", [](const PythonFuser& f) { return f.steps(false); })
      .def_property_readonly("_considered", &PythonFuser::considered)
      .def_property_readonly("_basic_ops", &PythonFuser::basic_ops)
      .def_property_readonly("_number", &PythonFuser::number)
      .def_property_readonly("_partial_gradients",
                             [](PythonFuser& f) { return partial_gradients(f.core()); })
      .def("_drop_operations", &PythonFuser::drop_operations)
      .def_property_readonly("_num_plans", &PythonFuser::num_plans)
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
  py::class_<ModuleWatch>(m, "ModuleWatch", collected<ModuleWatch>())
      .def(py::init<const py::dict&, const py::list&>())
      .def("changed", &ModuleWatch::changed);
  m.def("runner", &runner, py::arg("fuser"), py::arg("watch"));
}

}  // namespace ligature::python
