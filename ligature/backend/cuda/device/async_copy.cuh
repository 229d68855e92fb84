// Copies from global to shared memory that run while the thread goes on. A thread waits for its own
// copies only, the oldest ones first.
#pragma once

#include <cstdint>

namespace ligature::cuda {

/// An address in shared memory as the copies know it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// 16 bytes; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// What was copied since the last call is one batch, which may be empty.
__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Until at most `Left` batches are under way.
template <int Left>
__device__ __forceinline__ void await_batches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

}  // namespace ligature::cuda
