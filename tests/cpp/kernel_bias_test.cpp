// The bias kernels against float64 sums.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/backend/aten/bias.h"
#include "ligature/backend/cpu/bias.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;

namespace {

constexpr int64_t kFeatures = 33;

TEST(BiasTest, Forward) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const auto& shape : test_shapes(kFeatures)) {
      const Tensor x = random_tensor(shape, dtype, device);
      for (const at::ScalarType b_dtype : {dtype, at::kFloat}) {
        const Tensor b = random_tensor({kFeatures}, b_dtype, device);
        expect_close(kernels::bias_forward(x, b), reference(x) + reference(b), dtype,
                     describe("bias", device, dtype, shape));
      }
    }
  });
}

TEST(BiasTest, Backward) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const auto& shape : test_shapes(kFeatures)) {
      const Tensor dy = random_tensor(shape, dtype, device);
      const Tensor expected = reference(dy).reshape({-1, kFeatures}).sum(0);
      const Tolerance allowed = tolerance_of_sum(dtype, dy.numel() / kFeatures);
      const std::string where = describe("bias backward", device, dtype, shape);
      expect_close(kernels::bias_backward(dy, kFeatures), expected, dtype, where, allowed);
      expect_close(ligature::aten::bias_backward(dy, kFeatures), expected, dtype, where + " aten",
                   allowed);
    }
  });
}

// 4096 ones: a sum held in bfloat16 would stop at 256.
TEST(BiasTest, BackwardAccumulatesInFloat) {
  for (const at::Device device : test_devices()) {
    const Tensor dy = at::ones({4096, 3}, at::dtype(at::kBFloat16).device(device));
    expect_close(kernels::bias_backward(dy, 3), at::full({3}, 4096.0, at::kDouble), at::kBFloat16,
                 "ones");
  }
}

TEST(BiasTest, BackwardDoesNotDependOnThreads) {
  const Tensor dy = random_tensor({1000, 77}, at::kFloat);
  const Tensor expected = kernels::bias_backward(dy, 77);
  for (const int threads : {1, 2, 5}) {
    const WithThreads with(threads);
    expect_same_bits(kernels::bias_backward(dy, 77), expected, std::to_string(threads));
  }
}

}  // namespace
