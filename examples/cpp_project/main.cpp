// Trains a small MLP with an installed Ligature, and prints what ran.
#include <ligature/config.h>
#include <ligature/ligature.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  using namespace ligature;
  std::fputs(config_text().c_str(), stdout);

  torch::manual_seed(0);
  Sequential mlp(LayerNorm(16), Linear(16, 64), SwiGLU(), Linear(32, 1));
  torch::optim::AdamW optimizer(mlp->parameters(), torch::optim::AdamWOptions(1e-2));
  const torch::Tensor x = torch::randn({256, 16}, mlp->parameters()[0].device());
  const torch::Tensor target = x.slice(1, 0, 1) * x.slice(1, 1, 2);

  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    const torch::Tensor loss = torch::mse_loss(mlp->forward(x), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }

  const auto plan = mlp->fusers()[0]->plan();
  for (const auto& step : plan->forward) std::printf("forward  %s\n", step.op->name().c_str());
  for (const auto& step : plan->backward) std::printf("backward %s\n", step.op->name().c_str());
  std::printf("loss %.4f -> %.4f\n", first, last);
  return last < 0.5 * first ? 0 : 1;
}
