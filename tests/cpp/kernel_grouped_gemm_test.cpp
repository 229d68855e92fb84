// The GEMMs of groups against float64, and against the bits of each group's GEMM alone.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/grouped_gemm.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::Groups;

namespace {

using Sizes = std::vector<int64_t>;

struct Features {
  int64_t in, out;
};

/// Sizes of groups, and rows behind them that belong to none.
struct Split {
  Sizes sizes;
  int64_t tail;

  Groups groups() const {
    int64_t rows = tail;
    for (const int64_t size : sizes) rows += size;
    return kernels::make_groups("[test]", at::tensor(sizes, at::kInt), rows);
  }
};

Sizes mostly_empty() {
  Sizes sizes(1000, 0);
  for (const int64_t g : {3, 500, 501, 998}) sizes[g] = g % 7 + 1;
  return sizes;
}

const Split kSplits[] = {{{21}, 0},
                         {{0}, 3},
                         {{0, 0, 0}, 0},
                         {{1}, 0},
                         {{3, 0, 17, 40, 0, 1, 2, 14}, 9},
                         {{0, 64, 0}, 5},
                         {{0, 0, 33}, 0},
                         {{33, 0, 0}, 2},
                         {mostly_empty(), 4}};
const Features kFeatures[] = {{1, 7}, {7, 33}, {33, 130}, {130, 33}, {64, 96}, {96, 1}};

std::vector<Tensor> weights_of(int64_t count, Features f, at::ScalarType dtype) {
  return random_tensor({count, f.out, f.in}, dtype).unbind(0);
}

/// NaN and Inf in the rows behind the groups.
void spoil_tail(const Tensor& t, const Groups& groups) {
  const int64_t end = groups.end(groups.count - 1);
  t.narrow(0, end, groups.rows - end).fill_(NAN);
  if (end < groups.rows) t.select(0, groups.rows - 1).fill_(INFINITY);
}

Tensor spoiled(int64_t columns, const Groups& groups, at::ScalarType dtype) {
  const Tensor t = random_tensor({groups.rows, columns}, dtype);
  spoil_tail(t, groups);
  return t;
}

Tensor part(const Tensor& t, const Groups& groups, int64_t g) {
  return t.narrow(0, groups.begin(g), groups.size(g));
}

/// Row r of the operand.
Tensor gathered(const Tensor& t, const Tensor& index, const Groups& groups, int64_t g) {
  return index.defined() ? t.index_select(0, part(index, groups, g)) : part(t, groups, g);
}

/// Rows of `tokens`, some of them more than once; -1 behind the groups.
Tensor index_of(const Groups& groups, int64_t tokens) {
  Tensor index = at::randint(tokens, {groups.rows}, at::kInt);
  const int64_t end = groups.end(groups.count - 1);
  index.narrow(0, end, groups.rows - end).fill_(-1);
  return index;
}

void expect_zeros_behind(const Tensor& y, const Groups& groups, const std::string& where) {
  const int64_t end = groups.end(groups.count - 1);
  EXPECT_TRUE((y.narrow(0, end, groups.rows - end) == 0).all().item<bool>()) << where << ": tail";
}

/// One set of operands: `index`es may be undefined.
struct Operands {
  Groups groups;
  Features f;
  at::ScalarType dtype;
  Tensor x, dy, x_index, dy_index;
  std::vector<Tensor> w, bias;
  std::string where;

  Operands(const Split& split, Features features, at::ScalarType type, bool gathers = false)
      : groups(split.groups()), f(features), dtype(type) {
    if (gathers) {
      x = random_tensor({11, f.in}, dtype);
      dy = random_tensor({7, f.out}, dtype);
      x_index = index_of(groups, 11);
      dy_index = index_of(groups, 7);
    } else {
      x = spoiled(f.in, groups, dtype);
      dy = spoiled(f.out, groups, dtype);
    }
    w = weights_of(groups.count, f, dtype);
    bias = random_tensor({groups.count, f.out}, dtype).unbind(0);
    where = describe("grouped", at::kCPU, dtype, split.sizes.size() > 20 ? Sizes{} : split.sizes) +
            " in " + std::to_string(f.in) + " out " + std::to_string(f.out);
  }

  Tensor forward(bool with_bias = true) const {
    return kernels::grouped_linear_forward(x, w, groups, with_bias ? bias : std::vector<Tensor>{},
                                           {}, x_index);
  }
  Tensor input_grad() const { return kernels::grouped_linear_input_grad(dy, w, groups, dy_index); }
  std::vector<Tensor> weight_grads(at::ScalarType out, bool accumulate) const {
    std::vector<Tensor> outs;
    for (int64_t g = 0; g < groups.count; ++g) outs.push_back(at::full({f.out, f.in}, 0.5, out));
    kernels::grouped_linear_weight_grad_into(outs, dy, x, groups, accumulate, dy_index, x_index);
    return outs;
  }

  /// All of them, against each group's alone and float64.
  void check() const {
    const Tensor y = forward(), plain = forward(false), dx = input_grad();
    expect_zeros_behind(y, groups, where + " forward");
    expect_zeros_behind(dx, groups, where + " dx");
    for (int64_t g = 0; g < groups.count; ++g) {
      if (groups.size(g) == 0) continue;
      const Tensor rows = gathered(x, x_index, groups, g),
                   grads = gathered(dy, dy_index, groups, g);
      const std::string here = where + " group " + std::to_string(g);
      expect_same_bits(part(y, groups, g), kernels::linear_forward(rows, w[g], bias[g]),
                       here + " forward");
      expect_same_bits(part(plain, groups, g), kernels::linear_forward(rows, w[g]),
                       here + " plain");
      expect_same_bits(part(dx, groups, g), kernels::linear_input_grad(grads, w[g]), here + " dx");
      expect_close(part(y, groups, g),
                   reference(rows).matmul(reference(w[g]).t()) + reference(bias[g]), dtype,
                   here + " forward", tolerance_of_sum(dtype, f.in));
      expect_close(part(dx, groups, g), reference(grads).matmul(reference(w[g])), dtype,
                   here + " dx", tolerance_of_sum(dtype, f.out));
    }
    for (const bool accumulate : {false, true}) {
      for (const at::ScalarType out : {dtype, dtype == at::kDouble ? at::kDouble : at::kFloat}) {
        check_weight_grads(out, accumulate);
      }
    }
  }

  void check_weight_grads(at::ScalarType out, bool accumulate) const {
    const auto dw = weight_grads(out, accumulate);
    const std::string here = where + " dw " + c10::toString(out) + (accumulate ? " added" : "");
    const Tensor before = at::full({f.out, f.in}, accumulate ? 0.5 : 0.0, out);
    for (int64_t g = 0; g < groups.count; ++g) {
      if (groups.size(g) == 0) {
        expect_same_bits(dw[g], before, here + " empty");
        continue;
      }
      const Tensor rows = gathered(x, x_index, groups, g),
                   grads = gathered(dy, dy_index, groups, g);
      Tensor alone = before.clone();
      kernels::linear_weight_grad_into(alone, grads, rows, accumulate);
      expect_same_bits(dw[g], alone, here + " group " + std::to_string(g));
      expect_close(dw[g], reference(grads).t().matmul(reference(rows)) + reference(before), out,
                   here, tolerance_of_sum(dtype, groups.size(g)));
    }
  }
};

TEST(GroupedGemm, EachGroupAsIfItWereAlone) {
  for (const at::ScalarType dtype : test_dtypes()) {
    torch::manual_seed(1);
    for (const Split& split : kSplits) {
      for (const Features& f : kFeatures) {
        if (split.sizes.size() > 100 && f.in != 33) continue;
        Operands(split, f, dtype).check();
      }
    }
  }
}

TEST(GroupedGemm, RowsAreGathered) {
  for (const at::ScalarType dtype : test_dtypes()) {
    torch::manual_seed(2);
    for (const Split& split : kSplits) {
      for (const Features& f : {Features{33, 130}, Features{64, 40}, Features{7, 3}}) {
        if (split.sizes.size() > 100 && f.in != 33) continue;
        Operands(split, f, dtype, true).check();
      }
    }
  }
}

// Sums longer than what is packed at once, many rows, and a group that is ATen's beside ours.
TEST(GroupedGemm, LargeGroups) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(3);
    Operands({{700, 0, 130, 1, 300}, 3}, {300, 70}, dtype).check();
    Operands({{40, 5}, 0}, {96, 2100}, dtype).check();
    Operands({{4500, 20}, 0}, {18, 20}, dtype).check();
  }
}

TEST(GroupedGemm, AnyLayout) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    torch::manual_seed(4);
    const Split split{{3, 0, 40, 1, 17}, 4};
    const Features f{48, 36};
    const auto with_gap = [](const Tensor& t) {
      return at::constant_pad_nd(t, {0, 5}, NAN).narrow(1, 0, t.size(1));
    };
    const auto turned = [](const Tensor& t) { return t.t().contiguous().t(); };
    const auto every_second = [](const Tensor& t) {
      return at::repeat_interleave(t, 2, 1).slice(1, 0, std::nullopt, 2);
    };
    for (int i = 0; i < 5; ++i) {
      Operands o(split, f, dtype);
      const auto lay_out = [&](Tensor t) {
        return i == 0 ? with_gap(t) : i == 1 ? turned(t) : i == 2 ? every_second(t) : t;
      };
      if (i == 3) o.dy = at::full({1}, 0.75, dtype).expand({o.groups.rows, f.out});
      if (i == 4) o.dy = random_tensor({1, f.out}, dtype).expand({o.groups.rows, f.out});
      o.x = lay_out(o.x);
      o.dy = lay_out(o.dy);
      for (Tensor& w : o.w) w = lay_out(w);
      o.where += " layout " + std::to_string(i);
      o.check();
    }
  }
}

TEST(GroupedGemm, BiasesAreScaledByRow) {
  for (const at::ScalarType dtype : test_dtypes()) {
    torch::manual_seed(5);
    for (const bool gathers : {false, true}) {
      const Operands o({{3, 0, 40, 1, 17}, 4}, {40, 52}, dtype, gathers);
      const Tensor scale = random_tensor({o.groups.rows}, at::kFloat);
      const Tensor y =
          kernels::grouped_linear_forward(o.x, o.w, o.groups, o.bias, scale, o.x_index);
      expect_zeros_behind(y, o.groups, o.where);
      for (int64_t g = 0; g < o.groups.count; ++g) {
        const Tensor own = reference(part(scale, o.groups, g)).unsqueeze(1);
        const Tensor rows = reference(gathered(o.x, o.x_index, o.groups, g));
        expect_close(part(y, o.groups, g),
                     rows.matmul(reference(o.w[g]).t()) + own * reference(o.bias[g]), dtype,
                     o.where + " scaled", tolerance_of_sum(dtype, o.f.in));
      }
      // A scale of one changes no bits.
      const Tensor ones = at::ones({o.groups.rows}, at::kFloat);
      if (dtype == at::kHalf || dtype == at::kDouble) continue;  // ATen rounds a bias otherwise
      expect_same_bits(kernels::grouped_linear_forward(o.x, o.w, o.groups, o.bias, ones, o.x_index),
                       o.forward(), o.where + " scaled by one");
    }
  }
}

TEST(GroupedGemm, IntoBuffers) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Operands o({{3, 0, 40, 1, 17}, 4}, {40, 52}, dtype);
    const Tensor y = at::full({o.groups.rows, 52}, NAN, dtype);
    kernels::grouped_linear_forward(o.x, o.w, o.groups, o.bias, {}, {}, y);
    expect_same_bits(y, o.forward(), o.where);
    const Tensor dx = at::full({o.groups.rows, 40}, NAN, dtype);
    kernels::grouped_linear_input_grad(o.dy, o.w, o.groups, {}, dx);
    expect_same_bits(dx, o.input_grad(), o.where);
  }
}

TEST(GroupedGemm, AnyNumberOfThreads) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(6);
    for (const Split& split : {Split{{200, 0, 130, 3, 64}, 5}, Split{{400}, 0}}) {
      const Operands o(split, {130, 250}, dtype);
      const auto all = [&](int threads) {
        const WithThreads with(threads);
        std::vector<Tensor> results = o.weight_grads(at::kFloat, true);
        results.push_back(o.forward());
        results.push_back(o.input_grad());
        results.push_back(kernels::grouped_bias_grad(o.dy, o.groups));
        results.push_back(kernels::grouped_scale_grad(o.dy, o.bias, o.groups));
        return results;
      };
      const auto one = all(1);
      for (const int threads : {2, 5}) {
        const auto more = all(threads);
        for (size_t i = 0; i < one.size(); ++i) {
          expect_same_bits(more[i], one[i], o.where + " result " + std::to_string(i));
        }
      }
    }
  }
}

TEST(GroupedGemm, RefusesRowsThatAreNotThere) {
  Operands o({{3, 20}, 4}, {40, 52}, at::kFloat, true);
  o.x_index[5] = 11;
  EXPECT_THROW(o.forward(), c10::IndexError);
  o.x_index[5] = -1;
  EXPECT_THROW(o.weight_grads(at::kFloat, false), c10::IndexError);
}

TEST(GroupedSums, BiasGradients) {
  for (const at::ScalarType dtype : test_dtypes()) {
    torch::manual_seed(7);
    for (const bool gathers : {false, true}) {
      for (const Split& split :
           {Split{{3, 0, 40, 1, 17}, 4}, Split{{0, 0}, 2}, Split{{3000, 7}, 1}}) {
        const Operands o(split, {4, 301}, dtype, gathers);
        const Tensor scale = random_tensor({o.groups.rows}, at::kFloat);
        const Tensor db = kernels::grouped_bias_grad(o.dy, o.groups, {}, o.dy_index);
        const Tensor scaled = kernels::grouped_bias_grad(o.dy, o.groups, scale, o.dy_index);
        for (int64_t g = 0; g < o.groups.count; ++g) {
          const Tensor rows = gathered(o.dy, o.dy_index, o.groups, g);
          const Tolerance allowed = tolerance_of_sum(dtype, 16 * o.groups.size(g));
          expect_close(db[g], reference(rows).sum(0), dtype, o.where + " db", allowed);
          expect_close(scaled[g],
                       (reference(rows) * reference(part(scale, o.groups, g)).unsqueeze(1)).sum(0),
                       dtype, o.where + " scaled db", allowed);
          expect_same_bits(db[g], kernels::bias_backward(rows.contiguous(), 301), o.where + " db");
        }
      }
    }
  }
}

TEST(GroupedSums, ScaleGradients) {
  for (const at::ScalarType dtype : test_dtypes()) {
    torch::manual_seed(8);
    for (const bool gathers : {false, true}) {
      const Operands o({{3, 0, 40, 1, 17}, 4}, {4, 301}, dtype, gathers);
      const Tensor dscale = kernels::grouped_scale_grad(o.dy, o.bias, o.groups, o.dy_index);
      expect_zeros_behind(dscale, o.groups, o.where);
      const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      for (int64_t g = 0; g < o.groups.count; ++g) {
        const Tensor rows = reference(gathered(o.dy, o.dy_index, o.groups, g));
        expect_close(part(dscale, o.groups, g), rows.matmul(reference(o.bias[g])), wide,
                     o.where + " dscale", tolerance_of_sum(wide, 301 * 16));
      }
    }
  }
}

}  // namespace
