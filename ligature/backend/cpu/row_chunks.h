// Rows in parallel, with sums over rows that do not depend on the number of threads: rows are cut
// into chunks by their sizes alone, each chunk sums by itself, and the chunks are added in order.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/typed_io.h"
#include "ligature/backend/cpu/vector_math.h"

namespace ligature::cpu {

/// About the number of elements, at a few operations each, that repays handing work to another
/// thread.
constexpr int64_t kChunkElements = 16384;
constexpr int64_t kMaxChunks = 32;
/// The same where each chunk has a row of sums, to be cleared and added to the others.
constexpr int64_t kSumChunkElements = 4 * kChunkElements;

struct RowChunks {
  int64_t rows;
  int64_t count;

  RowChunks(int64_t row_count, int64_t row_elements, int64_t chunk_elements = kChunkElements)
      : rows(row_count),
        count(std::clamp<int64_t>(rows * row_elements / chunk_elements, 1,
                                  std::clamp<int64_t>(rows, 1, kMaxChunks))) {}

  int64_t begin(int64_t chunk) const { return chunk * rows / count; }
};

/// Calls f(chunk, first_row, end_row) for each chunk.
template <typename F>
void parallel_chunks(const RowChunks& chunks, const F& f) {
  at::parallel_for(0, chunks.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) f(c, chunks.begin(c), chunks.begin(c + 1));
    stream_end();
  });
}

/// sums += x.
template <typename C, typename T>
LIGATURE_SIMD void accumulate(const T* x, C* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sums[i] += Cast<T, C>::apply(x[i]);
}

/// The same for four rows, in their order: the sums are read and written once.
template <typename C, typename T>
LIGATURE_SIMD void accumulate_four(const T* x, C* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    C sum = sums[i] + Cast<T, C>::apply(x[i]);
    sum += Cast<T, C>::apply(x[i + n]);
    sum += Cast<T, C>::apply(x[i + 2 * n]);
    sums[i] = sum + Cast<T, C>::apply(x[i + 3 * n]);
  }
}

/// One row of sums per chunk, and their total.
template <typename C>
class ChunkSums {
 public:
  /// `wanted` false makes a place holder without memory.
  ChunkSums(const RowChunks& chunks, int64_t features, bool wanted)
      : count_(chunks.count), features_(features), stride_((features + 15) / 16 * 16) {
    if (!wanted) return;
    sums_ = make_aligned_buffer<C>(count_ * stride_);
    std::fill_n(sums_.get(), count_ * stride_, C(0));
  }

  /// Null when not wanted.
  C* chunk(int64_t c) { return sums_ ? sums_.get() + c * stride_ : nullptr; }

  void write_total(const at::Tensor& out) {
    if (!sums_) return;
    for (int64_t c = 1; c < count_; ++c) accumulate(chunk(c), sums_.get(), features_);
    const Output<C> total(out);
    std::copy_n(sums_.get(), features_, total.place(0, sums_.get()));
    total.write(0, features_, sums_.get());
  }

 private:
  int64_t count_, features_, stride_;
  AlignedBuffer<C> sums_;
};

}  // namespace ligature::cpu
