// The CUDA activations and bias against the ATen forms in float64, over the sizes and layouts that
// take different paths; the ATen forms themselves are tested against formulas elsewhere.
#include "cuda_test_support.h"
#include "ligature/backend/aten/activation.h"
#include "ligature/kernels/activation.h"
#include "ligature/kernels/bias.h"

namespace kernels = ligature::kernels;
namespace aten = ligature::aten;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

struct Case {
  ActivationSpec spec;
  Size size;  // of the results
  at::ScalarType dtype;
  bool aligned = true;
  at::ScalarType scales_dtype = at::kFloat;

  int64_t width() const { return size.columns * (kernels::is_gated(spec.kind) ? 2 : 1); }
  std::string where() const {
    return describe(std::string(kernels::activation_name(spec.kind)) +
                        (aligned ? "" : " unaligned") + " interleave " +
                        std::to_string(spec.glu_interleave_size),
                    kGpu, dtype, {size.rows, size.columns});
  }
};

void check(const Case& c) {
  torch::manual_seed(5);
  const auto [rows, n] = c.size;
  const Tensor x = gpu_random({rows, c.width()}, c.dtype, c.aligned);
  const Tensor dy = gpu_random({rows, n}, c.dtype, c.aligned);
  const Tensor scales = gpu_random({rows}, c.scales_dtype);
  const Tensor xd = x.to(at::kDouble), dyd = dy.to(at::kDouble), sd = scales.to(at::kDouble);

  expect_close(kernels::activation_forward(x, c.spec), aten::activation_forward(xd, c.spec, {}),
               c.dtype, c.where() + " y");
  expect_close(kernels::activation_forward(x, c.spec, scales),
               aten::activation_forward(xd, c.spec, sd), c.dtype, c.where() + " scaled y");
  const auto plain = kernels::activation_backward(dy, x, c.spec);
  const auto wanted = aten::activation_backward(dyd, xd, c.spec, {}, false, true);
  expect_close(plain.dx, wanted.dx, c.dtype, c.where() + " dx");

  const auto biased = kernels::activation_backward(dy, x, c.spec, {}, false, true);
  expect_same_bits(biased.dx, plain.dx, c.where() + " dx beside dbias");
  expect_close(biased.dbias, wanted.dbias, c.dtype, c.where() + " dbias",
               tolerance_of_sum(c.dtype, rows));

  for (const bool in_place : {false, true}) {
    const Tensor to_dy = in_place ? dy.clone() : dy, to_x = in_place ? x.clone() : x;
    const auto both =
        kernels::activation_recompute(to_dy, to_x, c.spec, !in_place, in_place, in_place);
    const std::string how = c.where() + (in_place ? " in place" : "");
    expect_same_bits(both.y, kernels::activation_forward(x, c.spec), how + " y again");
    expect_same_bits(both.dx, plain.dx, how + " dx beside y");
    if (!in_place) expect_same_bits(both.dbias, biased.dbias, how + " dbias beside y");
  }
  const Tensor to_x = x.clone();
  expect_same_bits(kernels::activation_backward(dy, to_x, c.spec, {}, false, false, true).dx,
                   plain.dx, c.where() + " dx over x");

  const auto all = kernels::activation_backward(dy, x, c.spec, scales, true, true);
  const auto all_wanted = aten::activation_backward(dyd, xd, c.spec, sd, true, true);
  expect_close(all.dx, all_wanted.dx, c.dtype, c.where() + " scaled dx");
  expect_close(all.dbias, all_wanted.dbias, c.dtype, c.where() + " scaled dbias",
               tolerance_of_sum(c.dtype, rows));
  expect_close(all.dscales, all_wanted.dscales, c.scales_dtype, c.where() + " dscales",
               tolerance_of_sum(c.scales_dtype, n));
  for (const bool in_place : {false, true}) {
    const Tensor own_dy = in_place ? dy.clone() : dy, own_x = in_place ? x.clone() : x;
    const auto both = kernels::activation_recompute_scaled(own_dy, own_x, c.spec, scales, true,
                                                           in_place, in_place);
    const std::string how = c.where() + (in_place ? " in place" : "");
    expect_same_bits(both.y, kernels::activation_forward(x, c.spec, scales), how + " scaled y");
    expect_same_bits(both.dx, all.dx, how + " scaled dx beside y");
    expect_same_bits(both.dscales, all.dscales, how + " dscales beside y");
  }
  const auto again = kernels::activation_backward(dy, x, c.spec, scales, true, true);
  expect_same_bits(again.dbias, all.dbias, c.where() + " dbias again");
  expect_same_bits(again.dscales, all.dscales, c.where() + " dscales again");
}

TEST(CudaActivationTest, EveryKind) {
  SKIP_WITHOUT_GPU();
  for (const ActivationKind kind : kernels::kActivationKinds) {
    for (const at::ScalarType dtype : cuda_dtypes()) {
      for (const Size size : {Size{3, 7}, {64, 256}, {200, 1023}}) check({{kind}, size, dtype});
      check({{kind}, {33, 2816}, dtype, false});
    }
  }
}

TEST(CudaActivationTest, EverySize) {
  SKIP_WITHOUT_GPU();
  for (const ActivationKind kind : {ActivationKind::GELU, ActivationKind::SwiGLU}) {
    for (const at::ScalarType dtype : cuda_dtypes()) {
      for (const Size size : cuda_sizes()) check({{kind}, size, dtype, true, dtype});
    }
  }
}

TEST(CudaActivationTest, Interleaved) {
  SKIP_WITHOUT_GPU();
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const int64_t interleave : {1, 3, 8, 32, 256}) {
      ActivationSpec spec{ActivationKind::ClampedSwiGLU};
      spec.limit = 1.0;
      spec.glu_interleave_size = interleave;
      check({spec, {50, 3 * interleave * (interleave < 8 ? 100 : 1)}, dtype});
    }
  }
}

TEST(CudaActivationTest, InPlace) {
  SKIP_WITHOUT_GPU();
  for (const ActivationKind kind : {ActivationKind::ReLU, ActivationKind::SiLU}) {
    for (const at::ScalarType dtype : cuda_dtypes()) {
      for (const Size size : {Size{3, 7}, {64, 256}, {16, 2048}}) {
        Tensor x = gpu_random({size.rows, size.columns}, dtype);
        const Tensor wanted = kernels::activation_forward(x, {kind});
        expect_same_bits(kernels::activation_forward_(x, {kind}), wanted, "in place");
        expect_same_bits(x, wanted, "in place");
      }
    }
  }
}

TEST(CudaActivationTest, GradientInAnotherDtype) {
  SKIP_WITHOUT_GPU();
  const ActivationSpec spec{ActivationKind::GEGLU};
  const Tensor x = gpu_random({30, 96}, at::kBFloat16), dy = gpu_random({30, 48}, at::kFloat);
  const auto got = kernels::activation_backward(dy, x, spec, {}, false, true);
  const auto wanted =
      aten::activation_backward(dy.to(at::kDouble), x.to(at::kDouble), spec, {}, false, true);
  expect_close(got.dx, wanted.dx, at::kBFloat16, "dx");
  expect_close(got.dbias, wanted.dbias, at::kBFloat16, "dbias",
               tolerance_of_sum(at::kBFloat16, 30));
}

TEST(CudaBiasTest, EverySize) {
  SKIP_WITHOUT_GPU();
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const bool aligned : {true, false}) {
      for (const Size size : cuda_sizes()) {
        torch::manual_seed(6);
        const Tensor x = gpu_random({size.rows, size.columns}, dtype, aligned);
        const Tensor b = gpu_random({size.columns}, at::kFloat);
        const std::string where = describe("bias", kGpu, dtype, {size.rows, size.columns});
        const Tensor xd = x.to(at::kDouble);
        expect_close(kernels::bias_forward(x, b), xd + b.to(at::kDouble), dtype, where + " y");
        const Tensor db = kernels::bias_backward(x, size.columns);
        expect_close(db, xd.sum(0), dtype, where + " db", tolerance_of_sum(dtype, size.rows));
        expect_same_bits(kernels::bias_backward(x, size.columns), db, where + " db again");
      }
    }
  }
}

}  // namespace
