// Groups that are computed one by one, as in low precision: on a CPU each thread takes groups, so
// that a group's small kernels need not wait for each other's threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <atomic>

#include "ligature/base/modes.h"
#include "ligature/kernels/run_context.h"
#include "ligature/op_quantization.h"
#include "ligature/recipes/autocast.h"

namespace ligature {

/// May groups be quantized in any order and by any thread? Not where numbers are drawn, a language
/// binding or other processes take part, or somebody watches.
inline bool in_any_order(const OpQuantization* quantization) {
  const auto is_free = [](const auto& quantizer) {
    return quantizer == nullptr ||
           (quantizer->is_native() && !quantizer->format_tag().stochastic_rounding &&
            !quantizer->reduce_amax);
  };
  const kernels::RunContext& context = kernels::run_context();
  return quantization != nullptr && context.log == nullptr && context.delayed == nullptr &&
         !has_modes() && !has_tracer() && !is_recomputing() &&
         std::all_of(quantization->forward.begin(), quantization->forward.end(), is_free) &&
         std::all_of(quantization->backward.begin(), quantization->backward.end(), is_free);
}

/// f(g) for each group. `x`: what is computed with. f writes nothing that belongs to another group.
template <class F>
void each_group(int64_t count, const OpQuantization* quantization, const Tensor& x, const F& f) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  if (threads < 2 || !x.is_cpu() || at::in_parallel_region() || !in_any_order(quantization)) {
    for (int64_t g = 0; g < count; ++g) f(g);
    return;
  }
  const at::ThreadLocalState state;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const at::ThreadLocalStateGuard as_the_caller(state);
    for (int64_t g = next++; g < count; g = next++) f(g);
  });
}

}  // namespace ligature
