// The routing kernels against loops over tokens in float64: those of each device's backend, and the
// ATen calls behind it.
#include <gtest/gtest.h>

#include <functional>

#include "kernel_test_support.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/routing.h"
#include "tolerance.h"

namespace kernels = ligature::kernels;
using at::Tensor;

namespace {

struct Size {
  int64_t tokens, top_k, experts;
};

const std::vector<Size> kSizes{{7, 3, 5}, {1, 1, 1},  {0, 2, 3},
                               {5, 1, 4}, {4, 2, 40}, {1500, 4, 8}};
constexpr int64_t kColumns = 33;

/// Some below 0 and some above, and several times the same for one token.
Tensor random_experts(const Size& size, at::Device device, at::ScalarType dtype = at::kLong) {
  const int64_t lowest = dtype == at::kByte ? 0 : -1;
  return at::randint(lowest, size.experts + 2, {size.tokens, size.top_k}, at::kLong)
      .to(device, dtype);
}

/// The slots in the order of their rows.
std::vector<int64_t> ordered_slots(const Tensor& experts_of, int64_t experts) {
  const Tensor given = experts_of.to(at::kCPU, at::kLong).contiguous();
  const int64_t* e = given.const_data_ptr<int64_t>();
  std::vector<int64_t> slots;
  for (int64_t expert = 0; expert < experts; ++expert) {
    for (int64_t slot = 0; slot < given.numel(); ++slot) {
      if (e[slot] == expert) slots.push_back(slot);
    }
  }
  return slots;
}

/// With the backend of each device, and with none.
void for_each_backend(const std::function<void(at::Device, const std::string&)>& f) {
  for (const at::Device device : test_devices()) {
    torch::manual_seed(1);
    f(device, device.str() + " ");
    const kernels::Backend* own = kernels::register_backend(device.type(), nullptr);
    torch::manual_seed(1);
    f(device, device.str() + " aten ");
    kernels::register_backend(device.type(), own);
  }
}

TEST(RoutingTest, RouteIsAStableSort) {
  for_each_backend([](at::Device device, const std::string& where) {
    for (const Size& size : kSizes) {
      for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kShort, at::kByte}) {
        const Tensor experts_of = random_experts(size, device, dtype);
        const kernels::Routing routing = kernels::route(experts_of, size.experts);
        const std::vector<int64_t> slots = ordered_slots(experts_of, size.experts);
        const int64_t all = size.tokens * size.top_k;
        Tensor slot_of = at::full({all}, -1, at::kInt), row_of = at::full({all}, -1, at::kInt);
        Tensor splits = at::zeros({size.experts}, at::kLong);
        const Tensor flat = experts_of.to(at::kCPU, at::kLong).flatten();
        for (size_t row = 0; row < slots.size(); ++row) {
          slot_of[row] = slots[row];
          row_of[slots[row]] = static_cast<int64_t>(row);
          splits[flat[slots[row]].item<int64_t>()] += 1;
        }
        const Tensor map = at::stack({slot_of, row_of}).view({2, size.tokens, size.top_k});
        expect_same_bits(routing.map.cpu(), map, where + "map");
        expect_same_bits(routing.splits.cpu(), splits, where + "splits");
        const Tensor tokens = kernels::tokens_of(routing.map).cpu();
        expect_same_bits(tokens, at::div(slot_of, size.top_k, "floor"), where + "tokens");
      }
      if (size.tokens > 100) return;  // each loop over slots is as long as the kernel's
    }
  });
}

struct Case {
  Size size;
  Tensor experts_of, map;
  std::vector<int64_t> slots;
  at::Device device;
  at::ScalarType dtype;
  std::string where;
};

void for_each_case(const std::function<void(const Case&)>& f) {
  for_each_backend([&](at::Device device, const std::string& where) {
    for (const at::ScalarType dtype : test_dtypes()) {
      for (const Size& size : kSizes) {
        const Tensor experts_of = random_experts(size, device);
        f({size, experts_of, kernels::route(experts_of, size.experts).map,
           ordered_slots(experts_of, size.experts), device, dtype,
           describe(where, device, dtype, {size.tokens, size.top_k, size.experts})});
      }
    }
  });
}

/// What is sent nowhere must not even be looked at.
Tensor rows_with_odd_tail(const Case& c) {
  Tensor rows = random_tensor({c.size.tokens * c.size.top_k, kColumns}, c.dtype, c.device);
  rows.slice(0, static_cast<int64_t>(c.slots.size())).fill_(NAN);
  return rows;
}

TEST(RoutingTest, DispatchRows) {
  for_each_case([](const Case& c) {
    const Tensor x = random_tensor({c.size.tokens, kColumns}, c.dtype, c.device);
    Tensor wanted = at::zeros({c.size.tokens * c.size.top_k, kColumns}, at::kDouble);
    const Tensor given = reference(x);
    for (size_t row = 0; row < c.slots.size(); ++row) {
      wanted[row].copy_(given[c.slots[row] / c.size.top_k]);
    }
    expect_same_bits(reference(kernels::dispatch_rows(x, c.map)), wanted, c.where);
  });
}

TEST(RoutingTest, CombineRows) {
  for_each_case([](const Case& c) {
    const Tensor x = rows_with_odd_tail(c), given = reference(x);
    for (const bool weighted : {false, true}) {
      const Tensor weights =
          weighted ? random_tensor({c.size.tokens, c.size.top_k}, at::kFloat, c.device) : Tensor();
      const Tensor by = weighted ? reference(weights).flatten() : Tensor();
      Tensor wanted = at::zeros({c.size.tokens, kColumns}, at::kDouble);
      for (size_t row = 0; row < c.slots.size(); ++row) {
        const int64_t slot = c.slots[row];
        wanted[slot / c.size.top_k] += weighted ? given[row] * by[slot] : given[row];
      }
      const Tensor y = kernels::combine_rows(x, c.map, weights);
      expect_close(y, wanted, c.dtype, c.where);
      const WithThreads with(3);
      expect_same_bits(kernels::combine_rows(x, c.map, weights), y, c.where + " threads");
    }
  });
}

TEST(RoutingTest, CombineWeightsGrad) {
  for_each_case([](const Case& c) {
    const Tensor x = rows_with_odd_tail(c), given = reference(x);
    const Tensor dy = random_tensor({c.size.tokens, kColumns}, c.dtype, c.device);
    Tensor wanted = at::zeros({c.size.tokens * c.size.top_k}, at::kDouble);
    const Tensor dys = reference(dy);
    for (size_t row = 0; row < c.slots.size(); ++row) {
      const int64_t slot = c.slots[row];
      wanted[slot] = (given[row] * dys[slot / c.size.top_k]).sum();
    }
    const at::ScalarType wide = c.dtype == at::kDouble ? at::kDouble : at::kFloat;
    expect_close(kernels::combine_weights_grad(dy, x, c.map),
                 wanted.view({c.size.tokens, c.size.top_k}), wide, c.where,
                 tolerance_of_sum(wide, kColumns * 16));
  });
}

TEST(RoutingTest, SlotsThereAndBack) {
  for_each_case([](const Case& c) {
    const Tensor slots = random_tensor({c.size.tokens, c.size.top_k}, c.dtype, c.device);
    const Tensor rows = kernels::dispatch_slots(slots, c.map);
    const Tensor flat = reference(slots).flatten();
    Tensor wanted = at::zeros({flat.numel()}, at::kDouble), back = at::zeros_like(wanted);
    for (size_t row = 0; row < c.slots.size(); ++row) {
      wanted[row] = flat[c.slots[row]];
      back[c.slots[row]] = flat[c.slots[row]];
    }
    expect_same_bits(reference(rows), wanted, c.where);
    expect_same_bits(reference(kernels::combine_slots(rows, c.map)),
                     back.view({c.size.tokens, c.size.top_k}), c.where);
  });
}

// 256 + 1 + 1 in bfloat16, one after the other, would stay 256.
TEST(RoutingTest, SumsAreRoundedOnce) {
  for_each_backend([](at::Device device, const std::string& where) {
    const Tensor x = torch::tensor({256.0, 1.0, 1.0}).view({3, 1}).to(device, at::kBFloat16);
    const Tensor map = kernels::route(at::zeros({1, 3}, x.options().dtype(at::kLong)), 1).map;
    EXPECT_EQ(kernels::combine_rows(x, map).item<float>(), 258) << where;
  });
}

TEST(RoutingTest, TakesAnyStridesAndTokenDimensions) {
  for_each_backend([](at::Device device, const std::string& where) {
    const Tensor experts_of = random_experts({6, 2, 3}, device);
    const Tensor strided = experts_of.t().contiguous().t();
    const Tensor map = kernels::route(experts_of, 3).map;
    expect_same_bits(kernels::route(strided, 3).map, map, where);
    const Tensor x = random_tensor({6, kColumns}, at::kFloat, device);
    const Tensor rows = kernels::dispatch_rows(x, map);
    expect_same_bits(kernels::dispatch_rows(x.t().contiguous().t(), map.view({2, 2, 3, 2})), rows,
                     where);
    expect_same_bits(kernels::combine_rows(rows.t().contiguous().t(), map.view({2, 2, 3, 2})),
                     kernels::combine_rows(rows, map), where);
  });
}

TEST(RoutingTest, TensorsWithoutMemoryHaveShapes) {
  const auto meta = [](at::IntArrayRef sizes, at::ScalarType dtype = at::kBFloat16) {
    return at::empty(sizes, at::dtype(dtype).device(at::kMeta));
  };
  const kernels::Routing routing = kernels::route(meta({5, 2}, at::kInt), 3);
  EXPECT_EQ(routing.splits.sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(routing.splits.scalar_type(), at::kLong);
  EXPECT_EQ(routing.map.sizes(), at::IntArrayRef({2, 5, 2}));
  EXPECT_EQ(kernels::tokens_of(routing.map).sizes(), at::IntArrayRef({10}));
  const Tensor rows = kernels::dispatch_rows(meta({5, 4}), routing.map);
  EXPECT_EQ(rows.sizes(), at::IntArrayRef({10, 4}));
  EXPECT_EQ(kernels::combine_rows(rows, routing.map).sizes(), at::IntArrayRef({5, 4}));
  const Tensor dweights = kernels::combine_weights_grad(meta({5, 4}), rows, routing.map);
  EXPECT_EQ(dweights.sizes(), at::IntArrayRef({5, 2}));
  EXPECT_EQ(dweights.scalar_type(), at::kFloat);
  EXPECT_EQ(kernels::combine_slots(meta({10}), routing.map).sizes(), at::IntArrayRef({5, 2}));
  EXPECT_EQ(kernels::dispatch_slots(meta({5, 2}), routing.map).sizes(), at::IntArrayRef({10}));
}

TEST(RoutingTest, SaysWhatIsWrong) {
  const Tensor experts_of = at::zeros({3, 2}, at::kLong);
  const Tensor map = kernels::route(experts_of, 2).map;
  const Tensor x = at::zeros({3, 4}), rows = at::zeros({6, 4});
  const auto expect = [](const char* part, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no error: " << part;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect("experts must be integers", [&] { kernels::route(x, 2); });
  expect("experts must be [tokens, top_k]", [&] { kernels::route(experts_of[0], 2); });
  expect("must be positive, got 0", [&] { kernels::route(experts_of, 0); });
  expect("map must be int32", [&] { kernels::dispatch_rows(x, map.to(at::kLong)); });
  expect("x must be [3, columns], got [6, 4]", [&] { kernels::dispatch_rows(rows, map); });
  expect("x must be [6, columns], got [3, 4]", [&] { kernels::combine_rows(x, map); });
  expect("weights must be [tokens, top_k] = [3, 2]",
         [&] { kernels::combine_rows(rows, map, at::zeros({2, 3})); });
  expect("dy must have x's 4 columns",
         [&] { kernels::combine_weights_grad(at::zeros({3, 5}), rows, map); });
  expect("rows must be [6], got [3]", [&] { kernels::combine_slots(at::zeros({3}), map); });
}

}  // namespace
