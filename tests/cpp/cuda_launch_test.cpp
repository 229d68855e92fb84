// Launches that are held back: they happen in order, with their memory, before anybody can look,
// and as a graph when they repeat.
#include <stdexcept>

#include "cuda_test_support.h"
#include "ligature/backend/cuda/launch_scope.h"
#include "ligature/kernels/activation.h"
#include "ligature/kernels/gemm.h"
#include "ligature/kernels/norm.h"

namespace kernels = ligature::kernels;
namespace cuda = ligature::cuda;
using at::Tensor;

namespace {

/// A norm, a product and an activation, in memory that is the same in every call.
struct Chain {
  Tensor x = gpu_random({16, 64}, at::kBFloat16);
  Tensor w = gpu_random({64}, at::kBFloat16);
  Tensor b = gpu_random({64}, at::kBFloat16);
  Tensor weight = gpu_random({128, 64}, at::kBFloat16);

  Tensor operator()() const {
    const kernels::NormForward norm =
        kernels::layer_norm_forward(x, w, b, 1e-5, false, at::kBFloat16);
    const Tensor z = kernels::linear_forward(norm.y, weight, {}, {}, 1.0);
    kernels::ActivationSpec spec;
    spec.kind = kernels::ActivationKind::SwiGLU;
    return kernels::activation_forward(z, spec, {});
  }
};

class CudaLaunch : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    cuda::set_launch_graphs(true);
  }
};

Tensor held(const Chain& chain) {
  cuda::LaunchScope scope(chain.x);
  Tensor y = chain();
  scope.finish();
  return y;
}

}  // namespace

TEST_F(CudaLaunch, TheSameBitsOneByOneAndAsAGraph) {
  const Chain chain;
  const Tensor wanted = chain();
  const cuda::LaunchCounts before = cuda::launch_counts();
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(at::equal(held(chain), wanted)) << i;
  const cuda::LaunchCounts after = cuda::launch_counts();
  EXPECT_GT(after.graphs, before.graphs);
  EXPECT_GE(after.replayed, before.replayed + 4);
  EXPECT_GE(after.single, before.single + 2 * 3);
}

TEST_F(CudaLaunch, AGraphReadsWhatIsThereNow) {
  const Chain chain;
  for (int i = 0; i < 8; ++i) {
    chain.x.normal_();
    chain.weight.normal_();
    const Tensor got = held(chain);
    EXPECT_TRUE(at::equal(got, chain())) << i;
  }
}

TEST_F(CudaLaunch, NothingRunsBeforeTheEnd) {
  const Chain chain;
  const cuda::LaunchCounts before = cuda::launch_counts();
  {
    cuda::LaunchScope scope(chain.x);
    chain();
    EXPECT_EQ(cuda::launch_counts().single, before.single);
    scope.finish();
  }
  EXPECT_EQ(cuda::launch_counts().single, before.single + 3);
  EXPECT_FALSE(cuda::holds_launches());
}

TEST_F(CudaLaunch, AnAtenCallSeesResults) {
  const Chain chain;
  const Tensor wanted = at::sin(chain());
  for (int i = 0; i < 6; ++i) {
    cuda::LaunchScope scope(chain.x);
    const Tensor got = at::sin(chain());
    chain();
    scope.finish();
    EXPECT_TRUE(at::equal(got, wanted)) << i;
  }
}

// These give views where they can and copies where they must.
TEST_F(CudaLaunch, ACopyThatLooksLikeAViewSeesResults) {
  const Chain chain;
  const Tensor wanted = chain();
  for (int i = 0; i < 4; ++i) {
    cuda::LaunchScope scope(chain.x);
    const Tensor turned = chain().t().contiguous();
    const Tensor wide = chain().to(at::kFloat);
    const Tensor flat = chain().t().reshape({-1});
    scope.finish();
    EXPECT_TRUE(at::equal(turned, wanted.t())) << i;
    EXPECT_TRUE(at::equal(wide, wanted.to(at::kFloat))) << i;
    EXPECT_TRUE(at::equal(flat, wanted.t().reshape({-1}))) << i;
  }
}

TEST_F(CudaLaunch, AViewLaunchesNothing) {
  const Chain chain;
  const cuda::LaunchCounts before = cuda::launch_counts();
  cuda::LaunchScope scope(chain.x);
  const Tensor view = chain().view({-1}).narrow(0, 0, 8);
  const Tensor room = at::empty({8}, view.options());
  EXPECT_EQ(cuda::launch_counts().single, before.single);
  scope.finish();
  EXPECT_EQ(view.numel(), room.numel());
}

// Memory that was given back on the way would be given to somebody else before it was written.
TEST_F(CudaLaunch, MemoryIsHeld) {
  const Chain chain;
  cuda::LaunchScope scope(chain.x);
  const void* first = chain().const_data_ptr();
  const Tensor other = chain();
  EXPECT_NE(first, other.const_data_ptr());
  scope.finish();
  EXPECT_TRUE(at::equal(other, chain()));
}

TEST_F(CudaLaunch, APauseLaunchesAndHoldsNothing) {
  const Chain chain;
  const cuda::LaunchCounts before = cuda::launch_counts();
  cuda::LaunchScope scope(chain.x);
  chain();
  {
    const cuda::LaunchPause pause;
    EXPECT_EQ(cuda::launch_counts().single, before.single + 3);
    EXPECT_FALSE(cuda::holds_launches());
    EXPECT_TRUE(at::equal(chain(), chain()));
  }
  EXPECT_TRUE(cuda::holds_launches());
  scope.finish();
}

TEST_F(CudaLaunch, WhatCameBeforeAnErrorIsLaunched) {
  const Chain chain;
  Tensor y;
  const cuda::LaunchCounts before = cuda::launch_counts();
  EXPECT_THROW(
      {
        cuda::LaunchScope scope(chain.x);
        y = chain();
        throw std::runtime_error("on the way");
      },
      std::runtime_error);
  EXPECT_EQ(cuda::launch_counts().single, before.single + 3);
  EXPECT_FALSE(cuda::holds_launches());
  EXPECT_TRUE(at::equal(y, chain()));
}

TEST_F(CudaLaunch, LargeTensorsAndOtherDevicesAreNotHeld) {
  for (const Tensor& x : {gpu_random({2048, 4096}, at::kBFloat16), at::randn({4, 4}), Tensor()}) {
    const cuda::LaunchScope scope(x);
    EXPECT_FALSE(cuda::holds_launches());
  }
  cuda::set_launch_graphs(false);
  {
    const cuda::LaunchScope scope(gpu_random({4, 4}, at::kBFloat16));
    EXPECT_FALSE(cuda::holds_launches());
  }
  cuda::set_launch_graphs(true);
}
