// The CPU's own matrix products against float64 matmuls, in every orientation of the operands and
// with sizes that fill tiles, vectors and pairs only in part.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/backend/cpu/product.h"
#include "ligature/backend/cpu/product_tile.h"
#include "ligature/kernels/gemm.h"
#include "ligature/kernels/log.h"
#include "tolerance.h"

namespace cpu = ligature::cpu;
namespace kernels = ligature::kernels;
using at::Tensor;
using cpu::Matrix;

namespace {

struct Size {
  int64_t m, n, k;
};

// Whole tiles; less than one of everything; ends of every kind; one row block and a bit more.
const Size kSizes[] = {{14, 32, 16}, {1, 1, 1},    {3, 17, 5},
                       {29, 47, 33}, {64, 16, 31}, {600, 40, 70}};

template <typename F>
void for_each_dtype(const F& f) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(1);
    if (cpu::has_product_tiles(dtype == at::kBFloat16)) f(dtype);
  }
}

std::string where(at::ScalarType dtype, const Size& s) {
  return describe("product", at::kCPU, dtype, {s.m, s.n, s.k});
}

/// Rows that lie `gap` elements further apart than they have to.
Tensor with_gap(const Tensor& t, int64_t gap) {
  return at::constant_pad_nd(t, {0, gap}, NAN).narrow(1, 0, t.size(1));
}

Tensor turned(const Tensor& t) { return t.t().contiguous().t(); }

Tensor multiply(const cpu::Product& product, at::ScalarType dtype) {
  Tensor out = at::full({product.a.rows, product.b.rows}, NAN, dtype);
  EXPECT_TRUE(cpu::can_multiply(product));
  cpu::multiply(product, Matrix::of_result(out));
  return out;
}

TEST(CpuProduct, EveryOrientation) {
  for_each_dtype([](at::ScalarType dtype) {
    for (const Size& s : kSizes) {
      const Tensor a = random_tensor({s.m, s.k}, dtype), b = random_tensor({s.n, s.k}, dtype);
      const Tensor expected = reference(a).matmul(reference(b).t());
      for (const Tensor& left : {a, turned(a), with_gap(a, 3)}) {
        for (const Tensor& right : {b, turned(b), with_gap(b, 5)}) {
          expect_close(multiply({Matrix(left), Matrix(right), {}, {}}, dtype), expected, dtype,
                       where(dtype, s), tolerance_of_sum(dtype, s.k));
        }
      }
    }
  });
}

TEST(CpuProduct, TermsAreAddedBeforeTheOneRounding) {
  for_each_dtype([](at::ScalarType dtype) {
    for (const Size& s : kSizes) {
      const Tensor a = random_tensor({s.m, s.k}, dtype), b = random_tensor({s.n, s.k}, dtype);
      const Tensor bias = random_tensor({s.n}, dtype), add = random_tensor({s.m, s.n}, dtype);
      const Tensor exact = -0.5 * reference(a).matmul(reference(b).t());
      const cpu::Product product{Matrix(a), Matrix(b), Matrix(bias), Matrix(add), -0.5};
      const Tensor wanted = exact + reference(bias) + reference(add);
      expect_close(multiply(product, at::kFloat), wanted, at::kFloat, where(dtype, s),
                   tolerance_of_sum(at::kFloat, s.k));
      expect_same_bits(multiply(product, dtype), multiply(product, at::kFloat).to(dtype),
                       where(dtype, s) + " rounded");
      Tensor sum = add.clone();
      cpu::multiply({Matrix(a), Matrix(b), Matrix(bias), Matrix(sum), -0.5},
                    Matrix::of_result(sum));
      expect_same_bits(sum, multiply(product, dtype), where(dtype, s) + " in place");
    }
  });
}

TEST(CpuProduct, NothingBesideTheResultIsWritten) {
  for_each_dtype([](at::ScalarType dtype) {
    for (const Size& s : kSizes) {
      const Tensor a = random_tensor({s.m, s.k}, dtype), b = random_tensor({s.n, s.k}, dtype);
      Tensor memory = at::full({s.m + 2, s.n + 7}, 42.0, dtype);
      Tensor out = memory.narrow(0, 1, s.m).narrow(1, 3, s.n);
      cpu::multiply({Matrix(a), Matrix(b), {}, {}}, Matrix::of_result(out));
      expect_same_bits(out.contiguous(), multiply({Matrix(a), Matrix(b), {}, {}}, dtype),
                       where(dtype, s));
      out.fill_(42.0);
      EXPECT_TRUE(memory.eq(42.0).all().item<bool>()) << where(dtype, s);
    }
  });
}

TEST(CpuProduct, SameBitsWithAnyNumberOfThreads) {
  for_each_dtype([](at::ScalarType dtype) {
    for (const Size& s : {Size{300, 520, 130}, Size{530, 33, 3000}}) {
      const Tensor a = random_tensor({s.m, s.k}, dtype), b = random_tensor({s.n, s.k}, dtype);
      const auto run = [&](int threads) {
        const WithThreads with(threads);
        return multiply({Matrix(a), Matrix(b), {}, {}}, dtype);
      };
      const Tensor alone = run(1);
      expect_close(alone, reference(a).matmul(reference(b).t()), dtype, where(dtype, s),
                   tolerance_of_sum(dtype, s.k));
      for (const int threads : {2, 3, 7}) {
        expect_same_bits(run(threads), alone, where(dtype, s) + std::to_string(threads));
      }
    }
  });
}

TEST(CpuProduct, ValuesThatAreNotFinite) {
  for_each_dtype([](at::ScalarType dtype) {
    Tensor a = at::ones({16, 17}, dtype), b = at::ones({16, 17}, dtype);
    a[2][16] = NAN;
    a[3][0] = INFINITY;
    b[5][7] = -INFINITY;
    const Tensor y = multiply({Matrix(a), Matrix(b), {}, {}}, dtype);
    expect_close(y, reference(a).matmul(reference(b).t()), dtype, c10::toString(dtype));
    EXPECT_TRUE(y[2].isnan().all().item<bool>() && y[3][5].isnan().item<bool>());
    EXPECT_EQ(y[4][5].item<float>(), -INFINITY);
  });
}

TEST(CpuProduct, TheSmallestNumbersAreRoundedLikeOthers) {
  if (!cpu::has_product_tiles(true)) GTEST_SKIP() << "no bfloat16 on this processor";
  const Tensor a = at::full({2, 2}, 0x1p-120, at::kFloat), b = at::full({2, 2}, 0x1.8p-13);
  const Tensor y = multiply({Matrix(a), Matrix(b), {}, {}}, at::kFloat);
  EXPECT_EQ(y[0][0].item<float>(), 0x1.8p-132f);
  const Tensor zero = at::zeros({2, 2}, at::kBFloat16);
  const Tensor small = at::full({2, 2}, 0x1.8p-132, at::kFloat);
  Tensor out = at::ones({2, 2}, at::kBFloat16);
  cpu::multiply({Matrix(zero), Matrix(zero), {}, Matrix(small)}, Matrix::of_result(out));
  expect_same_bits(out, small.to(at::kBFloat16), "of a term that is added");
}

TEST(CpuProduct, WhatItCannotReadIsNotTaken) {
  if (!cpu::has_product_tiles(false)) GTEST_SKIP() << "not for this processor";
  const Tensor a = at::ones({32, 32}), b = at::ones({32, 32});
  EXPECT_TRUE(cpu::can_multiply({Matrix(a), Matrix(b), {}, {}}));
  const Tensor apart = at::ones({32, 64}).as_strided({32, 32}, {64, 2});
  EXPECT_FALSE(cpu::can_multiply({Matrix(a), Matrix(apart), {}, {}}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(a), Matrix(b.to(at::kBFloat16)), {}, {}}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(a), Matrix(at::ones({32, 31})), {}, {}}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(a), Matrix(b), Matrix(at::ones({31})), {}}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(a), Matrix(b), {}, Matrix(turned(a))}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(a), Matrix(b), {}, Matrix(at::ones({1, 32}))}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(a.to(at::kHalf)), Matrix(b.to(at::kHalf)), {}, {}}));
  EXPECT_FALSE(cpu::can_multiply({Matrix(at::_neg_view(a)), Matrix(b), {}, {}}));
  EXPECT_TRUE(cpu::has_memory({Matrix(a), Matrix(b), {}, {}}));
  EXPECT_FALSE(cpu::has_memory({Matrix(a), Matrix(b.to(at::kMeta)), {}, {}}));
  EXPECT_FALSE(cpu::has_memory({Matrix(a), Matrix(b), {}, Matrix(a.to(at::kMeta))}));
}

// However many rows there are, and so however the product is cut.
TEST(CpuProduct, ARowsBitsAreItsOwn) {
  for_each_dtype([](at::ScalarType dtype) {
    for (const int64_t k : {1, 7, 200, 601}) {
      const Tensor a = random_tensor({600, k}, dtype), b = random_tensor({133, k}, dtype);
      for (const Tensor& right : {b, turned(b)}) {
        for (const at::ScalarType out : {dtype, at::kFloat}) {
          const Tensor all = multiply({Matrix(a), Matrix(right), {}, {}}, out);
          for (const int64_t rows : {1, 2, 14, 15, 60}) {
            expect_same_bits(multiply({Matrix(a.narrow(0, 5, rows)), Matrix(right), {}, {}}, out),
                             all.narrow(0, 5, rows), where(dtype, {rows, 133, k}));
          }
        }
      }
    }
  });
}

TEST(CpuProduct, PlainSumsAreRoundedAsOthers) {
  for_each_dtype([](at::ScalarType dtype) {
    for (const int64_t m : {5, 40}) {
      for (const int64_t k : {4, 300}) {
        const Tensor a = random_tensor({m, k}, dtype), b = random_tensor({64, k}, dtype);
        a[1].mul_(1e-30);
        b[3].mul_(1e-9);  // sums near the smallest numbers
        a[2].fill_(INFINITY);
        a[3][1] = NAN;
        a[4].fill_(3e38);
        const cpu::Product product{Matrix(a), Matrix(b), {}, {}};
        const Tensor rounded = multiply(product, dtype);
        const Tensor expected = multiply(product, at::kFloat).to(dtype);
        EXPECT_TRUE(at::allclose(rounded, expected, 0, 0, /*equal_nan=*/true))
            << where(dtype, {m, 64, k});
      }
    }
  });
}

/// The backend that a kernel notes for a product of these sizes.
std::string backend_of(at::ScalarType dtype, int64_t rows) {
  const Tensor x = at::ones({rows, 32}, dtype), w = at::ones({48, 32}, dtype);
  kernels::KernelLog log(at::kCPU);
  kernels::linear_forward(x, w);
  return log.take().at(0).backend;
}

TEST(CpuProduct, KernelsSayWhoMultiplied) {
  const bool ours = cpu::gains_by_product_tiles();
  EXPECT_EQ(backend_of(at::kFloat, 64), ours && cpu::has_product_tiles(false) ? "cpu" : "aten");
  EXPECT_EQ(backend_of(at::kBFloat16, 64), ours && cpu::has_product_tiles(true) ? "cpu" : "aten");
  EXPECT_EQ(backend_of(at::kFloat, 1), "aten");
  EXPECT_EQ(backend_of(at::kFloat, 2), backend_of(at::kFloat, 64));
  EXPECT_EQ(backend_of(at::kBFloat16, 1 << 15), backend_of(at::kBFloat16, 64));
  EXPECT_EQ(backend_of(at::kDouble, 64), "aten");
}

// The same kernels as in kernel_gemm_test.cpp, at sizes that are multiplied here where that pays.
TEST(CpuProduct, ProductsOfALinear) {
  for_each_dtype([](at::ScalarType dtype) {
    const Tensor x = random_tensor({4, 16, 40}, dtype), w = random_tensor({48, 40}, dtype);
    const Tensor dy = random_tensor({4, 16, 48}, dtype), bias = random_tensor({48}, dtype);
    const Tensor rx = reference(x), rw = reference(w), rdy = reference(dy);
    const Tensor rdw = rdy.reshape({64, 48}).t().matmul(rx.reshape({64, 40}));
    const Tolerance allowed = tolerance_of_sum(dtype, 64);
    expect_close(kernels::linear_forward(x, w, bias, dy, 0.5),
                 0.5 * rx.matmul(rw.t()) + reference(bias) + rdy, dtype, "forward", allowed);
    Tensor y = dy.clone();
    kernels::linear_forward_add_(y, x, w, bias, 2.0);
    expect_close(y, 2 * rx.matmul(rw.t()) + reference(bias) + rdy, dtype, "in place", allowed);
    expect_close(kernels::linear_input_grad(dy, w, x), rdy.matmul(rw) + rx, dtype, "dx", allowed);
    expect_close(kernels::linear_weight_grad(dy, x), rdw, dtype, "dw", allowed);
    Tensor main = at::ones({48, 40});
    kernels::linear_weight_grad_into(main, dy, x, true, 0.25);
    expect_close(main, 0.25 * rdw + 1, at::kFloat, "main grad", tolerance_of_sum(at::kFloat, 64));
  });
}

}  // namespace
