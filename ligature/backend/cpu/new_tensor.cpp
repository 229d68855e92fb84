#include "ligature/backend/cpu/new_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace ligature::cpu {
namespace {

/// A wish: where the system does not grant it, pages are small.
void want_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kPage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
  constexpr size_t kLarge = size_t{8} << 20;
  at::Tensor made = at::detail::empty_cpu(sizes, dtype);
  if (made.nbytes() >= kLarge) want_large_pages(made.mutable_data_ptr(), made.nbytes());
  return made;
}

at::Tensor new_like(const at::Tensor& x) {
  return x.is_contiguous() ? new_tensor(x.sizes(), x.scalar_type()) : at::empty_like(x);
}

}  // namespace ligature::cpu
