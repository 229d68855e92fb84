// One direction of a pipeline, as its backend runs it: it owns the launches that are held, the
// memory that they use, and the small buffers of the steps.
#pragma once

#include <optional>

#include "ligature/kernels/launches.h"
#include "ligature/kernels/small_buffers.h"

namespace ligature::kernels {

class Run {
 public:
  /// `input`: what it begins with; may be undefined. `bytes`: what the small buffers of the run
  /// before took; null: buffers are by themselves, as in a compiled graph.
  Run(const Tensor& input, SmallBytes* bytes) : launches_(input) {
    if (bytes != nullptr) buffers_.emplace(*bytes);
  }

  /// The run may be all that still uses a tensor by the time its launches go out. Does nothing
  /// outside of a run.
  static void hold(const Tensor& tensor) { hold_memory(tensor); }
  static bool holds() { return holds_launches(); }

  /// Launches what is held and ends the run; what goes wrong is told here.
  void finish() { launches_.finish(); }

  /// While it lives, code that is not ours runs: it finds everything before it launched, and gets
  /// buffers of its own.
  class Outside {
   private:
    LaunchPause launched_;
    OwnBuffers own_;
  };

 private:
  std::optional<SmallBufferRun> buffers_;
  LaunchScope launches_;
};

}  // namespace ligature::kernels
