// Collectives, their operations and linear layers over ranks that are threads.
#include <gtest/gtest.h>

#include "distributed_threads.h"
#include "ligature/distributed/collectives.h"
#include "ligature/distributed/gather_value.h"
#include "ligature/ligature.h"

using namespace ligature;
using at::Tensor;
using distributed::find_group;

namespace {

constexpr const char* kGroup = "ranks";

void expect_none(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_EQ(errors[rank], "") << "rank " << rank;
  }
}

Tensor values(int seed, at::IntArrayRef sizes) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

Tensor part_of(const Tensor& whole, int rank, int size, int64_t dim = 0) {
  return whole.chunk(size, dim)[rank].contiguous();
}

}  // namespace

TEST(Distributed, CollectivesGiveWhatOneProcessWould) {
  for (const int size : {1, 2, 4}) {
    const Tensor whole = values(1, {8, 3});
    expect_none(run_ranks(size, [&](int rank) {
      const auto group = find_group(kGroup);
      ASSERT_EQ(group->size(), size);
      ASSERT_EQ(group->rank(), rank);
      const Tensor mine = part_of(whole, rank, size);
      auto gathered = distributed::all_gather(group, {mine, mine.to(at::kByte)}, {"test", ""});
      EXPECT_TRUE(at::equal(gathered.wait()[0], whole));
      EXPECT_TRUE(at::equal(gathered.wait()[1], whole.to(at::kByte)));
      const Tensor before = whole.clone();
      EXPECT_TRUE(at::allclose(distributed::all_reduce(group, whole, {"test", ""}).wait_one(),
                               whole * size));
      EXPECT_TRUE(at::equal(whole, before));
      EXPECT_TRUE(at::allclose(distributed::reduce_scatter(group, whole, {"test", ""}).wait_one(),
                               mine * size));
      Tensor largest = at::full({2}, static_cast<float>(rank));
      distributed::all_reduce_max(group, largest, {"test", ""});
      EXPECT_EQ(largest[0].item<float>(), static_cast<float>(size - 1));
    }));
  }
}

TEST(Distributed, OrderedSumsFollowTheRanks) {
  const int size = 4;
  Tensor sum = values(0, {8, 3}).to(at::kBFloat16).to(at::kFloat);
  for (int r = 1; r < size; ++r) sum = sum + values(r, {8, 3}).to(at::kBFloat16).to(at::kFloat);
  const Tensor wanted = sum.to(at::kBFloat16);
  expect_none(run_ranks(size, [&](int rank) {
    const auto group = find_group(kGroup);
    distributed::configure_group(kGroup, {.reduction = distributed::Reduction::Ordered});
    const Tensor x = values(rank, {8, 3}).to(at::kBFloat16);
    EXPECT_TRUE(at::equal(distributed::all_reduce(group, x, {"test", ""}).wait_one(), wanted));
    EXPECT_TRUE(at::equal(distributed::reduce_scatter(group, x, {"test", ""}).wait_one(),
                          part_of(wanted, rank, size)));
  }));
  expect_none(run_ranks(1, [](int) { distributed::configure_group(kGroup, {}); }));
}

TEST(Distributed, AFailureNamesOperationCollectiveGroupAndRank) {
  auto meeting = std::make_shared<Meeting>(2);
  meeting->fails_at = 0;
  const auto errors = run_ranks(
      2,
      [&](int) {
        distributed::all_reduce(find_group(kGroup), at::ones({2, 3}), {"FC1", ""}).wait();
      },
      meeting);
  for (int rank = 0; rank < 2; ++rank) {
    for (const std::string part : {"[FC1] all_reduce of [2, 3] Float", "group 'ranks' of 2 ranks",
                                   "the link is down", "cannot be used any more"}) {
      EXPECT_NE(errors[rank].find(part), std::string::npos) << errors[rank];
    }
    EXPECT_NE(errors[rank].find("rank " + std::to_string(rank)), std::string::npos);
  }
}

TEST(Distributed, AnAbsentRankIsTold) {
  auto meeting = std::make_shared<Meeting>(2);
  meeting->timeout = std::chrono::milliseconds(100);
  const auto errors = run_ranks(
      2,
      [&](int rank) {
        if (rank == 1) return;
        distributed::all_gather(find_group(kGroup), {at::ones({2})}, {"FC1", ""}).wait();
      },
      meeting);
  EXPECT_NE(errors[0].find("a peer did not come within 100 ms"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "");
}

TEST(Distributed, RanksThatDifferAreToldBeforeAnythingRuns) {
  auto meeting = std::make_shared<Meeting>(2);
  const auto errors = run_ranks(
      2,
      [&](int rank) {
        BasicLinearOptions options(8, rank == 0 ? 16 : 32);
        options.tensor_parallel = {"column", kGroup, false, std::nullopt};
        BasicLinear linear(options);
        OperationFuser fuser({linear.ptr()});
        fuser(at::ones({4, 8}));
      },
      meeting);
  EXPECT_EQ(errors[0].substr(0, errors[0].find("\nException")),
            errors[1].substr(0, errors[1].find("\nException")));
  EXPECT_NE(errors[0].find("rank 1 has operation 0, BasicLinear, in_features=8, out_features=32"),
            std::string::npos)
      << errors[0];
  EXPECT_TRUE(meeting->names[0].empty());
}

namespace {

struct Mlp {
  Tensor x, w1, b1, w2, b2, dy;
  Mlp()
      : x(values(1, {8, 16})),
        w1(values(2, {32, 16})),
        b1(values(3, {32})),
        w2(values(4, {16, 32})),
        b2(values(5, {16})),
        dy(values(6, {8, 16})) {}
};

struct MlpGrads {
  Tensor y, dx, dw1, db1, dw2, db2;
};

MlpGrads reference(const Mlp& in) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : {in.x, in.w1, in.b1, in.w2, in.b2}) {
    leaves.push_back(t.to(at::kDouble).set_requires_grad(true));
  }
  const Tensor h = at::relu(at::linear(leaves[0], leaves[1], leaves[2]));
  const Tensor y = at::linear(h, leaves[3], leaves[4]);
  y.backward(in.dy.to(at::kDouble));
  return {y.detach(),       leaves[0].grad(), leaves[1].grad(),
          leaves[2].grad(), leaves[3].grad(), leaves[4].grad()};
}

Linear parallel_linear(int64_t in, int64_t out, const char* mode, bool sequence, const Tensor& w,
                       const Tensor& b, int rank, int size) {
  LinearOptions options(in, out);
  options.tensor_parallel = {mode, kGroup, sequence, std::nullopt};
  Linear linear(options);
  const torch::NoGradGuard no_grad;
  const bool column = std::string(mode) == "column";
  linear->own_parameters()["weight"].copy_(part_of(w, rank, size, column ? 0 : 1));
  linear->bias().copy_(column ? part_of(b, rank, size) : rank == 0 ? b : at::zeros_like(b));
  return linear;
}

void expect_close(const Tensor& got, const Tensor& wanted, const char* what) {
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), wanted, 1e-4, 1e-4)) << what << "\n"
                                                                     << got << "\n"
                                                                     << wanted;
}

}  // namespace

TEST(Distributed, AnMlpOverRanksIsThatOfOneProcess) {
  const Mlp in;
  const MlpGrads wanted = reference(in);
  for (const int size : {1, 2, 4}) {
    for (const bool sequence : {false, true}) {
      auto meeting = std::make_shared<Meeting>(size);
      expect_none(run_ranks(
          size,
          [&](int rank) {
            Linear fc1 = parallel_linear(16, 32, "column", sequence, in.w1, in.b1, rank, size);
            Linear fc2 = parallel_linear(32, 16, "row", sequence, in.w2, in.b2, rank, size);
            OperationFuser fuser({fc1.ptr(), ReLU().ptr(), fc2.ptr()});
            const auto mine = [&](const Tensor& t) {
              return sequence ? part_of(t, rank, size) : t;
            };
            Tensor x = mine(in.x).clone().set_requires_grad(true);
            for (int step = 0; step < 2; ++step) {
              x.mutable_grad() = Tensor();
              for (auto* linear : {&fc1, &fc2}) (*linear)->zero_grad();
              const Tensor y = fuser(x)[0];
              expect_close(y.detach(), mine(wanted.y), "y");
              y.backward(mine(in.dy));
              expect_close(x.grad(), mine(wanted.dx), "dx");
              expect_close(fc1->weight().grad(), part_of(wanted.dw1, rank, size), "dw1");
              expect_close(fc1->bias().grad(), part_of(wanted.db1, rank, size), "db1");
              expect_close(fc2->weight().grad(), part_of(wanted.dw2, rank, size, 1), "dw2");
              expect_close(fc2->bias().grad(), wanted.db2, "db2");
            }
          },
          meeting));
      if (size == 1) {
        EXPECT_TRUE(meeting->names[0].empty());
      }
    }
  }
}

TEST(Distributed, EachFormatTravelsInItsOwnBytes) {
  const int64_t rows = 128, columns = 256;
  struct Case {
    std::shared_ptr<Recipe> recipe;
    double bytes;
  };
  for (const auto& [recipe, most] :
       {Case{nullptr, 2.0}, Case{std::make_shared<Float8CurrentScaling>(), 1.001},
        Case{std::make_shared<DelayedScaling>(), 1.001},
        Case{std::make_shared<MXFP8BlockScaling>(), 1.04},
        Case{std::make_shared<NVFP4BlockScaling>(), 0.5630}}) {
    auto meeting = std::make_shared<Meeting>(2);
    expect_none(run_ranks(
        2,
        [&](int rank) {
          BasicLinearOptions options(columns, 64);
          options.dtype = at::kBFloat16;
          options.tensor_parallel = {"column", kGroup, true, std::nullopt};
          BasicLinear linear(options);
          OperationFuser fuser({linear.ptr()});
          const torch::NoGradGuard no_grad;
          Autocast autocast({.enabled = recipe != nullptr, .recipe = recipe});
          fuser(values(rank, {rows, columns}).to(at::kBFloat16));
        },
        meeting));
    const double bytes =
        static_cast<double>(meeting->bytes[0]) / static_cast<double>(rows * columns);
    EXPECT_LE(bytes, most) << (recipe ? recipe->name() : "bfloat16");
    EXPECT_GE(bytes, most * 0.99) << (recipe ? recipe->name() : "bfloat16");
  }
}

TEST(Distributed, WaitsAreHiddenBehindGemms) {
  auto meeting = std::make_shared<Meeting>(2);
  expect_none(run_ranks(
      2,
      [&](int rank) {
        BasicLinearOptions options(16, 32);
        options.tensor_parallel = {"column", kGroup, true, std::nullopt};
        BasicLinear linear(options);
        OperationFuser fuser({linear.ptr()});
        Tensor x = values(rank, {4, 16}).set_requires_grad(true);
        fuser(x)[0].sum().backward();
      },
      meeting));
  const std::vector<std::string> wanted{"all_gather", "all_gather", "reduce_scatter"};
  EXPECT_EQ(meeting->names[0], wanted);
}

namespace {

struct Step {
  Tensor y, dx, dw1, dw2;
};

/// A step of the MLP over two ranks, with sequence parallelism.
std::vector<Step> mlp_steps(const Mlp& in, int rank, int size, int count) {
  Linear fc1 = parallel_linear(16, 32, "column", true, in.w1, in.b1, rank, size);
  Linear fc2 = parallel_linear(32, 16, "row", true, in.w2, in.b2, rank, size);
  OperationFuser fuser({fc1.ptr(), ReLU().ptr(), fc2.ptr()});
  std::vector<Step> out;
  for (int step = 0; step < count; ++step) {
    Tensor x = part_of(in.x, rank, size).clone().set_requires_grad(true);
    fc1->zero_grad();
    fc2->zero_grad();
    const Tensor y = fuser(x)[0];
    y.backward(part_of(in.dy, rank, size));
    out.push_back(
        {y.detach(), x.grad(), fc1->weight().grad().clone(), fc2->weight().grad().clone()});
  }
  return out;
}

}  // namespace

TEST(Distributed, OverlapChangesNoBit) {
  Mlp in;
  in.x = values(1, {128, 16});
  in.dy = values(6, {128, 16});
  std::vector<std::vector<Step>> wanted(2);
  const auto run = [&](distributed::GroupOptions options, auto&& check) {
    expect_none(run_ranks(2, [&](int rank) {
      distributed::configure_group(kGroup, options);
      check(rank, mlp_steps(in, rank, 2, 4));
    }));
  };
  run({.overlap = false},
      [&](int rank, std::vector<Step> steps) { wanted[rank] = std::move(steps); });
  for (const int64_t pieces : {0, 1, 2, 4}) {
    run({.pieces = pieces}, [&](int rank, const std::vector<Step>& steps) {
      for (size_t k = 0; k < steps.size(); ++k) {
        EXPECT_TRUE(at::equal(steps[k].y, wanted[rank][k].y)) << pieces;
        EXPECT_TRUE(at::equal(steps[k].dx, wanted[rank][k].dx)) << pieces;
        EXPECT_TRUE(at::equal(steps[k].dw1, wanted[rank][k].dw1)) << pieces;
        EXPECT_TRUE(at::equal(steps[k].dw2, wanted[rank][k].dw2)) << pieces;
      }
    });
  }
  expect_none(run_ranks(1, [](int) { distributed::configure_group(kGroup, {}); }));
}

TEST(Distributed, PiecesTravelApart) {
  auto meeting = std::make_shared<Meeting>(2);
  expect_none(run_ranks(
      2,
      [&](int rank) {
        distributed::configure_group(kGroup, {.pieces = 4});
        BasicLinearOptions options(16, 32);
        options.tensor_parallel = {"column", kGroup, true, std::nullopt};
        BasicLinear linear(options);
        OperationFuser fuser({linear.ptr()});
        const torch::NoGradGuard no_grad;
        fuser(values(rank, {128, 16}));
        distributed::configure_group(kGroup, {});
      },
      meeting));
  EXPECT_EQ(meeting->names[0], std::vector<std::string>(4, "all_gather"));
  EXPECT_EQ(meeting->bytes[0], 128 * 16 * 4);
}

TEST(Distributed, AFailureInBackwardIsToldToo) {
  auto meeting = std::make_shared<Meeting>(2);
  meeting->fails_at = 2;  // the scatter of the input's gradient
  const auto errors = run_ranks(
      2,
      [&](int rank) {
        BasicLinearOptions options(16, 32);
        options.tensor_parallel = {"column", kGroup, true, std::nullopt};
        BasicLinear linear(options);
        OperationFuser fuser({linear.ptr()});
        fuser(values(rank, {4, 16}).set_requires_grad(true))[0].sum().backward();
      },
      meeting);
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("[BasicLinear] reduce_scatter of [8, 16] Float"), std::string::npos)
        << error;
  }
}

TEST(OverlapModel, PredictsWhatWasMeasuredOnAShapedLink) {
  using distributed::OverlapTimes;
  using distributed::predicted_seconds;
  // Communication, GEMM and the whole in 1, 2, 4 and 8 pieces, in ms; two ranks.
  const double link[][6] = {{110, 97, 158, 134, 122, 116}, {219, 96, 267, 243, 231, 225}};
  for (const auto& row : link) {
    for (int i = 0; i < 4; ++i) {
      const double predicted =
          predicted_seconds(OverlapTimes{row[0], row[0], row[1], 0}, 2, int64_t{1} << i);
      EXPECT_NEAR(predicted, row[2 + i], 1.0);
    }
  }
  EXPECT_EQ(distributed::best_pieces({110, 110, 97, 0.1}, 2, 4096), 8);
  EXPECT_EQ(distributed::best_pieces({110, 110, 97, 0.1}, 2, 256), 4);  // 64 rows or more
  EXPECT_EQ(distributed::best_pieces({110, 110, 97, 60}, 2, 4096), 1);
  EXPECT_EQ(distributed::piece_rows(100, 3, 1), 48);
  EXPECT_EQ(distributed::piece_rows(256, 2, 128), 128);
}
