// Trains an MLP in C++, without Python: the same operations, the same fusions.
#include <torch/torch.h>

#include <cstdio>

#include "ligature/ligature.h"

int main() {
  torch::manual_seed(0);
  using namespace ligature;
  Sequential mlp(LayerNorm(32), Linear(32, 256), SwiGLU(), Linear(128, 1));
  torch::optim::AdamW optimizer(mlp->parameters(), torch::optim::AdamWOptions(3e-3));

  const auto device = mlp->parameters()[0].device();
  const torch::Tensor x = torch::randn({512, 32}, device);
  const torch::Tensor target = torch::sin(2 * x.slice(1, 0, 1)) * x.slice(1, 1, 2);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    const torch::Tensor loss = torch::mse_loss(mlp->forward(x), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("%s\n", mlp->explain().text().c_str());
  std::printf("loss %.4f -> %.4f\n", first, last);
  return last < 0.5 * first ? 0 : 1;
}
