// Kernels over more than 2^31 values, where an index in 32 bits would come round again. All rows
// are zero but the last few: those must give the bits that they give alone, the others zeros, and
// sums over all rows those over the few. Rows of whole vectors and rows that are not take different
// kernels.
#include "cuda_test_support.h"
#include "ligature/kernels/activation.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/dropout.h"
#include "ligature/kernels/norm.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

constexpr int64_t kFew = 5;

/// Zeros, and `last` in the last rows.
Tensor behind_zeros(const Tensor& last, int64_t rows) {
  Tensor x = at::zeros({rows, last.size(1)}, last.options());
  x.narrow(0, rows - kFew, kFew).copy_(last);
  return x;
}

void expect_behind_zeros(const Tensor& actual, const Tensor& last, const std::string& where) {
  ASSERT_GT(actual.numel(), 0) << where;
  const int64_t rest = actual.size(0) - kFew;
  expect_same_bits(actual.narrow(0, rest, kFew), last, where);
  EXPECT_EQ(actual.narrow(0, 0, rest).count_nonzero().item<int64_t>(), 0) << where;
}

/// Partial sums are made of other rows than alone, so they are rounded otherwise.
void expect_sums(const Tensor& actual, const Tensor& few, const std::string& where) {
  expect_close(actual, few.to(at::kDouble), at::kBFloat16, where,
               tolerance_of_sum(at::kBFloat16, kFew));
}

std::string place(const std::string& what, const Size& size) {
  return describe(what, kGpu, at::kBFloat16, {size.rows, size.columns});
}

void check_activation(const ActivationSpec& spec, const Size& size) {
  const std::string where = place(kernels::activation_name(spec.kind), size);
  const int64_t out = kernels::is_gated(spec.kind) ? size.columns / 2 : size.columns;
  const Tensor x_few = gpu_random({kFew, size.columns}, at::kBFloat16);
  const Tensor dy_few = gpu_random({kFew, out}, at::kBFloat16);
  Tensor x = behind_zeros(x_few, size.rows), dy = behind_zeros(dy_few, size.rows);
  ASSERT_GT(x.numel(), int64_t{1} << 31) << where;
  const Tensor y_few = kernels::activation_forward(x_few, spec);
  expect_behind_zeros(kernels::activation_forward(x, spec), y_few, where + " y");
  const auto few = kernels::activation_backward(dy_few, x_few, spec, {}, false, true);
  {
    const auto plain = kernels::activation_backward(dy, x, spec);
    expect_behind_zeros(plain.dx, few.dx, where + " dx alone");
  }
  {
    const auto sums = kernels::activation_backward(dy, x, spec, {}, false, true);
    expect_behind_zeros(sums.dx, few.dx, where + " dx");
    expect_sums(sums.dbias, few.dbias, where + " dbias");
  }
  const auto both = kernels::activation_recompute(dy, x, spec, true, true, true);
  expect_behind_zeros(both.y, y_few, where + " y again");
  expect_behind_zeros(both.dx, few.dx, where + " dx again");
  expect_sums(both.dbias, few.dbias, where + " dbias again");
}

TEST(CudaLarge, ActivationsOfMoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GPU();
  const LargeMemory alone;
  torch::manual_seed(1);
  check_activation({ActivationKind::GELU}, {66000, 32768});
  check_activation({ActivationKind::ReLU}, {66000, 32767});
}

TEST(CudaLarge, GatedActivationsOfMoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GPU();
  const LargeMemory alone;
  torch::manual_seed(2);
  check_activation({ActivationKind::SwiGLU}, {66000, 32768});
  check_activation({ActivationKind::ReGLU}, {66000, 32766});
  check_activation({.kind = ActivationKind::SwiGLU, .glu_interleave_size = 32}, {66000, 32768});
}

void check_norm(bool centered, const Size& size) {
  const std::string where = place(centered ? "layer norm" : "rms norm", size);
  const Tensor x_few = gpu_random({kFew, size.columns}, at::kBFloat16);
  const Tensor dy_few = gpu_random({kFew, size.columns}, at::kBFloat16);
  const Tensor w = gpu_random({size.columns}, at::kBFloat16), b = at::zeros_like(w);
  const auto forward = [&](const Tensor& x) {
    return centered ? kernels::layer_norm_forward(x, w, b, 1e-5, false, at::kBFloat16)
                    : kernels::rms_norm_forward(x, w, 1e-5, false, at::kBFloat16);
  };
  const auto backward = [&](const Tensor& dy, const Tensor& x, const kernels::NormForward& f) {
    return centered
               ? kernels::layer_norm_backward(dy, x, f.mean, f.rstd, w, false, dy, true, true, true)
               : kernels::rms_norm_backward(dy, x, f.rstd, w, false, dy, true, true);
  };
  const Tensor x = behind_zeros(x_few, size.rows), dy = behind_zeros(dy_few, size.rows);
  ASSERT_GT(x.numel(), int64_t{1} << 31) << where;
  const auto f_few = forward(x_few);
  auto f = forward(x);
  expect_behind_zeros(f.y, f_few.y, where + " y");
  f.y.reset();
  expect_same_bits(f.rstd.narrow(0, size.rows - kFew, kFew), f_few.rstd, where + " rstd");
  const Tensor again =
      centered ? kernels::layer_norm_apply(x, f.mean, f.rstd, w, b, false, at::kBFloat16)
               : kernels::rms_norm_apply(x, f.rstd, w, false, at::kBFloat16);
  expect_behind_zeros(again, f_few.y, where + " y again");
  const auto few = backward(dy_few, x_few, f_few);
  const auto all = backward(dy, x, f);
  expect_behind_zeros(all.dx, few.dx, where + " dx");
  expect_sums(all.dw, few.dw, where + " dw");
  if (centered) expect_sums(all.db, few.db, where + " db");
}

TEST(CudaLarge, NormsOfMoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GPU();
  const LargeMemory alone;
  torch::manual_seed(3);
  for (const Size size : {Size{66000, 32768}, {264000, 8192}, {1056000, 2047}}) {
    check_norm(true, size);
    at::accelerator::emptyCache();
    check_norm(false, size);
    at::accelerator::emptyCache();
  }
}

TEST(CudaLarge, DropoutOfMoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GPU();
  const LargeMemory alone;
  torch::manual_seed(4);
  for (const int64_t columns : {int64_t{32768}, int64_t{32767}}) {
    const std::string where = place("dropout", {66000, columns});
    const Tensor few = gpu_random({kFew, columns}, at::kBFloat16);
    const Tensor x = behind_zeros(few, 66000);
    const auto f = kernels::dropout_forward(x, 0.25);
    const Tensor kept = f.mask.narrow(0, 66000 - kFew, kFew);
    const double share = f.mask.count_nonzero().item<double>() / static_cast<double>(x.numel());
    EXPECT_NEAR(share, 0.75, 1e-3) << where;
    EXPECT_NEAR(kept.to(at::kFloat).mean().item<double>(), 0.75, 1e-2) << where;
    EXPECT_FALSE(at::equal(kept, f.mask.narrow(0, 0, kFew))) << where << ": the first draws again";
    const Tensor y_few = kernels::dropout_backward(few, kept, 0.25);
    expect_close(y_few, few.to(at::kDouble) * kept.to(at::kDouble) / 0.75, at::kBFloat16, where);
    expect_behind_zeros(f.y, y_few, where + " y");
    expect_behind_zeros(kernels::dropout_backward(x, f.mask, 0.25), y_few, where + " dx");
  }
}

TEST(CudaLarge, BiasOfMoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GPU();
  const LargeMemory alone;
  torch::manual_seed(5);
  for (const Size size : {Size{66000, 32768}, {66000, 32767}, {2200000, 1024}}) {
    const std::string where = place("bias", size);
    const Tensor few = gpu_random({kFew, size.columns}, at::kBFloat16);
    Tensor x = behind_zeros(few, size.rows);
    expect_sums(kernels::bias_backward(x, size.columns), kernels::bias_backward(few, size.columns),
                where + " db");
    expect_behind_zeros(kernels::bias_forward(x, at::zeros({size.columns}, x.options())), few,
                        where + " y");
    x.reset();
    at::accelerator::emptyCache();
  }
}

}  // namespace
