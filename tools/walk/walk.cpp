// One step of an MLP with every function entry recorded: walk.py builds and reads this.
#include <torch/torch.h>

#include <atomic>
#include <cstdio>
#include <vector>

#include "ligature/ligature.h"

namespace {

std::vector<void*> entered;
std::atomic<bool> recording{false};

}  // namespace

extern "C" {
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void* function, void*) {
  if (recording.load(std::memory_order_relaxed)) entered.push_back(function);
}
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void*, void*) {}
}

int main() {
  using namespace ligature;
  torch::manual_seed(0);
  entered.reserve(1 << 20);
  Sequential mlp(LayerNorm(64), Linear(64, 512), SwiGLU(), Linear(256, 64));
  mlp->to(torch::kBFloat16);
  const torch::Tensor x = torch::randn({32, 64}, torch::kBFloat16).requires_grad_();
  const torch::Tensor grad = torch::randn({32, 64}, torch::kBFloat16);
  for (int step = 0; step < 5; ++step) {
    recording = step == 4;
    mlp->forward(x).backward(grad);
    recording = false;
  }
  for (void* function : entered) std::printf("%p\n", function);
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[4096];
  while (std::fgets(line, sizeof line, maps) != nullptr) std::fputs(line, stdout);
  std::fclose(maps);
}
