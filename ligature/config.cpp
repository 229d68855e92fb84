// Everything here is asked for, not known by heart: compiled-in facts come from the build system
// and the compiler's macros, the rest from torch and the processor at run time.
#include "ligature/config.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/version.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"
#include "ligature/ops/checks.h"
#include "ligature/version.h"

namespace ligature {
namespace {

std::string compiler() {
#if defined(__clang__)
  return std::string("Clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("GCC ") + __VERSION__;
#else
  return "unknown";
#endif
}

BuildConfig build_config() {
  return {LIGATURE_BUILD_TYPE, compiler(), LIGATURE_CXX_FLAGS, __cplusplus / 100 % 100};
}

TorchConfig torch_config() {
  const uint64_t loaded = aoti_torch_abi_version();
  std::ostringstream running;
  running << (loaded >> 56 & 0xff) << '.' << (loaded >> 48 & 0xff) << '.' << (loaded >> 40 & 0xff);
  return {TORCH_VERSION, running.str()};
}

CudaConfig cuda_config() {
  constexpr std::string_view why_not = LIGATURE_WHY_NOT_CUDA;
  return {why_not.empty(), c10::impl::hasDeviceGuardImpl(at::kCUDA), std::string(why_not),
          kernels::detail::launches != nullptr && kernels::detail::launches->is_on()};
}

CpuConfig cpu_config() {
  CpuConfig cpu;
#if defined(__x86_64__)
  cpu.avx2 = __builtin_cpu_supports("avx2");
  cpu.avx512 = __builtin_cpu_supports("avx512f");
#endif
  cpu.torch = at::get_cpu_capability();
  cpu.ligature = kernels::own_backend(at::kCPU)->processor();
  cpu.threads = at::get_num_threads();
  return cpu;
}

struct Accelerator {
  at::DeviceType type = at::kCPU;
  int64_t count = 0;
};

Accelerator accelerator() {
  const auto type = at::getAccelerator();
  if (!type) return {};
  // A compiler may have put a stand-in of eight devices in the place of a driver that is not there.
  const bool is_there = at::globalContext().getAcceleratorHooksInterface(*type).isAvailable();
  return {*type, is_there ? at::accelerator::deviceCount() : 0};
}

std::vector<Availability> backend_list(const CudaConfig& cuda, const Accelerator& accelerator) {
  std::vector<Availability> list = {
      {"cpu", true, "kernels for CPU tensors, matrix products where they are faster than ATen's"},
      {"aten", true,
       "other matrix products on the CPU, and all kernels where no other backend serves"}};
  const bool has_device = accelerator.type == at::kCUDA && accelerator.count > 0;
  if (!cuda.built) {
    list.push_back({"cuda", false, cuda.reason});
  } else if (!cuda.torch) {
    list.push_back({"cuda", false, "torch's CUDA libraries are not loaded"});
  } else if (!has_device) {
    list.push_back({"cuda", false, "there is no CUDA device"});
  } else {
    list.push_back({"cuda", true, "kernels for CUDA tensors, matrix products through cuBLASLt"});
  }
  return list;
}

std::vector<DeviceConfig> device_list(const Accelerator& accelerator) {
  std::vector<DeviceConfig> list = {{"cpu", kernels::backend_name(at::kCPU)}};
  for (int64_t i = 0; i < accelerator.count; ++i) {
    const at::Device device(accelerator.type, static_cast<at::DeviceIndex>(i));
    list.push_back({device.str(), kernels::backend_name(accelerator.type)});
  }
  return list;
}

// What operations accept as an input.
std::vector<Availability> format_list() {
  std::vector<Availability> list;
  for (const auto& [dtype, name] : {std::pair{at::kDouble, "float64"},
                                    {at::kFloat, "float32"},
                                    {at::kHalf, "float16"},
                                    {at::kBFloat16, "bfloat16"},
                                    {at::kFloat8_e4m3fn, "float8_e4m3fn"},
                                    {at::kFloat8_e5m2, "float8_e5m2"}}) {
    const bool taken = is_input_dtype(dtype);
    const char* why = "no input's dtype: low precision is what a recipe computes in";
    list.push_back({name, taken, taken ? "" : why});
  }
  return list;
}

void print_formats(std::ostream& out, const std::vector<Availability>& formats) {
  out << "formats   ";
  for (const auto& f : formats) {
    if (f.available) out << ' ' << f.name;
  }
  for (const auto& f : formats) {
    if (!f.available) out << "\n           no " << f.name << ": " << f.reason;
  }
  out << '\n';
}

}  // namespace

Config config() {
  Config c;
  c.version = version();
  c.build = build_config();
  c.torch = torch_config();
  c.cuda = cuda_config();
  c.cpu = cpu_config();
  const Accelerator found = accelerator();
  c.backends = backend_list(c.cuda, found);
  c.devices = device_list(found);
  c.formats = format_list();
  return c;
}

c10::Device default_device() {
  if (!at::hasCUDA()) return at::kCPU;
  const auto* cuda = c10::impl::getDeviceGuardImpl(at::kCUDA);
  return cuda->deviceCount() > 0 ? cuda->getDevice() : at::Device(at::kCPU);
}

void set_launch_graphs(bool on) {
  if (kernels::detail::launches != nullptr) kernels::detail::launches->set_on(on);
}

std::string config_text() { return config_text(config()); }

std::string config_text(const Config& c) {
  std::ostringstream out;
  out << "Ligature " << c.version << '\n'
      << "build      " << c.build.type << ", " << c.build.compiler << ", C++"
      << c.build.cxx_standard << ", " << c.build.flags << '\n'
      << "torch      built for " << c.torch.built << ", running " << c.torch.running << '\n'
      << "CUDA       " << (c.cuda.built ? "built" : "not built: " + c.cuda.reason)
      << (c.cuda.torch ? "; torch with CUDA" : "; torch without CUDA")
      << (c.cuda.launch_graphs ? "; small pipelines launch together" : "") << '\n'
      << "CPU        AVX2 " << (c.cpu.avx2 ? "yes" : "no") << ", AVX-512 "
      << (c.cpu.avx512 ? "yes" : "no") << "; torch runs " << c.cpu.torch << " code, Ligature "
      << c.cpu.ligature << " code, on " << c.cpu.threads
      << (c.cpu.threads == 1 ? " thread\n" : " threads\n");
  const char* head = "devices    ";
  for (const auto& d : c.devices) {
    out << head << d.device << " (" << d.backend << " backend)\n";
    head = "           ";
  }
  head = "backends   ";
  for (const auto& b : c.backends) {
    out << head << (b.available ? "" : "no ") << b.name << ": " << b.reason << '\n';
    head = "           ";
  }
  print_formats(out, c.formats);
  return out.str();
}

}  // namespace ligature
