// The bias of the CPU backend. ATen adds; the sum over rows is ours, to accumulate in float and in
// an order that does not depend on the number of threads.
#include "ligature/backend/cpu/bias.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

template <typename C>
LIGATURE_SIMD void accumulate(const C* x, C* sums, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sums[i] += x[i];
}

}  // namespace

Tensor bias_forward(const Tensor& x, const Tensor& b) {
  if (x.scalar_type() == b.scalar_type()) return at::add(x, b);
  return at::add(x, b).to(x.scalar_type());
}

Tensor bias_backward(const Tensor& dy, int64_t features) {
  const int64_t rows = features > 0 ? dy.numel() / features : 0;
  Tensor db = at::empty({features}, dy.options());
  dispatch_compute(dy.scalar_type(), [&](auto zero) {
    using C = decltype(zero);
    const RowChunks chunks(rows, features);
    ChunkSums<C> sums(chunks, features, true);
    const Input<C> input(dy);
    parallel_chunks(chunks, [&](int64_t chunk, int64_t first, int64_t last) {
      auto buffer = make_buffer<C>(features);
      for (int64_t row = first; row < last; ++row) {
        accumulate(input.read(row * features, features, buffer.get()), sums.chunk(chunk), features);
      }
    });
    sums.write_total(db);
  });
  return db;
}

}  // namespace ligature::cpu
