#include "ligature/kernels/run_context.h"

#include <pthread.h>

#include <utility>

namespace ligature::kernels {

RunContext& run_context() {
  static thread_local RunContext context;
  return context;
}

namespace {

// A part that is asked for once more while it ends is made anew, and ends in the next round.
void end_parts(void* of_thread) {
  auto& context = *static_cast<RunContext*>(of_thread);
  for (ThreadPart** part : {&context.strict, &context.model_init, &context.autocast}) {
    delete std::exchange(*part, nullptr);
  }
}

}  // namespace

void end_parts_with_thread() {
  static const pthread_key_t key = [] {
    pthread_key_t made{};
    pthread_key_create(&made, &end_parts);
    return made;
  }();
  pthread_setspecific(key, &run_context());
}

}  // namespace ligature::kernels
