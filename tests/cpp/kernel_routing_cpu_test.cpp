// The CPU's routing against plain loops in float64.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernel_test_support.h"
#include "ligature/backend/cpu/routing.h"
#include "tolerance.h"

namespace cpu = ligature::cpu;
using at::Tensor;

namespace {

struct Size {
  int64_t tokens, top_k, experts;
};

const Size kSizes[] = {{0, 2, 4}, {1, 1, 1}, {5, 3, 2}, {40, 2, 8}, {64, 4, 1000}};

/// Some slots of no expert: below 0, and beyond the last.
Tensor experts_for(const Size& s, at::ScalarType dtype = at::kLong) {
  return at::randint(-1, s.experts + 1, {s.tokens, s.top_k}, at::kLong).to(dtype);
}

/// (expert, slot) of each row, in order.
std::vector<std::pair<int64_t, int64_t>> rows_of(const Tensor& experts_of, int64_t experts) {
  std::vector<std::pair<int64_t, int64_t>> rows;
  const Tensor flat = experts_of.to(at::kLong).reshape({-1});
  for (int64_t slot = 0; slot < flat.numel(); ++slot) {
    const int64_t expert = flat[slot].item<int64_t>();
    if (expert >= 0 && expert < experts) rows.emplace_back(expert, slot);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

template <typename F>
void for_each_case(const F& f) {
  for (const at::ScalarType dtype : test_dtypes()) {
    torch::manual_seed(1);
    for (const Size& s : kSizes) {
      for (const int64_t columns : {1, 33, 300}) {
        f(s, columns, dtype, cpu::route(experts_for(s), s.experts).map,
          describe("routing", at::kCPU, dtype, {s.tokens, s.top_k, s.experts, columns}));
      }
    }
  }
}

/// Rows behind the last one hold NaN: nothing reads them.
Tensor rows_for(const Tensor& map, int64_t columns, at::ScalarType dtype) {
  const Tensor slots = map[0].reshape({-1, 1});
  return random_tensor({slots.size(0), columns}, dtype).masked_fill_(slots < 0, NAN);
}

/// [tokens, top_k, columns] in float64, zeros where a slot is sent nowhere.
Tensor by_slot(const Tensor& x, const Tensor& map) {
  const Tensor row = map[1].reshape({-1}).to(at::kLong);
  Tensor found = reference(x).index_select(0, row.clamp_min(0));
  found.masked_fill_((row < 0).unsqueeze(1), 0);
  return found.reshape({map.size(1), map.size(2), x.size(1)});
}

TEST(CpuRouting, SortsSlotsByExpert) {
  for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kShort}) {
    torch::manual_seed(2);
    for (const Size& s : kSizes) {
      const Tensor experts_of = experts_for(s, dtype);
      const auto routing = cpu::route(experts_of, s.experts);
      const auto rows = rows_of(experts_of, s.experts);
      Tensor splits = at::zeros({s.experts}, at::kLong);
      Tensor map = at::full({2, s.tokens * s.top_k}, -1, at::kInt);
      for (size_t r = 0; r < rows.size(); ++r) {
        const auto [expert, slot] = rows[r];
        splits[expert] += 1;
        map[0][static_cast<int64_t>(r)] = slot;
        map[1][slot] = static_cast<int64_t>(r);
      }
      const std::string where = describe("route", at::kCPU, dtype, {s.tokens, s.top_k, s.experts});
      expect_same_bits(routing.splits, splits, where + " splits");
      expect_same_bits(routing.map, map.view({2, s.tokens, s.top_k}), where + " map");
    }
  }
}

TEST(CpuRouting, DispatchesRows) {
  for_each_case([](const Size& s, int64_t columns, at::ScalarType dtype, const Tensor& map,
                   const std::string& where) {
    const Tensor x = random_tensor({s.tokens, columns}, dtype);
    const Tensor slot = map[0].reshape({-1});
    const Tensor token = slot.clamp_min(0).to(at::kLong).div(s.top_k, "floor");
    Tensor expected = s.tokens > 0 ? x.index_select(0, token) : at::empty({0, columns}, dtype);
    expected.masked_fill_((slot < 0).unsqueeze(1), 0);
    expect_same_bits(cpu::dispatch_rows(x, map), expected, where);
  });
}

TEST(CpuRouting, CombinesRows) {
  for_each_case([](const Size& s, int64_t columns, at::ScalarType dtype, const Tensor& map,
                   const std::string& where) {
    if (s.tokens == 0) {
      EXPECT_EQ(cpu::combine_rows(at::empty({0, columns}, dtype), map, {}).size(0), 0);
      return;
    }
    const Tensor x = rows_for(map, columns, dtype);
    const Tolerance allowed = tolerance_of_sum(dtype, 16 * s.top_k);
    expect_close(cpu::combine_rows(x, map, {}), by_slot(x, map).sum(1), dtype, where, allowed);
    for (const at::ScalarType weight : {at::kFloat, dtype}) {
      const Tensor w = random_tensor({s.tokens, s.top_k}, weight);
      w.masked_fill_(map[1] < 0, NAN);
      const Tensor expected = (by_slot(x, map) * reference(w).nan_to_num(0).unsqueeze(2)).sum(1);
      expect_close(cpu::combine_rows(x, map, w), expected, dtype, where + " weights", allowed);
    }
  });
}

TEST(CpuRouting, GradientsOfWeights) {
  for_each_case([](const Size& s, int64_t columns, at::ScalarType dtype, const Tensor& map,
                   const std::string& where) {
    if (s.tokens == 0) return;
    const Tensor x = rows_for(map, columns, dtype);
    const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    for (const at::ScalarType grad : {dtype, wide}) {
      const Tensor dy = random_tensor({s.tokens, columns}, grad);
      const Tensor expected = (by_slot(x, map) * reference(dy).unsqueeze(1)).sum(2);
      expect_close(cpu::combine_weights_grad(dy, x, map), expected, wide, where,
                   tolerance_of_sum(wide, columns * 16));
    }
  });
}

TEST(CpuRouting, AnyNumberOfThreads) {
  torch::manual_seed(3);
  const Size s{700, 4, 16};
  const Tensor map = cpu::route(experts_for(s), s.experts).map;
  for (const at::ScalarType dtype : test_dtypes()) {
    const Tensor x = rows_for(map, 130, dtype), dy = random_tensor({s.tokens, 130}, dtype);
    const Tensor w = random_tensor({s.tokens, s.top_k}, at::kFloat);
    const auto all = [&](int threads) {
      const WithThreads with(threads);
      return std::vector<Tensor>{cpu::dispatch_rows(dy, map), cpu::combine_rows(x, map, w),
                                 cpu::combine_weights_grad(dy, x, map)};
    };
    const auto one = all(1), two = all(2);
    for (size_t i = 0; i < one.size(); ++i) {
      expect_same_bits(two[i], one[i], std::string("result ") + std::to_string(i));
    }
  }
}

TEST(CpuRouting, RefusesNumbersThatAreNotThere) {
  const Tensor map = cpu::route(at::zeros({4, 2}, at::kLong), 1).map;
  map[1][0][0] = 8;
  const Tensor x = at::zeros({8, 3});
  EXPECT_THROW(cpu::combine_rows(x, map, {}), c10::IndexError);
}

}  // namespace
