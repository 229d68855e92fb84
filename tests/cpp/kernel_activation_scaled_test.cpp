// Recomputing a scaled activation: bit for bit what its forward and its backward write.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/kernels/activation.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::ActivationKind;

namespace {

TEST(ActivationRecomputeScaled, HasTheBitsOfForwardAndBackward) {
  for_each_device_and_dtype([](at::Device device, at::ScalarType dtype) {
    for (const ActivationKind kind : {ActivationKind::GELU, ActivationKind::ReLU,
                                      ActivationKind::SwiGLU, ActivationKind::ClampedSwiGLU}) {
      for (const int64_t interleave : {0, 4}) {
        kernels::ActivationSpec spec{kind};
        if (kernels::is_gated(kind)) spec.glu_interleave_size = interleave;
        for (const int64_t rows : {0, 1, 7, 300}) {
          const int64_t results = 1032, width = kernels::is_gated(kind) ? 2 * results : results;
          for (const at::ScalarType grad : {dtype, at::kFloat}) {
            const Tensor x = random_tensor({rows, width}, dtype, device);
            const Tensor dy = random_tensor({rows, results}, grad, device);
            const Tensor scales = random_tensor({rows}, at::kFloat, device);
            const std::string where = describe(kernels::activation_name(kind), device, dtype,
                                               {rows, results, interleave});
            const Tensor y = kernels::activation_forward(x, spec, scales);
            for (int i = 0; i < 8; ++i) {
              const bool need_dscales = (i & 1) != 0, over_dy = (i & 2) != 0, over_x = (i & 4) != 0;
              const auto expected = kernels::activation_backward(dy, x, spec, scales, need_dscales);
              const Tensor own_dy = dy.clone(), own_x = x.clone();
              const auto result = kernels::activation_recompute_scaled(
                  own_dy, own_x, spec, scales, need_dscales, over_dy, over_x);
              expect_same_bits(result.y, y, where + " y");
              expect_same_bits(result.dx, expected.dx, where + " dx");
              expect_same_bits(result.dscales, expected.dscales, where + " dscales");
              EXPECT_EQ(result.dx.is_same(own_x), over_x);
              if (!over_dy) expect_same_bits(own_dy, dy, where + " dy");
              if (!over_x) expect_same_bits(own_x, x, where + " x");
            }
          }
        }
      }
    }
  });
}

}  // namespace
