// Groups of processes, and what is known of communication.
#include "distributed.h"

#include "bindings.h"
#include "ligature/distributed/collectives.h"
#include "ligature/distributed/group.h"
#include "ligature/ops/tensor_parallel.h"
#include "plain.h"

namespace ligature::python {
namespace {

using py::literals::operator""_a;
namespace dist = ligature::distributed;

/// The default group of torch.distributed, as it is now.
std::optional<std::string> default_group_name() {
  const py::gil_scoped_acquire gil;
  const py::module_ package = py::module_::import("ligature.distributed");
  const py::object name = package.attr("default_group_name")();
  return name.is_none() ? std::nullopt : std::make_optional(name.cast<std::string>());
}

py::dict group_info(const std::optional<std::string>& name) {
  const dist::GroupPtr group = dist::find_group(name);
  const dist::GroupOptions options = group->options();
  return py::dict(
      "name"_a = group->name(), "rank"_a = group->rank(), "size"_a = group->size(),
      "reduction"_a = options.reduction == dist::Reduction::Ordered ? "ordered" : "native",
      "check"_a = options.check == dist::Check::Always ? "always" : "once",
      "reduce_partial_grads"_a = options.reduce_partial_grads, "overlap"_a = options.overlap,
      "pieces"_a = options.pieces, "handshake_timeout"_a = options.handshake_timeout);
}

void configure(const std::optional<std::string>& name, bool ordered, bool always,
               bool reduce_partial_grads, bool overlap, int64_t pieces, double handshake_timeout) {
  dist::GroupOptions options;
  options.reduction = ordered ? dist::Reduction::Ordered : dist::Reduction::Native;
  options.check = always ? dist::Check::Always : dist::Check::Once;
  options.reduce_partial_grads = reduce_partial_grads;
  options.overlap = overlap;
  options.pieces = pieces;
  options.handshake_timeout = handshake_timeout;
  dist::configure_group(name, options);
}

py::list timeline_entries() {
  py::list out;
  for (const dist::TimelineEntry& entry : dist::timeline()) {
    out.append(py::dict("name"_a = entry.name, "op"_a = entry.op, "begin"_a = entry.begin,
                        "end"_a = entry.end, "wait_begin"_a = entry.wait_begin,
                        "wait_end"_a = entry.wait_end, "bytes"_a = entry.bytes));
  }
  return out;
}

}  // namespace

py::list partial_gradients(const OperationFuser& fuser) {
  py::list out;
  for (const PartialGradients& one : find_partial_gradients(fuser.basic_ops())) {
    out.append(py::make_tuple(one.op, one.group));
  }
  return out;
}

void bind_distributed(py::module_& m) {
  dist::set_default_group_lookup(&default_group_name);
  m.def("group_info", &group_info, py::arg("name"));
  m.def("configure_group", &configure, py::arg("name"), py::arg("ordered"), py::arg("always"),
        py::arg("reduce_partial_grads"), py::arg("overlap"), py::arg("pieces"),
        py::arg("handshake_timeout"));
  m.def(
      "tensor_parallel",
      [](const std::string& op, const py::dict& given, int64_t in_features, int64_t out_features) {
        auto options =
            options_from_state<TensorParallelOptions>(state_from_dict(given, op.c_str()), op);
        return dict_from_state(
            options_to_state(canonical(std::move(options), op, in_features, out_features)));
      },
      py::arg("op"), py::arg("given"), py::arg("in_features"), py::arg("out_features"));
  m.def("record_timeline", &dist::record_timeline, py::arg("on"));
  m.def("timeline", &timeline_entries);
  m.def("transfer_times", [](const std::string& op, const std::string& collective) {
    const dist::TransferTimes times = dist::transfer_times(op, collective);
    return py::make_tuple(times.count, times.in_flight, times.waited);
  });
  m.def("forget_transfer_times", &dist::forget_transfer_times);
}

}  // namespace ligature::python
