// The one context of a thread: what belongs to it, and that it belongs to that thread.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "ligature/fuser/strict.h"
#include "ligature/kernels/devices.h"
#include "ligature/kernels/log.h"
#include "ligature/kernels/run_context.h"
#include "ligature/ligature.h"
#include "ligature/recipes/autocast.h"
#include "ligature/recipes/model_init.h"

namespace ligature {
namespace {

int open_scopes() {
  const bool stands_for = kernels::device_behind(at::Device(at::kMeta)).type() != at::kMeta;
  return static_cast<int>(kernels::is_log_open()) + static_cast<int>(stands_for) +
         autocast_depth() + static_cast<int>(quantized_model_init() != nullptr) +
         static_cast<int>(StrictScope::active()) +
         static_cast<int>(DelayedSource::current() != nullptr);
}

TEST(RunContext, ScopesAreSeenByTheirThreadOnly) {
  const kernels::KernelLog log(at::kCPU);
  const kernels::MetaStandsFor stands_for(at::kCPU);
  const Autocast autocast;
  const QuantizedModelInit init;
  const StrictScope strict({"a fusion"});
  EXPECT_EQ(open_scopes(), 6);
  int elsewhere = -1, own = -1;
  std::thread([&] {
    elsewhere = open_scopes();
    const QuantizedModelInit init_of_thread({.enabled = false});
    const Autocast outer, inner;
    own = open_scopes();
  }).join();
  EXPECT_EQ(elsewhere, 0);
  EXPECT_EQ(own, 3);
  EXPECT_EQ(open_scopes(), 6);
}

struct Counted : kernels::ThreadPart {
  ~Counted() override {
    ++ended;
    // Asked for while it ends.
    if (ended == 1) kernels::thread_part<Counted>(&kernels::RunContext::strict);
  }
  static inline int ended = 0;
};

TEST(RunContext, PartsEndWithTheirThread) {
  bool same = false;
  std::thread([&] {
    auto& part = kernels::thread_part<Counted>(&kernels::RunContext::strict);
    same = &part == &kernels::thread_part<Counted>(&kernels::RunContext::strict);
  }).join();
  EXPECT_TRUE(same);
  EXPECT_EQ(Counted::ended, 2);
}

}  // namespace
}  // namespace ligature
