// Grouped GEMMs, sums over groups and routing on a GPU, against float64. Groups are empty, of one
// row, around the tiles' sizes, and end before the rows do; what lies behind them is NaN, which
// must reach no result.
#include <algorithm>
#include <limits>
#include <utility>

#include "cuda_test_support.h"
#include "ligature/backend/cuda/grouped_gemm.h"
#include "ligature/backend/cuda/routing.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/grouped_gemm.h"
#include "ligature/kernels/log.h"

namespace kernels = ligature::kernels;
namespace cuda = ligature::cuda;
using at::Tensor;
using kernels::Groups;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const std::vector<std::vector<int64_t>>& all_splits() {
  static const std::vector<std::vector<int64_t>> splits{
      {5},        {0}, {0, 3, 0}, {127, 1, 129, 0, 64}, {0, 256, 0, 300, 0}, {1, 1, 1, 1, 1, 1, 1},
      {700, 0, 2}};
  return splits;
}

int64_t sum_of(const std::vector<int64_t>& splits) {
  int64_t sum = 0;
  for (const int64_t size : splits) sum += size;
  return sum;
}

enum class Where : uint8_t { Host, Device32, Device64 };

/// As many rows as `tail` more than the groups have.
Groups groups_of(const std::vector<int64_t>& splits, int64_t tail, Where where) {
  Tensor t = at::tensor(splits, at::kLong);
  if (where == Where::Device32) t = t.to(kGpu, at::kInt);
  if (where == Where::Device64) t = t.to(kGpu);
  return kernels::make_groups("[test]", t, sum_of(splits) + tail);
}

Tensor random(at::IntArrayRef shape, at::ScalarType dtype, double scale = 1.0) {
  return (at::randn(shape, at::TensorOptions(at::kFloat).device(kGpu)) * scale).to(dtype);
}

/// Random rows, and NaN behind the groups.
Tensor rows_with_tail(int64_t rows, int64_t columns, int64_t tail, at::ScalarType dtype) {
  Tensor t = random({rows + tail, columns}, dtype);
  if (tail > 0) t.narrow(0, rows, tail).fill_(kNaN);
  return t;
}

std::vector<Tensor> weights(size_t count, at::IntArrayRef shape, at::ScalarType dtype,
                            bool packed) {
  std::vector<Tensor> out;
  at::DimVector all(shape);
  all.insert(all.begin(), static_cast<int64_t>(count));
  const Tensor one = random(all, dtype, 0.1);
  for (size_t g = 0; g < count; ++g) {
    const Tensor w = one.select(0, static_cast<int64_t>(g));
    out.push_back(packed ? w : w.clone());
  }
  return out;
}

/// An index of rows in another order, -1 behind the groups.
Tensor shuffled(int64_t rows, int64_t tail) {
  return at::cat({at::randperm(rows, at::kInt), at::full({tail}, -1, at::kInt)}).to(kGpu);
}

Tensor wide(const Tensor& t) { return t.to(at::kCPU, at::kDouble); }

/// Calls f(group, first row, rows).
template <typename F>
void for_each_group(const std::vector<int64_t>& splits, const F& f) {
  int64_t begin = 0;
  for (size_t g = 0; g < splits.size(); ++g) {
    f(g, begin, splits[g]);
    begin += splits[g];
  }
}

/// What is multiplied in the products of one case, by every way that there is.
struct Case {
  std::vector<int64_t> splits;
  int64_t tail;
  Where where;
  bool packed, indexed;

  std::string text() const {
    std::string out = "splits";
    for (const int64_t size : splits) out += " " + std::to_string(size);
    return out + " tail " + std::to_string(tail) + (packed ? " packed" : "") +
           (indexed ? " indexed" : "") + (where == Where::Host ? " host" : " device");
  }
};

class CudaGrouped : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    torch::manual_seed(1);
    cuda::set_grouped_wgmma(GetParam());
  }
  void TearDown() override { cuda::set_grouped_wgmma(false); }

  template <typename F>
  static void for_each_case(const F& f) {
    int turn = 0;
    for (const auto& splits : all_splits()) {
      for (const int64_t tail : {0, 200}) {
        for (const Where where : {Where::Host, Where::Device32, Where::Device64}) {
          ++turn;
          f(Case{splits, tail, where, turn % 2 == 0, turn % 3 == 0});
        }
      }
    }
  }
};

TEST_P(CudaGrouped, ForwardIsCloseToFloat64) {
  constexpr int64_t kIn = 72, kOut = 264;  // ends within tiles both ways
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for_each_case([&](const Case& c) {
      const int64_t rows = sum_of(c.splits);
      const Groups groups = groups_of(c.splits, c.tail, c.where);
      const Tensor x = rows_with_tail(rows, kIn, c.tail, dtype);
      const Tensor index = c.indexed ? shuffled(rows, c.tail) : Tensor();
      const auto w = weights(c.splits.size(), {kOut, kIn}, dtype, c.packed);
      const auto b = weights(c.splits.size(), {kOut}, dtype, c.packed);
      Tensor scale = at::rand({rows + c.tail}, at::TensorOptions(at::kFloat).device(kGpu));
      if (c.tail > 0) scale.narrow(0, rows, c.tail).fill_(kNaN);
      for (const int what : {0, 1, 2}) {
        Tensor out = at::full({rows + c.tail, kOut}, kNaN, x.options());
        const Tensor y = kernels::grouped_linear_forward(
            x, w, groups, what == 0 ? at::TensorList() : at::TensorList(b),
            what == 2 ? scale : Tensor(), index, out);
        Tensor expected = at::zeros({rows + c.tail, kOut}, at::kDouble);
        const Tensor from = c.indexed && rows > 0
                                ? wide(x).index_select(0, index.narrow(0, 0, rows).cpu())
                                : wide(x);
        for_each_group(c.splits, [&](size_t g, int64_t begin, int64_t size) {
          Tensor part = from.narrow(0, begin, size).mm(wide(w[g]).t());
          if (what == 1) part += wide(b[g]);
          if (what == 2) part += wide(scale).narrow(0, begin, size).unsqueeze(1) * wide(b[g]);
          expected.narrow(0, begin, size).copy_(part);
        });
        EXPECT_EQ(y.const_data_ptr(), out.const_data_ptr()) << c.text();
        expect_close(y, expected, dtype, c.text() + " bias " + std::to_string(what));
      }
    });
  }
}

TEST_P(CudaGrouped, InputGradIsCloseToFloat64) {
  constexpr int64_t kIn = 264, kOut = 72;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for_each_case([&](const Case& c) {
      const int64_t rows = sum_of(c.splits);
      const Groups groups = groups_of(c.splits, c.tail, c.where);
      const Tensor dy = rows_with_tail(rows, kOut, c.tail, dtype);
      const Tensor index = c.indexed ? shuffled(rows, c.tail) : Tensor();
      auto w = weights(c.splits.size(), {kOut, kIn}, dtype, c.packed);
      // What belongs to the next group is read with a tile, and must not be used.
      if (c.splits.back() == 0) w.back().fill_(kNaN);
      const Tensor dx = kernels::grouped_linear_input_grad(dy, w, groups, index);
      Tensor expected = at::zeros({rows + c.tail, kIn}, at::kDouble);
      const Tensor from = c.indexed && rows > 0
                              ? wide(dy).index_select(0, index.narrow(0, 0, rows).cpu())
                              : wide(dy);
      for_each_group(c.splits, [&](size_t g, int64_t begin, int64_t size) {
        if (size == 0) return;
        expected.narrow(0, begin, size).copy_(from.narrow(0, begin, size).mm(wide(w[g])));
      });
      expect_close(dx, expected, dtype, c.text());
    });
  }
}

TEST_P(CudaGrouped, WeightGradIsCloseToFloat64) {
  constexpr int64_t kIn = 264, kOut = 136;
  for (const at::ScalarType out_dtype : {at::kBFloat16, at::kFloat}) {
    for_each_case([&](const Case& c) {
      const int64_t rows = sum_of(c.splits);
      const Groups groups = groups_of(c.splits, c.tail, c.where);
      const Tensor dy = rows_with_tail(rows, kOut, c.tail, at::kBFloat16);
      const Tensor x = rows_with_tail(rows, kIn, c.tail, at::kBFloat16);
      const Tensor index = c.indexed ? shuffled(rows, c.tail) : Tensor();
      for (const bool accumulate : {false, true}) {
        const auto before = weights(c.splits.size(), {kOut, kIn}, out_dtype, c.packed);
        std::vector<Tensor> outs;
        for (const Tensor& b : before) {
          outs.push_back(accumulate ? b.clone() : at::full_like(b, kNaN));
        }
        kernels::grouped_linear_weight_grad_into(outs, dy, x, groups, accumulate, {}, index);
        const Tensor from = c.indexed && rows > 0
                                ? wide(x).index_select(0, index.narrow(0, 0, rows).cpu())
                                : wide(x);
        for_each_group(c.splits, [&](size_t g, int64_t begin, int64_t size) {
          Tensor expected = accumulate ? wide(before[g]) : at::zeros({kOut, kIn}, at::kDouble);
          if (size > 0) {
            expected += wide(dy).narrow(0, begin, size).t().mm(from.narrow(0, begin, size));
          }
          // Torch's grouped GEMM rounds to bfloat16 before it is added.
          expect_close(outs[g], expected, out_dtype, c.text() + " group " + std::to_string(g),
                       tolerance_of_sum(at::kBFloat16, size));
        });
      }
    });
  }
}

TEST_P(CudaGrouped, ManyGroups) {
  constexpr int64_t kGroups = 600, kIn = 64, kOut = 64;  // more than one launch has results of
  std::vector<int64_t> splits(kGroups, 0);
  for (size_t g = 0; g < splits.size(); g += 3) splits[g] = static_cast<int64_t>(g % 7);
  const int64_t rows = sum_of(splits);
  for (const Where where : {Where::Host, Where::Device64}) {
    const Groups groups = groups_of(splits, 10, where);
    const Tensor x = rows_with_tail(rows, kIn, 10, at::kBFloat16);
    const Tensor dy = rows_with_tail(rows, kOut, 10, at::kBFloat16);
    const auto w = weights(splits.size(), {kOut, kIn}, at::kBFloat16, true);
    const Tensor y = kernels::grouped_linear_forward(x, w, groups);
    std::vector<Tensor> outs;
    for (size_t g = 0; g < splits.size(); ++g) {
      outs.push_back(at::full({kOut, kIn}, kNaN, x.options().dtype(at::kFloat)));
    }
    kernels::grouped_linear_weight_grad_into(outs, dy, x, groups, false);
    Tensor expected = at::zeros({rows + 10, kOut}, at::kDouble);
    for_each_group(splits, [&](size_t g, int64_t begin, int64_t size) {
      const Tensor part = wide(x).narrow(0, begin, size);
      expected.narrow(0, begin, size).copy_(part.mm(wide(w[g]).t()));
      expect_close(outs[g], wide(dy).narrow(0, begin, size).t().mm(part), at::kFloat,
                   "group " + std::to_string(g), tolerance(at::kBFloat16));
    });
    expect_close(y, expected, at::kBFloat16, "y");
  }
}

TEST_P(CudaGrouped, SaysWhichWayItGoesAndWhetherItWaits) {
  const auto call_of = [](at::ScalarType dtype, Where where) {
    kernels::KernelLog log(at::kCUDA);
    const auto w = weights(2, {64, 64}, dtype, true);
    kernels::grouped_linear_forward(random({8, 64}, dtype), w, groups_of({3, 5}, 0, where));
    for (const auto& call : log.take()) {
      if (call.name == "grouped_linear_forward") return call;
    }
    return kernels::KernelCall();
  };
  for (const Where where : {Where::Host, Where::Device64}) {
    // Which one it is depends on the GPU; where it finds the groups it does not wait for them.
    const auto call = call_of(at::kBFloat16, where);
    if (call.backend == "aten") {
      EXPECT_EQ(call.syncs, where != Where::Host);
    } else {
      EXPECT_FALSE(call.syncs);
      EXPECT_TRUE(call.backend == "grouped_mm" ||
                  (GetParam() && call.backend == "wgmma, not run yet"))
          << call.backend;
    }
    EXPECT_EQ(call_of(at::kFloat, where).backend, "aten");
    EXPECT_EQ(call_of(at::kFloat, where).syncs, where != Where::Host);
  }
}

TEST_P(CudaGrouped, DoesNotWaitWithoutRows) {
  const kernels::NoSyncScope none(true);
  const auto w = weights(2, {8, 8}, at::kFloat, true);
  const Groups groups = groups_of({0, 0}, 0, Where::Device64);
  EXPECT_EQ(kernels::grouped_linear_forward(random({0, 8}, at::kFloat), w, groups).size(0), 0);
}

INSTANTIATE_TEST_SUITE_P(Ways, CudaGrouped, ::testing::Bool(), [](const auto& way) {
  return way.param ? std::string("Wgmma") : std::string("Default");
});

class CudaGroupedSums : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    torch::manual_seed(2);
  }
};

TEST_F(CudaGroupedSums, OfBiasesAndScalesAreCloseToFloat64) {
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const int64_t columns : {1, 7, 64, 1000}) {
      int turn = 0;
      for (const auto& splits : all_splits()) {
        const int64_t rows = sum_of(splits), tail = turn % 2 == 0 ? 0 : 150;
        const bool indexed = ++turn % 3 == 0, scaled = turn % 2 == 0;
        const Groups groups =
            groups_of(splits, tail, turn % 2 == 0 ? Where::Host : Where::Device64);
        const Tensor dy = rows_with_tail(rows, columns, tail, dtype);
        const Tensor index = indexed ? shuffled(rows, tail) : Tensor();
        const auto b = weights(splits.size(), {columns}, dtype, turn % 2 == 0);
        const Tensor scale = at::rand({rows + tail}, dy.options().dtype(at::kFloat));
        const Tensor from = indexed && rows > 0
                                ? wide(dy).index_select(0, index.narrow(0, 0, rows).cpu())
                                : wide(dy);
        Tensor db = at::zeros({static_cast<int64_t>(splits.size()), columns}, at::kDouble);
        Tensor dscale = at::zeros({rows + tail}, at::kDouble);
        for_each_group(splits, [&](size_t g, int64_t begin, int64_t size) {
          const Tensor part = from.narrow(0, begin, size);
          const Tensor factor = wide(scale).narrow(0, begin, size).unsqueeze(1);
          db[static_cast<int64_t>(g)].copy_((scaled ? part * factor : part).sum(0));
          dscale.narrow(0, begin, size).copy_(part.mv(wide(b[g])));
        });
        const std::string where = describe("columns", kGpu, dtype, {rows, columns});
        const Tensor got = kernels::grouped_bias_grad(dy, groups, scaled ? scale : Tensor(), index);
        expect_close(got, db, dtype, where + " db", tolerance_of_sum(dtype, rows));
        if (!indexed && !scaled) {
          for_each_group(splits, [&](size_t g, int64_t begin, int64_t size) {
            expect_same_bits(got[static_cast<int64_t>(g)],
                             kernels::bias_backward(dy.narrow(0, begin, size), columns),
                             where + " as bias_backward");
          });
        }
        expect_same_bits(kernels::grouped_bias_grad(dy, groups, scaled ? scale : Tensor(), index),
                         got, where + " db again");
        expect_close(kernels::grouped_scale_grad(dy, b, groups, index), dscale, at::kFloat,
                     where + " dscale", tolerance_of_sum(at::kFloat, columns));
      }
    }
  }
}

TEST(CudaRouting, RoutesAsAStableSort) {
  SKIP_WITHOUT_GPU();
  torch::manual_seed(3);
  for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kShort, at::kChar}) {
    for (const auto& [tokens, top_k] :
         {std::pair<int64_t, int64_t>{0, 2}, {1, 1}, {100, 3}, {5000, 8}, {40000, 8}}) {
      for (const int64_t experts : {1, 6, 100}) {
        const Tensor given = at::randint(-1, experts + 2, {tokens, top_k}, at::kLong);
        const auto routed = cuda::route(given.to(kGpu, dtype), experts);
        const Tensor flat = given.flatten();
        std::vector<int32_t> order;
        std::vector<int64_t> splits(static_cast<size_t>(experts), 0);
        const int64_t* numbers = flat.const_data_ptr<int64_t>();
        for (int32_t slot = 0; slot < flat.numel(); ++slot) {
          if (numbers[slot] < 0 || numbers[slot] >= experts) continue;
          order.push_back(slot);
          ++splits[static_cast<size_t>(numbers[slot])];
        }
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return numbers[a] < numbers[b]; });
        Tensor map = at::full({2, flat.numel()}, -1, at::kInt);
        for (size_t row = 0; row < order.size(); ++row) {
          map.data_ptr<int32_t>()[row] = order[row];
          map.data_ptr<int32_t>()[flat.numel() + order[row]] = static_cast<int32_t>(row);
        }
        const std::string where = describe("experts", kGpu, dtype, {tokens, top_k, experts});
        expect_same_bits(routed.splits.cpu(), at::tensor(splits, at::kLong), where + " splits");
        expect_same_bits(routed.map.cpu(), map.view({2, tokens, top_k}), where + " map");
      }
    }
  }
}

TEST(CudaRouting, RowsGoToTheirExpertsAndBack) {
  SKIP_WITHOUT_GPU();
  torch::manual_seed(4);
  constexpr int64_t kTokens = 70, kTopK = 3, kExperts = 5;
  for (const at::ScalarType dtype : cuda_dtypes()) {
    for (const int64_t columns : {1, 7, 64, 1000}) {
      const Tensor experts_of = at::randint(-1, kExperts, {kTokens, kTopK}, at::kLong).to(kGpu);
      const Tensor map = cuda::route(experts_of, kExperts).map;
      const Tensor slots = map[0].flatten().cpu().to(at::kLong), rows = map[1].cpu().to(at::kLong);
      const Tensor none = slots.lt(0).unsqueeze(1);
      const Tensor x = random({kTokens, columns}, dtype), dy = random({kTokens, columns}, dtype);
      const Tensor weights_of = random({kTokens, kTopK}, at::kFloat);
      const std::string where = describe("columns", kGpu, dtype, {columns});

      const Tensor sent = cuda::dispatch_rows(x, map);
      const Tensor expected =
          wide(x).index_select(0, at::div(slots.clamp_min(0), kTopK, "floor")).masked_fill(none, 0);
      expect_close(sent, expected, dtype, where + " dispatch", {0, 0});

      Tensor y = random({kTokens * kTopK, columns}, dtype);
      y.masked_fill_(none.to(kGpu), kNaN);  // rows that no slot has
      const Tensor of_slots = wide(y)
                                  .index_select(0, rows.flatten().clamp_min(0))
                                  .masked_fill(rows.flatten().lt(0).unsqueeze(1), 0)
                                  .view({kTokens, kTopK, columns});
      expect_close(cuda::combine_rows(y, map, {}), of_slots.sum(1), dtype, where + " combine");
      expect_close(cuda::combine_rows(y, map, weights_of),
                   (of_slots * wide(weights_of).unsqueeze(2)).sum(1), dtype, where + " weighted");
      expect_close(cuda::combine_weights_grad(dy, y, map),
                   (of_slots * wide(dy).unsqueeze(1)).sum(2), at::kFloat, where + " dweights",
                   tolerance_of_sum(at::kFloat, columns));
    }
  }
}

}  // namespace
