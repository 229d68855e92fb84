// What a thread's kernels depend on besides their arguments: set by scopes of whoever runs them.
#pragma once

#include <c10/core/DeviceType.h>

namespace ligature {

class DelayedSource;
class SmallBufferRun;

namespace kernels {

class KernelLog;

struct RunContext {
  KernelLog* log = nullptr;           ///< notes which kernels run (log.h)
  SmallBufferRun* buffers = nullptr;  ///< has room for small results (small_buffers.h)
  DelayedSource* delayed = nullptr;   ///< has the scales of delayed scaling
  c10::DeviceType meta_is = c10::DeviceType::Meta;  ///< what tensors without memory stand for
};

/// This thread's.
RunContext& run_context();

}  // namespace kernels
}  // namespace ligature
