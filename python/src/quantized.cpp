// Quantizers and quantized tensors in Python: handles without behaviour of their own. The classes
// that users see are in ligature/quantization.
#include "quantized.h"

#include <cmath>

#include "bindings.h"
#include "ligature/format/format_fields.h"
#include "ligature/kernels/quantized_gemm.h"
#include "ligature/meta.h"
#include "ligature/quantized/quantized_parts.h"
#include "ligature/recipes/weights.h"
#include "python_op.h"

namespace ligature::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// -- a format as plain fields

py::dict dict_of(const Format& format) {
  py::dict out;
  const JsonValue fields = fields_of(format);
  for (const auto& [name, value] : *fields.get<JsonValue::Object>()) {
    if (const auto* text = value.get<std::string>()) {
      out[name.c_str()] = *text;
    } else if (const auto* flag = value.get<bool>()) {
      out[name.c_str()] = *flag;
    } else {
      out[name.c_str()] = *value.get<double>();
    }
  }
  return out;
}

Format format_from(const py::dict& fields) { return format_from_fields(json_of(fields)); }

// -- quantizers

std::shared_ptr<Quantizer> make_quantizer(const py::dict& fields, bool rowwise, bool columnwise,
                                          const py::object& scale, const py::object& amax) {
  auto made = std::make_shared<Quantizer>(format_from(fields), Usage{rowwise, columnwise});
  if (made->format_tag().scaling == Scaling::Delayed) {
    made->delayed = std::make_shared<DelayedScale>();
    made->delayed->scale = unwrap(scale, "scale");
    made->delayed->amax = unwrap(amax, "amax");
    made->delayed->max_value = max_value(made->format_tag().element);
  }
  return made;
}

void set_reduce_amax(Quantizer& quantizer, const py::object& function) {
  if (function.is_none()) {
    quantizer.reduce_amax = nullptr;
    return;
  }
  auto keep = hold(function);
  quantizer.reduce_amax = [keep](Tensor& amax) { with_python([&] { held(keep)(wrap(amax)); }); };
}

/// Refuses parts that a tensor of this format cannot have: they come from files.
void check_side(const kernels::QuantizedMatrix& m, const Format& f, const SideLayout& layout,
                const std::string& which) {
  const auto check = [&](const char* name, const Tensor& t, const PartLayout& wanted) {
    const std::string subject = "the " + which + " " + name + " of a tensor in format " + f.name();
    LIGATURE_CHECK(t.defined() && wanted.fits(t), subject, " must be ", c10::toString(wanted.dtype),
                   " ", sizes_string(wanted.sizes), ", got ",
                   t.defined() ? to_string(ValueMeta::of(t)) : std::string("nothing"));
    const std::string why = why_unusable(t);
    LIGATURE_CHECK(why.empty(), subject, " must be ", why);
    LIGATURE_CHECK(!t.is_floating_point() || t.is_meta() || t.isfinite().all().item<bool>(),
                   subject, " must be finite");
  };
  check("data", m.data, layout.data);
  check("scale", m.scale, layout.scale);
  if (layout.amax) {
    check("amax", m.amax, *layout.amax);
  } else {
    LIGATURE_CHECK(!m.amax.defined(), "a tensor in format ", f.name(), " has no ", which, " amax");
  }
}

QuantizedPtr make_quantized(const py::dict& fields, const std::vector<int64_t>& sizes,
                            at::ScalarType dtype, const py::list& parts) {
  const Format format = Quantizer(format_from(fields)).format_tag();
  LIGATURE_CHECK(parts.size() == 6, "a quantized tensor has places for 6 parts, got ",
                 parts.size());
  std::array<Tensor, 6> t;
  for (size_t i = 0; i < t.size(); ++i) {
    t[i] = unwrap(parts[i], "a part of a quantized tensor");
    if (t[i].defined() && t[i].requires_grad() && why_unusable(t[i]).empty()) t[i] = t[i].detach();
  }
  kernels::QuantizedPair pair{{t[0], t[1], t[2]}, {t[3], t[4], t[5]}};
  LIGATURE_CHECK(pair.rowwise.defined() || pair.columnwise.defined(),
                 "a quantized tensor must have row-wise or column-wise data, got neither");
  LIGATURE_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                 "a quantized tensor stands for float32, bfloat16 or float16, got ",
                 c10::toString(dtype));
  for (int64_t size : sizes) {
    LIGATURE_CHECK(size >= 0, "a shape has no negative sizes, got ", sizes_string(sizes));
  }
  LIGATURE_CHECK(!sizes.empty(), "a quantized tensor has at least one dimension, got none");
  if (pair.rowwise.defined()) {
    check_side(pair.rowwise, format, rowwise_layout(format, sizes), "row-wise");
  }
  if (pair.columnwise.defined()) {
    check_side(pair.columnwise, format, columnwise_layout(format, sizes), "column-wise");
  }
  const std::string why = why_not_together(pair, [&](size_t i) {
    static constexpr std::array<const char*, 3> names{"data", "scale", "amax"};
    return std::string("the ") + (i < 3 ? "row-wise " : "column-wise ") + names[i % 3] +
           " of a tensor in format " + format.name();
  });
  LIGATURE_CHECK(why.empty(), why);
  return std::make_shared<QuantizedTensor>(format, sizes, dtype, pair);
}

py::tuple parts_of(const QuantizedTensor& q) {
  const auto& r = q.rowwise();
  const auto& c = q.columnwise();
  return py::make_tuple(wrap(r.data), wrap(r.scale), wrap(r.amax), wrap(c.data), wrap(c.scale),
                        wrap(c.amax));
}

void set_wrapper(const py::object& function) {
  if (function.is_none()) {
    set_quantized_wrapper(nullptr);
    return;
  }
  auto keep = hold(function);
  set_quantized_wrapper([keep](const QuantizedPtr& q) {
    return with_python([&] { return unwrap(held(keep)(q), "a quantized tensor"); });
  });
}

void bind_quantizer(py::module_& m) {
  py::class_<Quantizer, std::shared_ptr<Quantizer>>(m, "Quantizer", py::dynamic_attr())
      .def(py::init(&make_quantizer), py::arg("format"), py::arg("rowwise"), py::arg("columnwise"),
           py::arg("scale") = py::none(), py::arg("amax") = py::none())
      .def_property_readonly("format", &Quantizer::format)
      .def_property_readonly("fields", [](const Quantizer& q) { return dict_of(q.format_tag()); })
      .def_property(
          "rowwise", [](const Quantizer& q) { return q.usage.rowwise; },
          [](Quantizer& q, bool value) { q.usage.rowwise = value; })
      .def_property(
          "columnwise", [](const Quantizer& q) { return q.usage.columnwise; },
          [](Quantizer& q, bool value) { q.usage.columnwise = value; })
      .def_property(
          "scale", [](const Quantizer& q) { return wrap(q.delayed ? q.delayed->scale : Tensor()); },
          [](Quantizer& q, const Tensor& value) { q.delayed->set_scale(value); })
      .def_property(
          "amax", [](const Quantizer& q) { return wrap(q.delayed ? q.delayed->amax : Tensor()); },
          [](Quantizer& q, const Tensor& value) {
            if (!q.delayed->graph_scale.defined()) {
              q.delayed->amax = value;
            } else if (!q.delayed->amax.is_same(value)) {
              q.delayed->amax.copy_(value);  // graphs write there
            }
          })
      .def_property_readonly("reduces_amax",
                             [](const Quantizer& q) { return static_cast<bool>(q.reduce_amax); })
      .def("set_reduce_amax", &set_reduce_amax, py::arg("function"))
      .def(
          "quantize", [](const Quantizer& q, const Tensor& x) { return q.quantize(x); },
          py::arg("x"), NoGil())
      .def(
          "update",
          [](const Quantizer& q, const Tensor& x, const QuantizedPtr& to) {
            write_quantized(to, x, q);
          },
          py::arg("x"), py::arg("to"), NoGil())
      .def(
          "make_empty",
          [](const Quantizer& q, const std::vector<int64_t>& sizes, at::ScalarType dtype,
             at::Device device) { return q.make_empty(sizes, dtype, device); },
          py::arg("sizes"), py::arg("dtype"), py::arg("device"), NoGil())
      .def("why_not", &Quantizer::why_not, py::arg("x"))
      .def(
          "copy", [](const Quantizer& q, bool deep) { return deep ? deep_copy(q) : q.copy(); },
          py::arg("deep") = false, NoGil());
}

void bind_tensor(py::module_& m) {
  py::class_<QuantizedTensor, QuantizedPtr>(m, "QuantizedTensor")
      .def_property_readonly("format", &QuantizedTensor::format)
      .def_property_readonly("fields",
                             [](const QuantizedTensor& q) { return dict_of(q.format_tag()); })
      .def_property_readonly(
          "sizes", [](const QuantizedTensor& q) { return py::tuple(py::cast(q.sizes().vec())); })
      .def_property_readonly("dtype", &QuantizedTensor::dtype)
      .def_property_readonly("device", &QuantizedTensor::device)
      .def_property_readonly("bytes", &QuantizedTensor::bytes)
      .def_property_readonly("is_inference", &QuantizedTensor::is_inference)
      .def_property_readonly("parts", &parts_of)
      .def_property_readonly("tensors", &QuantizedTensor::tensors)
      .def_property_readonly("quantizer", &quantizer_for)
      .def(
          "dequantize",
          [](const QuantizedTensor& q, std::optional<at::ScalarType> dtype) {
            return q.dequantize(dtype);
          },
          py::arg("dtype") = py::none(), NoGil())
      .def("with_tensors", &QuantizedTensor::with_tensors, py::arg("tensors"))
      .def("view", &QuantizedTensor::view, py::arg("sizes"))
      .def("with_dtype", &QuantizedTensor::with_dtype, py::arg("dtype"))
      .def(
          "with_quantizer",
          [](const QuantizedTensor& q, const std::shared_ptr<Quantizer>& quantizer) {
            auto made = std::make_shared<QuantizedTensor>(q);
            made->set_quantizer(quantizer);
            return made;
          },
          py::arg("quantizer"))
      .def("only", &QuantizedTensor::only, py::arg("rowwise"), py::arg("columnwise"))
      .def("make_usage", &QuantizedTensor::make_usage, py::arg("rowwise"), py::arg("columnwise"),
           NoGil())
      .def("same_layout", &same_layout, py::arg("other"))
      .def("like", &quantized_like, py::arg("values"), NoGil())
      .def(
          "write",
          [](const QuantizedPtr& to, const Tensor& values) { write_quantized(to, Value(values)); },
          py::arg("values"), NoGil())
      .def(
          "copy_from",
          [](const QuantizedPtr& to, const QuantizedPtr& from) { write_quantized(to, from); },
          py::arg("other"), NoGil());
  m.def(
      "has_products_of",
      [](const py::dict& fields, at::Device device) {
        return kernels::has_quantized_gemm(Quantizer(format_from(fields)).format_tag(), device);
      },
      py::arg("format"), py::arg("device"));
  m.def("make_quantized", &make_quantized, py::arg("format"), py::arg("sizes"), py::arg("dtype"),
        py::arg("parts"));
  m.def("quantized_of", &quantized_of, py::arg("tensor"));
  m.def(
      "attach_quantized",
      [](const Tensor& wrapper, QuantizedPtr quantized) {
        attach_quantized(wrapper, std::move(quantized));
        wrapper.unsafeGetTensorImpl()->set_storage_access_should_throw();
      },
      py::arg("wrapper"), py::arg("quantized"));
  m.def("set_quantized_wrapper", &set_wrapper, py::arg("function"));
}

}  // namespace

JsonValue json_of(const py::handle& object) {
  JsonValue out;
  if (py::isinstance<py::bool_>(object)) {
    out.value = object.cast<bool>();
  } else if (py::isinstance<py::int_>(object)) {
    int overflow = 0;
    out.value = static_cast<int64_t>(PyLong_AsLongLongAndOverflow(object.ptr(), &overflow));
    if (overflow != 0) out.value = py::str(object).cast<std::string>();
  } else if (py::isinstance<py::float_>(object)) {
    out.value = object.cast<double>();
  } else if (py::isinstance<py::dict>(object)) {
    auto& fields = out.value.emplace<JsonValue::Object>();
    for (const auto& [name, value] : object.cast<py::dict>()) {
      fields[name.cast<std::string>()] = json_of(value);
    }
  } else if (!object.is_none()) {
    out.value = py::str(object).cast<std::string>();
  }
  return out;
}

py::object python_of(const QuantizerPtr& quantizer) {
  if (quantizer == nullptr) return py::none();
  if (const auto* own = dynamic_cast<const PythonQuantizer*>(quantizer.get())) return own->object();
  return py::module_::import("ligature.quantization.quantizers")
      .attr("quantizer_of")(std::const_pointer_cast<Quantizer>(quantizer));
}

std::shared_ptr<Quantizer> quantizer_behind(const py::handle& object) {
  const py::object handle = py::getattr(object, "_handle", py::none());
  if (!py::isinstance<Quantizer>(handle)) return nullptr;
  return handle.cast<std::shared_ptr<Quantizer>>();
}

void bind_quantized(py::module_& m) {
  bind_quantizer(m);
  bind_tensor(m);
}

}  // namespace ligature::python
