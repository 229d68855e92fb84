// What this build of Ligature is and what it can do here: the build, torch, the devices and which
// kernels serve them. Python shows the same as ligature.show_config().
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ligature {

struct BuildConfig {
  std::string type;      ///< as "Release"
  std::string compiler;  ///< as "GCC 12.2.0"
  std::string flags;     ///< the compiler's flags, warnings left out
  int64_t cxx_standard = 0;
};

struct TorchConfig {
  std::string built;    ///< version of the headers that Ligature was compiled with
  std::string running;  ///< version of the libraries that are loaded
};

struct CudaConfig {
  bool built = false;  ///< has Ligature CUDA kernels of its own?
  bool torch = false;  ///< are torch's CUDA libraries loaded?
  std::string reason;  ///< why not built; empty when built
  /// Do small pipelines launch their kernels together, as a CUDA graph once they repeat?
  bool launch_graphs = false;
};

struct CpuConfig {
  bool avx2 = false;     ///< the processor has it, and the system lets programs use it
  bool avx512 = false;   ///< AVX-512 F
  std::string torch;     ///< the code torch chose, as "AVX2"
  std::string ligature;  ///< the code Ligature's kernels chose, as "x86-64-v4"
  int64_t threads = 0;   ///< that kernels use
};

struct DeviceConfig {
  std::string device;   ///< as "cpu", "cuda:0"
  std::string backend;  ///< whose kernels it gets
};

/// Something that may or may not be there: a backend, a number format.
struct Availability {
  std::string name;
  bool available = false;
  std::string reason;  ///< why not, or what it is for
};

struct Config {
  std::string version;
  BuildConfig build;
  TorchConfig torch;
  CudaConfig cuda;
  CpuConfig cpu;
  std::vector<DeviceConfig> devices;
  std::vector<Availability> backends;
  std::vector<Availability> formats;
};

/// Whether small pipelines launch their kernels together, which saves the host most of the time
/// that launches cost. On unless LIGATURE_LAUNCH_GRAPHS=0 is set; without the CUDA backend there is
/// nothing to turn on.
void set_launch_graphs(bool on);

/// Found out anew on each call.
Config config();

/// The same as text, one line per fact.
std::string config_text();
std::string config_text(const Config& config);

}  // namespace ligature
