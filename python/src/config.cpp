// The build's configuration as plain Python data.
#include "ligature/config.h"

#include "bindings.h"
#include "ligature/kernels/launches.h"

namespace ligature::python {
namespace {

using py::literals::operator""_a;

py::list availability(const std::vector<Availability>& entries) {
  py::list out;
  for (const auto& e : entries) {
    out.append(py::dict("name"_a = e.name, "available"_a = e.available, "reason"_a = e.reason));
  }
  return out;
}

py::dict config_dict() {
  const Config c = config();
  py::list devices;
  for (const auto& d : c.devices) {
    devices.append(py::dict("device"_a = d.device, "backend"_a = d.backend));
  }
  return py::dict(
      "version"_a = c.version,
      "build"_a = py::dict("type"_a = c.build.type, "compiler"_a = c.build.compiler,
                           "flags"_a = c.build.flags, "cxx_standard"_a = c.build.cxx_standard),
      "torch"_a = py::dict("built"_a = c.torch.built, "running"_a = c.torch.running),
      "cuda"_a = py::dict("built"_a = c.cuda.built, "torch"_a = c.cuda.torch,
                          "reason"_a = c.cuda.reason, "launch_graphs"_a = c.cuda.launch_graphs),
      "cpu"_a = py::dict("avx2"_a = c.cpu.avx2, "avx512"_a = c.cpu.avx512, "torch"_a = c.cpu.torch,
                         "ligature"_a = c.cpu.ligature, "threads"_a = c.cpu.threads),
      "devices"_a = devices, "backends"_a = availability(c.backends),
      "formats"_a = availability(c.formats));
}

}  // namespace

void bind_config(py::module_& m) {
  m.def("config", &config_dict);
  m.def("config_text", [] { return config_text(); });
  m.def("set_launch_graphs", &set_launch_graphs);
  m.def("launch_counts", [] {
    const kernels::LaunchCounts counts = kernels::launch_counts();
    return py::dict("graphs"_a = counts.graphs, "replayed"_a = counts.replayed,
                    "single"_a = counts.single);
  });
}

}  // namespace ligature::python
