// The CUDA norms against float64 formulas, over the sizes and layouts that take different paths.
#include "cuda_test_support.h"
#include "ligature/backend/cuda/norm.h"
#include "ligature/kernels/norm.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::NormBackward;
using kernels::NormForward;

namespace {

constexpr double kEps = 1e-5;

struct Case {
  Size size;
  at::ScalarType dtype, w_dtype;
  bool centered, zero_centered = false, aligned = true;

  std::string where() const {
    return describe(std::string(centered ? "layer" : "rms") + (aligned ? "" : " unaligned") +
                        (zero_centered ? " zero-centered" : "") + " w " + c10::toString(w_dtype),
                    kGpu, dtype, {size.rows, size.columns});
  }
};

struct Reference {
  Tensor x, gamma, mean, rstd, xhat;

  Reference(const Case& c, const Tensor& x_, const Tensor& w)
      : x(x_.to(at::kDouble)), gamma(w.to(at::kDouble) + (c.zero_centered ? 1 : 0)) {
    mean = c.centered ? x.mean(1) : at::zeros({x.size(0)}, x.options());
    const Tensor centered = x - mean.unsqueeze(1);
    rstd = (centered.square().mean(1) + kEps).rsqrt();
    xhat = centered * rstd.unsqueeze(1);
  }

  Tensor dx(const Tensor& dy, bool centered) const {
    const Tensor g = dy.to(at::kDouble) * gamma;
    Tensor result = g - xhat * (g * xhat).mean({1}, true);
    if (centered) result = result - g.mean({1}, true);
    return result * rstd.unsqueeze(1);
  }
};

NormForward forward(const Case& c, const Tensor& x, const Tensor& w, const Tensor& b,
                    at::ScalarType out_dtype) {
  return c.centered ? kernels::layer_norm_forward(x, w, b, kEps, c.zero_centered, out_dtype)
                    : kernels::rms_norm_forward(x, w, kEps, c.zero_centered, out_dtype);
}

NormBackward backward(const Case& c, const Tensor& dy, const Tensor& x, const NormForward& f,
                      const Tensor& w, const Tensor& add, bool need_dx, bool need_dw,
                      bool need_db) {
  return c.centered
             ? kernels::layer_norm_backward(dy, x, f.mean, f.rstd, w, c.zero_centered, add, need_dx,
                                            need_dw, need_db)
             : kernels::rms_norm_backward(dy, x, f.rstd, w, c.zero_centered, add, need_dx, need_dw);
}

/// On the CPU: initcheck takes what torch's kernel leaves unwritten on the way for a mistake.
Tensor column_sums(const Tensor& values) { return values.to(at::kCPU).sum(0).to(values.device()); }

void check(const Case& c) {
  torch::manual_seed(3);
  const auto [rows, n] = c.size;
  const Tensor x = (gpu_random({rows, n}, c.dtype, c.aligned) + 0.5).contiguous();
  const Tensor input = c.aligned ? x : unaligned(x);
  const Tensor w = gpu_random({n}, c.w_dtype, c.aligned);
  const Tensor b = gpu_random({n}, c.w_dtype, c.aligned);
  const Tensor dy = gpu_random({rows, n}, c.dtype, c.aligned);
  const Tensor add = gpu_random({rows, n}, c.dtype, c.aligned);
  const Reference r(c, x, w);
  const Tensor y = r.xhat * r.gamma + (c.centered ? b.to(at::kDouble) : at::zeros_like(r.gamma));

  const NormForward f = forward(c, input, w, b, c.dtype);
  expect_close(f.y, y, c.dtype, c.where() + " y");
  expect_close(f.rstd, r.rstd, at::kFloat, c.where() + " rstd");
  if (c.centered) expect_close(f.mean, r.mean, at::kFloat, c.where() + " mean");
  const Tensor again =
      c.centered ? kernels::layer_norm_apply(input, f.mean, f.rstd, w, b, c.zero_centered, c.dtype)
                 : kernels::rms_norm_apply(input, f.rstd, w, c.zero_centered, c.dtype);
  expect_same_bits(again, f.y, c.where() + " apply");
  const NormForward statistics = ligature::cuda::norm_statistics(input, n, kEps, c.centered);
  expect_same_bits(statistics.rstd, f.rstd, c.where() + " statistics");
  expect_same_bits(statistics.mean, f.mean, c.where() + " statistics");

  const Tensor dx = r.dx(dy, c.centered);
  const Tensor dw = column_sums(dy.to(at::kDouble) * r.xhat);
  const Tensor db = column_sums(dy.to(at::kDouble));
  const Tolerance summed =
      tolerance_of_sum(c.w_dtype == at::kDouble ? at::kFloat : c.w_dtype, rows);
  const NormBackward all = backward(c, dy, input, f, w, {}, true, true, true);
  expect_close(all.dx, dx, c.dtype, c.where() + " dx");
  expect_close(all.dw, dw, c.w_dtype, c.where() + " dw", summed);
  if (c.centered) expect_close(all.db, db, c.w_dtype, c.where() + " db", summed);
  const NormBackward added = backward(c, dy, input, f, w, add, true, true, true);
  expect_close(added.dx, dx + add.to(at::kDouble), c.dtype, c.where() + " dx + add");
  expect_same_bits(added.dw, all.dw, c.where() + " dw again");
  expect_same_bits(added.db, all.db, c.where() + " db again");
}

TEST(CudaNormTest, EverySizeAndDtype) {
  SKIP_WITHOUT_GPU();
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const Size size : cuda_sizes()) {
      for (const bool centered : {false, true}) check({size, dtype, dtype, centered});
    }
  }
}

TEST(CudaNormTest, UnalignedAndMixed) {
  SKIP_WITHOUT_GPU();
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const Size size : {Size{64, 256}, {40, 4096}, {16, 16384}, {5, 40000}}) {
      check({size, dtype, dtype, true, true, false});
      check({size, dtype, at::kFloat, false, true, true});
      check({size, dtype, at::kHalf, true, true, true});
    }
    check({{30, 130}, dtype, at::kDouble, true, false, true});
  }
}

// So many rows that every block has several, and the last round not all of them.
TEST(CudaNormTest, ManyRows) {
  SKIP_WITHOUT_GPU();
  for (const Size size :
       {Size{30011, 24}, {9001, 520}, {7003, 1000}, {3301, 2048}, {1999, 3600}, {1301, 8192}}) {
    for (const bool centered : {false, true}) {
      check({size, at::kBFloat16, at::kBFloat16, centered});
      check({size, at::kFloat, at::kFloat, centered});
    }
  }
}

TEST(CudaNormTest, StatisticsDoNotDependOnParameters) {
  SKIP_WITHOUT_GPU();
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const int64_t n : {256, 1024, 2048, 4096, 40000}) {
      for (const bool centered : {false, true}) {
        const Case c{{12, n}, dtype, dtype, centered};
        const Tensor x = gpu_random({12, n}, dtype), w = gpu_random({n}, dtype);
        const NormForward f = forward(c, x, w, w, dtype);
        const Tensor wide = w.to(at::kFloat);
        for (const NormForward& other :
             {forward(c, x, unaligned(w), unaligned(w), dtype), forward(c, x, wide, wide, dtype),
              ligature::cuda::norm_statistics(x, n, kEps, centered)}) {
          expect_same_bits(other.rstd, f.rstd, c.where() + " rstd");
          expect_same_bits(other.mean, f.mean, c.where() + " mean");
          if (other.y.defined()) expect_same_bits(other.y, f.y, c.where() + " y");
        }
      }
    }
  }
}

TEST(CudaNormTest, GivesOnlyWhatIsNeeded) {
  SKIP_WITHOUT_GPU();
  for (const Size size : {Size{50, 300}, {64, 512}, {9, 4096}, {4, 40000}}) {
    for (const bool centered : {false, true}) {
      const Case c{size, at::kBFloat16, at::kFloat, centered};
      const Tensor x = gpu_random({size.rows, size.columns}, c.dtype);
      const Tensor dy = gpu_random({size.rows, size.columns}, c.dtype);
      const Tensor w = gpu_random({size.columns}, c.w_dtype);
      const NormForward f = forward(c, x, w, w, c.dtype);
      const NormBackward all = backward(c, dy, x, f, w, {}, true, true, true);
      for (int needs = 0; needs < 8; ++needs) {
        const bool need_dx = needs & 1, need_dw = needs & 2, need_db = centered && (needs & 4);
        const NormBackward some = backward(c, dy, x, f, w, {}, need_dx, need_dw, need_db);
        expect_same_bits(some.dx, need_dx ? all.dx : Tensor(), c.where() + " dx");
        expect_same_bits(some.dw, need_dw ? all.dw : Tensor(), c.where() + " dw");
        expect_same_bits(some.db, need_db ? all.db : Tensor(), c.where() + " db");
      }
    }
  }
}

TEST(CudaNormTest, GradientsInOtherDtypes) {
  SKIP_WITHOUT_GPU();
  const Case c{{40, 512}, at::kBFloat16, at::kBFloat16, true};
  const Tensor x = gpu_random({40, 512}, c.dtype), w = gpu_random({512}, c.dtype);
  const Tensor dy = gpu_random({40, 512}, at::kFloat), add = gpu_random({40, 512}, at::kHalf);
  const NormForward f = forward(c, x, w, w, at::kFloat);
  const Reference r(c, x, w);
  expect_close(f.y, r.xhat * r.gamma + w.to(at::kDouble), at::kFloat, "y in float");
  const NormBackward g = backward(c, dy, x, f, w, add, true, true, true);
  expect_close(g.dx, r.dx(dy, true) + add.to(at::kDouble), c.dtype, "dx");
}

TEST(CudaNormTest, FarFromZero) {
  SKIP_WITHOUT_GPU();
  for (const int64_t n : {256, 4096, 40000}) {
    const Tensor x = gpu_random({20, n}, at::kFloat) + 1000;
    const Tensor w = at::ones({n}, x.options());
    const Case c{{20, n}, at::kFloat, at::kFloat, true};
    const Reference r(c, x, w);
    expect_close(forward(c, x, w, at::zeros_like(w), at::kFloat).rstd, r.rstd, at::kFloat, "rstd",
                 {1e-5, 0});
  }
}

TEST(CudaNormTest, L2) {
  SKIP_WITHOUT_GPU();
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const Size size : cuda_sizes()) {
      torch::manual_seed(4);
      const Tensor x = gpu_random({size.rows, size.columns}, dtype);
      const Tensor dy = gpu_random({size.rows, size.columns}, dtype);
      const std::string where = describe("l2", kGpu, dtype, {size.rows, size.columns});
      const Tensor xd = x.to(at::kDouble), g = dy.to(at::kDouble);
      const Tensor rstd = (xd.square().sum(1) + kEps).rsqrt();
      const Tensor xhat = xd * rstd.unsqueeze(1);
      const auto f = kernels::l2_normalization_forward(x, kEps);
      expect_close(f.y, xhat, dtype, where + " y");
      expect_close(f.rstd, rstd, at::kFloat, where + " rstd");
      const Tensor dx = (g - xhat * (g * xhat).sum({1}, true)) * rstd.unsqueeze(1);
      expect_close(kernels::l2_normalization_backward(dy, x, f.rstd), dx, dtype, where + " dx");
    }
  }
}

}  // namespace
