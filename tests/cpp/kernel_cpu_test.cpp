// What the CPU kernels promise besides their values: the same bits however many threads there are,
// whether bfloat16 is computed directly or as float32, and whether a result is large or small.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernel_test_support.h"
#include "ligature/backend/cpu/stream.h"
#include "ligature/kernels/activation.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/bias_activation.h"
#include "ligature/kernels/dropout.h"
#include "ligature/kernels/norm.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;

namespace {

constexpr double kEps = 1e-5;

/// The results of a kernel that have the dtype of its tensors, and those that are sums of them.
struct Results {
  std::vector<Tensor> rows, sums;
};

struct Case {
  std::string name;
  /// From an input x and a second tensor of x's shape.
  std::function<Results(const Tensor& x, const Tensor& other)> run;
};

Tensor weight_of(const Tensor& x) {
  return at::linspace(0.5, 1.5, x.size(-1), at::kDouble).to(at::kBFloat16).to(x.scalar_type());
}

Results layer_norm(const Tensor& x, const Tensor& dy, const Tensor& add) {
  const Tensor w = weight_of(x);
  const auto f = kernels::layer_norm_forward(x, w, w, kEps, false, x.scalar_type());
  const auto g = kernels::layer_norm_backward(dy, x, f.mean, f.rstd, w, false, add);
  const auto dx_only =
      kernels::layer_norm_backward(dy, x, f.mean, f.rstd, w, false, add, true, false, false);
  const auto db_only =
      kernels::layer_norm_backward(dy, x, f.mean, f.rstd, w, false, add, true, false, true);
  return {{f.y, g.dx, dx_only.dx, db_only.dx}, {f.mean, f.rstd, g.dw, g.db, db_only.db}};
}

Results rms_norm(const Tensor& x, const Tensor& dy, const Tensor& add) {
  const Tensor w = weight_of(x);
  const auto f = kernels::rms_norm_forward(x, w, kEps, true, x.scalar_type());
  const auto g = kernels::rms_norm_backward(dy, x, f.rstd, w, true, add, true, true);
  return {{f.y, g.dx}, {f.rstd, g.dw}};
}

Results bias_activation(ActivationKind kind, const Tensor& x) {
  const auto both = kernels::bias_activation_forward(x, weight_of(x), {.kind = kind}, true);
  const auto alone = kernels::bias_activation_forward(x, weight_of(x), {.kind = kind}, false);
  return {{both.y, both.z, alone.y}, {}};
}

Results activation(ActivationKind kind, const Tensor& x, const Tensor& other) {
  const ActivationSpec spec{.kind = kind};
  const Tensor dy =
      kernels::is_gated(kind) ? other.narrow(-1, 0, x.size(-1) / 2).contiguous() : other;
  const auto g = kernels::activation_backward(dy, x, spec);
  const auto with_bias = kernels::activation_backward(dy, x, spec, {}, false, true);
  const auto again = kernels::activation_recompute(dy, x, spec);
  const auto again_with_bias = kernels::activation_recompute(dy, x, spec, true);
  return {{kernels::activation_forward(x, spec), g.dx, with_bias.dx, again.y, again.dx,
           again_with_bias.y, again_with_bias.dx},
          {with_bias.dbias, again_with_bias.dbias}};
}

std::vector<Case> cases() {
  std::vector<Case> made{
      {"LayerNorm", [](const Tensor& x, const Tensor& dy) { return layer_norm(x, dy, {}); }},
      {"add+LayerNorm", [](const Tensor& x, const Tensor& dy) { return layer_norm(x, dy, x); }},
      {"RMSNorm", [](const Tensor& x, const Tensor& dy) { return rms_norm(x, dy, {}); }},
      {"add+RMSNorm", [](const Tensor& x, const Tensor& dy) { return rms_norm(x, dy, x); }},
      {"L2Normalization",
       [](const Tensor& x, const Tensor& dy) {
         const auto f = kernels::l2_normalization_forward(x, kEps);
         return Results{{f.y, kernels::l2_normalization_backward(dy, x, f.rstd)}, {f.rstd}};
       }},
      {"Bias",
       [](const Tensor& x, const Tensor& dy) {
         return Results{{kernels::bias_forward(x, weight_of(x))},
                        {kernels::bias_backward(dy, x.size(-1))}};
       }},
      {"Dropout",
       [](const Tensor& x, const Tensor& dy) {
         torch::manual_seed(3);
         const auto f = kernels::dropout_forward(x, 0.25);
         return Results{
             {f.y, f.mask.to(x.scalar_type()), kernels::dropout_backward(dy, f.mask, 0.25)}, {}};
       }},
  };
  for (const ActivationKind kind : kernels::kActivationKinds) {
    made.push_back({kernels::activation_name(kind),
                    [kind](const Tensor& x, const Tensor& dy) { return activation(kind, x, dy); }});
  }
  return made;
}

void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& wanted,
                 const std::string& where) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    expect_same_bits(got[i], wanted[i], where + " result " + std::to_string(i));
  }
}

/// A tensor with the values of `t` that begins `offset` elements behind a border of memory.
Tensor moved(const Tensor& t, int64_t offset) {
  const Tensor room = at::empty({t.numel() + offset}, t.options());
  return room.narrow(0, offset, t.numel()).view(t.sizes()).copy_(t);
}

TEST(CpuKernelTest, SameBitsWithAnyNumberOfThreads) {
  torch::manual_seed(1);
  for (const at::ScalarType dtype : test_dtypes()) {
    const Tensor x = random_tensor({333, 258}, dtype), dy = random_tensor({333, 258}, dtype);
    for (const Case& c : cases()) {
      Results one;
      {
        const WithThreads with(1);
        one = c.run(x, dy);
      }
      for (const int threads : {1, 2, 5}) {
        const WithThreads with(threads);
        const Results many = c.run(x, dy);
        const std::string where = describe(c.name, at::kCPU, dtype, x.sizes());
        expect_same(many.rows, one.rows, where + std::to_string(threads) + " threads");
        expect_same(many.sums, one.sums, where + std::to_string(threads) + " threads");
      }
    }
  }
}

TEST(CpuKernelTest, LowerPrecisionIsFloatRoundedOnce) {
  torch::manual_seed(2);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t columns : {2, 34, 258, 2050}) {
      const Tensor x = random_tensor({37, columns}, dtype, at::kCPU, 3.0);
      const Tensor dy = random_tensor({37, columns}, dtype);
      for (const Case& c : cases()) {
        const Results wanted = c.run(x.to(at::kFloat), dy.to(at::kFloat));
        for (const int64_t offset : {0, 1}) {
          const Results got = c.run(moved(x, offset), moved(dy, offset));
          const std::string where = describe(c.name, at::kCPU, dtype, x.sizes());
          std::vector<Tensor> rows, sums;
          for (const Tensor& t : wanted.rows) rows.push_back(t.to(dtype));
          for (size_t i = 0; i < wanted.sums.size(); ++i) {
            sums.push_back(wanted.sums[i].to(got.sums[i].scalar_type()));
          }
          expect_same(got.rows, rows, where);
          expect_same(got.sums, sums, where);
        }
      }
    }
  }
}

// Rows of a large result are those that few rows give; the large ones are written past the caches.
TEST(CpuKernelTest, LargeResultsHaveTheSameBits) {
  torch::manual_seed(4);
  const int64_t columns = 1026, rows = (ligature::cpu::kStreamResultBytes / 4 + columns) / columns;
  const Tensor x = random_tensor({rows, columns}, at::kFloat);
  const Tensor dy = random_tensor({rows, columns}, at::kFloat);
  ASSERT_GE(static_cast<int64_t>(x.nbytes()), ligature::cpu::kStreamResultBytes);
  for (const Case& c : cases()) {
    const bool gated = c.name == "SwiGLU";
    if (c.name != "add+LayerNorm" && c.name != "RMSNorm" && c.name != "ReLU" && c.name != "Bias" &&
        !gated) {
      continue;
    }
    const Results large = c.run(x, dy);
    for (const int64_t first : {int64_t{0}, rows / 2 + 1, rows - 3}) {
      const Results small = c.run(x.narrow(0, first, 3), dy.narrow(0, first, 3));
      for (size_t i = 0; i < large.rows.size(); ++i) {
        const Tensor part = large.rows[i].narrow(0, first, 3).contiguous();
        expect_same_bits(part, small.rows[i], c.name + " result " + std::to_string(i));
      }
    }
  }
}

TEST(CpuKernelTest, LargeResultsInBFloat16HaveTheSameBits) {
  torch::manual_seed(5);
  const int64_t columns = 1026, rows = (ligature::cpu::kStreamResultBytes / 2 + columns) / columns;
  const Tensor x = random_tensor({rows, columns}, at::kBFloat16);
  const Results large = activation(ActivationKind::ReLU, x, x.neg());
  const Results with_bias = bias_activation(ActivationKind::ReLU, x);
  for (const int64_t first : {int64_t{0}, rows / 2 + 1, rows - 3}) {
    const Tensor part = x.narrow(0, first, 3);
    const Results small = activation(ActivationKind::ReLU, part, part.neg());
    for (size_t i = 0; i < large.rows.size(); ++i) {
      expect_same_bits(large.rows[i].narrow(0, first, 3).contiguous(), small.rows[i],
                       "ReLU result " + std::to_string(i));
    }
    const Results small_with_bias = bias_activation(ActivationKind::ReLU, part);
    for (size_t i = 0; i < with_bias.rows.size(); ++i) {
      expect_same_bits(with_bias.rows[i].narrow(0, first, 3).contiguous(), small_with_bias.rows[i],
                       "Bias and ReLU, result " + std::to_string(i));
    }
  }
}

// The bits of a sum that has been stored in between.
TEST(CpuKernelTest, BiasAndActivationAreOneAfterTheOther) {
  torch::manual_seed(6);
  for (const at::ScalarType dtype : test_dtypes()) {
    for (const int64_t columns : {2, 34, 258, 2050}) {
      for (const int64_t offset : {0, 1}) {
        const Tensor x = moved(random_tensor({37, columns}, dtype, at::kCPU, 3.0), offset);
        const Tensor z = kernels::bias_forward(x, weight_of(x));
        for (const ActivationKind kind : kernels::kActivationKinds) {
          const Tensor y = kernels::activation_forward(z, {.kind = kind});
          const std::string where =
              describe(kernels::activation_name(kind), at::kCPU, dtype, x.sizes());
          expect_same(bias_activation(kind, x).rows, {y, z, y}, where);
        }
        const ActivationSpec blocks{.kind = ActivationKind::SwiGLU,
                                    .glu_interleave_size = columns / 2};
        expect_same_bits(kernels::bias_activation_forward(x, weight_of(x), blocks, false).y,
                         kernels::activation_forward(z, blocks), "blocks");
      }
    }
  }
}

// As torch has it: NaN goes through, and where the input is not above zero no gradient does.
TEST(CpuKernelTest, ReluAtTheEnds) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const Tensor values = at::tensor({-inf, -1e-40, -0.0, 0.0, 1e-40, 2.5, inf, nan, -nan, -3.0});
  const Tensor grads = at::tensor({nan, inf, -inf, nan, inf, -inf, nan, 2.0, 3.0, inf});
  const ActivationSpec relu{.kind = ActivationKind::ReLU};
  for (const at::ScalarType dtype : test_dtypes()) {
    // Once in vectors, once one by one.
    const Tensor x = at::cat({values.repeat({32}), values}).to(dtype);
    const Tensor dy = at::cat({grads.repeat({32}), grads}).to(dtype);
    const Tensor wanted = at::where(x <= 0, at::zeros_like(dy), dy);
    const auto same = [](const Tensor& a, const Tensor& b) {
      return at::allclose(a.to(at::kDouble), b.to(at::kDouble), 0, 0, /*equal_nan=*/true);
    };
    EXPECT_TRUE(same(kernels::activation_forward(x, relu), at::relu(x))) << dtype;
    EXPECT_TRUE(same(kernels::activation_backward(dy, x, relu).dx, wanted)) << dtype;
    EXPECT_TRUE(same(kernels::activation_recompute(dy, x, relu).dx, wanted)) << dtype;
    const Tensor sums =
        kernels::activation_backward(dy.view({1, -1}), x.view({1, -1}), relu, {}, false, true)
            .dbias;
    EXPECT_TRUE(same(sums, wanted)) << dtype;
  }
}

TEST(CpuKernelTest, StreamedBytesAreThoseCopied) {
  const Tensor from = at::randint(0, 256, {1000}, at::kByte);
  for (int64_t offset = 0; offset < 66; ++offset) {
    for (const int64_t n : {0, 1, 15, 63, 64, 65, 200, 700}) {
      Tensor to = at::zeros({1000}, at::kByte), wanted = at::zeros({1000}, at::kByte);
      ligature::cpu::stream_copy(to.mutable_data_ptr<uint8_t>() + offset,
                                 from.const_data_ptr<uint8_t>() + 3, n);
      ligature::cpu::stream_end();
      std::memcpy(wanted.mutable_data_ptr<uint8_t>() + offset, from.const_data_ptr<uint8_t>() + 3,
                  n);
      ASSERT_TRUE(at::equal(to, wanted)) << offset << " " << n;
    }
  }
}

}  // namespace
