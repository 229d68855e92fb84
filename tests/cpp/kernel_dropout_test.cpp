// Dropout: what is kept is scaled, what is dropped is zero, and the gradient follows the mask.
#include <gtest/gtest.h>

#include <cmath>

#include "kernel_test_support.h"
#include "ligature/kernels/dropout.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;

namespace {

TEST(DropoutTest, MaskAndScale) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const double p : {0.0, 0.3, 1.0}) {
      for (const auto& shape : test_shapes(65)) {
        const Tensor x = random_tensor(shape, dtype, device);
        const Tensor dy = random_tensor(shape, dtype, device);
        const std::string where = describe("dropout", device, dtype, shape) + std::to_string(p);
        const auto [y, mask] = kernels::dropout_forward(x, p);
        ASSERT_EQ(mask.scalar_type(), at::kBool) << where;
        ASSERT_EQ(mask.sizes(), x.sizes()) << where;
        const Tensor factor = reference(mask) * (p < 1.0 ? 1.0 / (1.0 - p) : 0.0);
        expect_close(y, reference(x) * factor, dtype, where);
        expect_close(kernels::dropout_backward(dy, mask, p), reference(dy) * factor, dtype, where);
      }
    }
  });
}

TEST(DropoutTest, DropsTheWantedShare) {
  torch::manual_seed(3);
  for (const at::Device device : test_devices()) {
    const Tensor x = at::ones({1000, 100}, device);
    const double kept = kernels::dropout_forward(x, 0.3).mask.to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(kept, 0.7, 0.01);
    EXPECT_TRUE(kernels::dropout_forward(x, 0.0).mask.all().item<bool>());
  }
}

TEST(DropoutTest, FollowsTheSeed) {
  for (const at::Device device : test_devices()) {
    const Tensor x = at::ones({10, 100}, device);
    torch::manual_seed(5);
    const Tensor first = kernels::dropout_forward(x, 0.5).y;
    const Tensor second = kernels::dropout_forward(x, 0.5).y;
    torch::manual_seed(5);
    expect_same_bits(kernels::dropout_forward(x, 0.5).y, first, "same seed");
    EXPECT_FALSE(at::equal(first, second));
  }
}

TEST(DropoutTest, MaskDependsOnTheSeedAlone) {
  for (const at::Device device : test_devices()) {
    const auto mask_of = [&](const Tensor& x) {
      torch::manual_seed(9);
      return kernels::dropout_forward(x, 0.4).mask;
    };
    const Tensor x = random_tensor({37, 129}, at::kFloat, device);
    const Tensor room = at::empty({x.numel() + 1}, x.options().dtype(at::kHalf));
    const Tensor shifted = room.narrow(0, 1, x.numel()).view(x.sizes()).copy_(x);
    expect_same_bits(mask_of(x.to(at::kBFloat16)), mask_of(x), "bfloat16");
    expect_same_bits(mask_of(shifted), mask_of(x), "unaligned");
    const auto [y, mask] = kernels::dropout_forward(shifted, 0.4);
    const Tensor factor = reference(mask) / 0.6;
    expect_close(y, reference(shifted) * factor, at::kHalf, "unaligned y");
    expect_close(kernels::dropout_backward(shifted, mask, 0.4), reference(shifted) * factor,
                 at::kHalf, "unaligned dx");
    // Rows, columns and halves of a draw are not alike.
    const Tensor wide = mask_of(at::ones({256, 4096}, x.options())).to(at::kDouble);
    for (const int64_t along : {0, 1}) {
      const Tensor share = wide.mean(along);
      EXPECT_LT((share - 0.6).abs().max().item<double>(), along == 0 ? 0.2 : 0.05);
    }
    const Tensor centered = wide - 0.6;
    for (const int64_t distance : {1, 2, 4, 8, 4096}) {
      const Tensor flat = centered.flatten();
      const int64_t n = flat.numel() - distance;
      const double product =
          (flat.narrow(0, 0, n) * flat.narrow(0, distance, n)).mean().item<double>();
      EXPECT_LT(std::abs(product), 0.24 * 6.0 / std::sqrt(double(n))) << distance;
    }
  }
}

TEST(DropoutTest, AllDroppedIsZeroEvenForInfinity) {
  const Tensor x = at::full({3}, INFINITY);
  const auto [y, mask] = kernels::dropout_forward(x, 1.0);
  expect_same_bits(y, at::zeros({3}), "forward");
  expect_same_bits(kernels::dropout_backward(x, mask, 1.0), at::zeros({3}), "backward");
}

TEST(DropoutTest, ProbabilityIsChecked) {
  EXPECT_THROW(kernels::dropout_forward(at::ones({2}), 1.5), c10::Error);
  EXPECT_THROW(kernels::dropout_forward(at::ones({2}), -0.1), c10::Error);
}

}  // namespace
