// What config() says must be what the library does.
#include "ligature/config.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <map>
#include <set>

#include "ligature/backend/aten/bias.h"
#include "ligature/kernels/bias.h"
#include "ligature/ligature.h"
#include "ligature/version.h"

namespace ligature {
namespace {

Availability named(const std::vector<Availability>& list, const std::string& name) {
  for (const auto& entry : list) {
    if (entry.name == name) return entry;
  }
  throw std::runtime_error("no entry " + name);
}

std::set<std::string> called;

std::unique_ptr<at::ObserverContext> note_name(const at::RecordFunction& call) {
  called.insert(call.name());
  return nullptr;
}

// The operators of torch that the sum over rows calls: a backend of our own sums by itself.
using BiasBackward = Tensor (*)(const Tensor&, int64_t);

std::set<std::string> called_by(BiasBackward bias_backward, at::Device device) {
  const Tensor dy = torch::ones({3, 4}, device);
  called.clear();
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(note_name).scopes({at::RecordScope::FUNCTION}));
  bias_backward(dy, 4);
  at::removeCallback(handle);
  return called;
}

TEST(Config, SaysWhatWasBuilt) {
  const Config c = config();
  EXPECT_EQ(c.version, version());
  EXPECT_FALSE(c.build.type.empty());
  EXPECT_NE(c.build.compiler.find(std::to_string(__GNUC__)), std::string::npos);
  EXPECT_EQ(c.build.cxx_standard, 20);
#ifdef NDEBUG
  constexpr bool release = true;
#else
  constexpr bool release = false;
#endif
  EXPECT_EQ(c.build.flags.find("-DNDEBUG") != std::string::npos, release) << c.build.flags;
}

TEST(Config, KnowsTheTorchItRunsWith) {
  const Config c = config();
  EXPECT_EQ(c.torch.built, TORCH_VERSION);
  const std::string all = at::show_config();
  EXPECT_NE(all.find("TORCH_VERSION=" + c.torch.running + ","), std::string::npos) << all;
}

TEST(Config, CpuIsWhatTheSystemSays) {
  const Config c = config();
  std::ifstream file("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.find("flags") == std::string::npos) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  EXPECT_EQ(c.cpu.avx2, text.find(" avx2 ") != std::string::npos);
  EXPECT_EQ(c.cpu.avx512, text.find(" avx512f ") != std::string::npos);
  EXPECT_FALSE(c.cpu.torch.empty());
  EXPECT_FALSE(c.cpu.ligature.empty());
}

TEST(Config, ThreadsAreCountedOnEachCall) {
  const int before = at::get_num_threads();
  at::set_num_threads(before + 1);
  EXPECT_EQ(config().cpu.threads, before + 1);
  at::set_num_threads(before);
  EXPECT_EQ(config().cpu.threads, before);
}

TEST(Config, EveryDeviceIsListedWithTheBackendItGets) {
  const Config c = config();
  ASSERT_EQ(static_cast<int64_t>(c.devices.size()), 1 + torch::cuda::device_count());
  EXPECT_EQ(c.devices[0].device, "cpu");
  for (const auto& d : c.devices) {
    EXPECT_TRUE(named(c.backends, d.backend).available) << d.device;
    const auto calls = called_by(kernels::bias_backward, at::Device(d.device));
    EXPECT_EQ(calls.count("aten::sum") == 1, d.backend == "aten") << d.device;
  }
  for (const auto& d : c.devices) {  // it would be seen
    EXPECT_EQ(called_by(aten::bias_backward, at::Device(d.device)).count("aten::sum"), 1);
  }
}

TEST(Config, CudaIsExplained) {
  const Config c = config();
  const Availability cuda = named(c.backends, "cuda");
  EXPECT_EQ(c.cuda.built, c.cuda.reason.empty());
  EXPECT_FALSE(cuda.reason.empty());
  EXPECT_TRUE(c.cuda.torch || !torch::cuda::is_available());
  EXPECT_EQ(cuda.available, c.cuda.built && torch::cuda::is_available());
}

TEST(Config, FormatsAreThoseThatOperationsTake) {
  const std::map<std::string, at::ScalarType> dtypes = {{"float64", at::kDouble},
                                                        {"float32", at::kFloat},
                                                        {"float16", at::kHalf},
                                                        {"bfloat16", at::kBFloat16},
                                                        {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                        {"float8_e5m2", at::kFloat8_e5m2}};
  const Config c = config();
  ASSERT_EQ(c.formats.size(), dtypes.size());
  for (const auto& format : c.formats) {
    const Tensor x = torch::ones({2, 4}).to(dtypes.at(format.name));
    Sequential model(GELU{});
    if (format.available) {
      EXPECT_EQ(model->forward(x).scalar_type(), x.scalar_type()) << format.name;
    } else {
      EXPECT_THROW(model->forward(x), c10::Error) << format.name;
      EXPECT_FALSE(format.reason.empty());
    }
  }
}

TEST(Config, TextHoldsEveryFact) {
  const Config c = config();
  const std::string text = config_text();
  std::vector<std::string> facts = {c.version,     c.build.type,  c.build.compiler,
                                    c.build.flags, c.torch.built, c.torch.running,
                                    c.cuda.reason, c.cpu.torch,   c.cpu.ligature};
  for (const auto& d : c.devices) facts.push_back(d.device + " (" + d.backend);
  for (const auto& list : {c.backends, c.formats}) {
    for (const auto& entry : list) {
      facts.push_back(entry.name);
      facts.push_back(entry.reason);
    }
  }
  for (const auto& fact : facts) EXPECT_NE(text.find(fact), std::string::npos) << fact;
}

TEST(Config, TextSaysNoWhereSomethingIsMissing) {
  Config c = config();
  c.backends = {{"one", true, "of use"}, {"two", false, "not built"}};
  c.formats = {{"wide", true, ""}, {"narrow", false, "later"}};
  const std::string text = config_text(c);
  EXPECT_NE(text.find("backends   one: of use\n           no two: not built\n"), std::string::npos);
  EXPECT_NE(text.find("formats    wide\n           no narrow: later\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace ligature
