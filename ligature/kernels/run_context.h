// What a thread's work depends on besides its arguments, all of it: set by scopes of whoever runs
// it.
#pragma once

#include <c10/core/DeviceType.h>

namespace ligature {

class DelayedSource;
class SmallBufferRun;
namespace distributed {
class Filler;
}

namespace kernels {

class KernelLog;

/// What a folder above kernels/ knows of a thread. It ends with the thread.
struct ThreadPart {
  ThreadPart() = default;
  ThreadPart(const ThreadPart&) = delete;
  ThreadPart& operator=(const ThreadPart&) = delete;
  virtual ~ThreadPart() = default;
};

struct RunContext {
  KernelLog* log = nullptr;               ///< notes which kernels run (log.h)
  SmallBufferRun* buffers = nullptr;      ///< has room for small results (small_buffers.h)
  DelayedSource* delayed = nullptr;       ///< has the scales of delayed scaling
  distributed::Filler* filler = nullptr;  ///< has work for while a collective is under way
  bool no_sync = false;                   ///< the host may not wait for a device (log.h)
  c10::DeviceType meta_is = c10::DeviceType::Meta;  ///< what tensors without memory stand for

  // Owned (thread_part). There is no destructor, as every access would look for it.
  ThreadPart* autocast = nullptr;    ///< the low-precision context
  ThreadPart* model_init = nullptr;  ///< whether weights are made in low precision
  ThreadPart* strict = nullptr;      ///< fusions that must fire
};

/// This thread's.
RunContext& run_context();

/// Deletes the parts of this thread's context when the thread ends; those of the main thread stay.
void end_parts_with_thread();

/// This thread's part of one kind, made when it is first asked for.
template <class Part>
Part& thread_part(ThreadPart* RunContext::* member) {
  ThreadPart*& part = run_context().*member;
  if (part == nullptr) {
    part = new Part();
    end_parts_with_thread();
  }
  return static_cast<Part&>(*part);
}

}  // namespace kernels
}  // namespace ligature
