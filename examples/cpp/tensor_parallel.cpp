// An MLP over two ranks in C++, against the same in one: each rank has half of the first linear's
// outputs, half of the second's inputs, and some of the tokens.
//
// A group is any c10d::ProcessGroup. libtorch installs no header of Gloo's, so ranks are threads
// here, and the backend below brings their tensors together; with processes and NCCL only the
// making of the group differs (c10d::ProcessGroupNCCL and a c10d::TCPStore).
#include <torch/torch.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "ligature/ligature.h"

using torch::Tensor;

namespace {

constexpr int kRanks = 2, kSteps = 20;
constexpr int64_t kTokens = 64, kWidth = 32, kInner = 128;

// ---- a backend of torch.distributed: what an MLP needs, without hurry

class Done final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

/// Where the threads lay down what they give.
struct Table {
  std::barrier<> everybody{kRanks};
  std::vector<Tensor> given{kRanks};
};

class Threads final : public c10d::Backend {
 public:
  Threads(Table& table, int rank) : Backend(rank, kRanks), table_(table) {}
  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in,
                                                 const c10d::AllgatherOptions&) override {
    return exchange(in, out, [](const auto& all) { return torch::cat(all); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                      const c10d::ReduceScatterOptions&) override {
    const int rank = getRank();
    return exchange(
        in, out, [rank](const auto& all) { return torch::stack(all).sum(0).chunk(kRanks)[rank]; });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    return exchange(tensors[0], tensors[0],
                    [](const auto& all) { return torch::stack(all).sum(0); });
  }

 private:
  template <class F>
  c10::intrusive_ptr<c10d::Work> exchange(const Tensor& in, Tensor& out, F&& together) {
    table_.given[getRank()] = in;
    table_.everybody.arrive_and_wait();
    const Tensor result = together(table_.given);
    table_.everybody.arrive_and_wait();  // all have read
    out.copy_(result.view_as(out));
    return c10::make_intrusive<Done>();
  }
  Table& table_;
};

// ---- the model

ligature::Sequential whole_mlp() {
  using namespace ligature;
  return Sequential(LayerNorm(kWidth), Linear(kWidth, kInner), GELU(), Linear(kInner, kWidth));
}

/// The same over the ranks of a group, with one bias behind the sum.
ligature::Sequential spread_mlp(const std::string& group) {
  using namespace ligature;
  LinearOptions first(kWidth, kInner);  // sizes are those of the whole layer
  first.tensor_parallel = {"column", group, /*sequence_parallel=*/true, std::nullopt};
  BasicLinearOptions second(kInner, kWidth);
  second.tensor_parallel = {"row", group, /*sequence_parallel=*/true, std::nullopt};
  return Sequential(LayerNorm(kWidth), Linear(first), GELU(), BasicLinear(second), Bias(kWidth));
}

/// A rank's part of each parameter: cut along the only dimension that differs.
void copy_parts(const std::vector<Tensor>& whole, const std::vector<Tensor>& parts, int rank) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parts.size(); ++i) {
    Tensor source = whole[i];
    for (int64_t dim = 0; dim < source.dim(); ++dim) {
      const int64_t size = parts[i].size(dim);
      if (size != source.size(dim)) source = source.narrow(dim, rank * size, size);
    }
    parts[i].copy_(source);
  }
}

/// The loss of each step, or of a rank its share: the mean over all tokens is the sum of those.
std::vector<double> train(ligature::Sequential mlp, const Tensor& x, const Tensor& y,
                          double share) {
  torch::optim::SGD optimizer(mlp->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = torch::mse_loss(mlp->forward(x), y) * share;
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const Tensor x = torch::randn({kTokens, kWidth});
  const Tensor y = torch::sin(2 * x) * x.flip(1);
  const ligature::Sequential whole = whole_mlp();
  std::vector<Tensor> start;
  for (const Tensor& parameter : whole->parameters()) start.push_back(parameter.detach().clone());
  const std::vector<double> one = train(whole, x, y, 1.0);

  Table table;
  c10d::set_thread_isolation_mode(true);  // a rank's groups are its thread's
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::vector<double>> parts(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, kRanks);
      group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM,
                        c10::make_intrusive<Threads>(table, rank));
      group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
      const std::string name = ligature::distributed::register_group(group, "ranks");
      // The norm and the last bias see one rank's tokens: add their gradients up in backward.
      ligature::distributed::configure_group(name, {.reduce_partial_grads = true});
      ligature::Sequential mlp = spread_mlp(name);
      copy_parts(start, mlp->parameters(), rank);
      parts[rank] = train(mlp, x.chunk(kRanks)[rank], y.chunk(kRanks)[rank], 1.0 / kRanks);
      if (rank == 0) std::printf("%s\n", mlp->explain().text().c_str());
      c10d::unregister_process_group(name);
    });
  }
  for (std::thread& rank : ranks) rank.join();

  double furthest = 0;
  for (int step = 0; step < kSteps; ++step) {
    double sum = 0;
    for (const auto& part : parts) sum += part[step];
    furthest = std::max(furthest, std::abs(sum - one[step]));
  }
  std::printf("loss %.4f -> %.4f; over %d ranks at most %.1e from that\n", one.front(), one.back(),
              kRanks, furthest);
  return furthest < 1e-5 && one.back() < 0.8 * one.front() ? 0 : 1;
}
