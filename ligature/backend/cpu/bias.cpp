// The bias of the CPU backend: sums are taken in float, those over rows in an order that does not
// depend on the number of threads.
#include "ligature/backend/cpu/bias.h"

#include <ATen/ops/add.h>

#include "ligature/backend/cpu/bias_rows.h"
#include "ligature/backend/cpu/fetch.h"
#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

// What a staged piece of a row holds.
constexpr int64_t kBiasPiece = 1024;

template <typename T>
void forward_into(const Tensor& y, const Tensor& x, const Tensor& b) {
  using C = ComputeType<T>;
  const int64_t features = b.numel();
  const auto buffer = make_aligned_buffer<C>(features);
  const C* bias = Input<C>(b).read(0, features, buffer.get());
  const Input<T> input(x);
  const Output<T> output(y, true);
  int64_t most = input.direct() ? kChunkElements : kBiasPiece;
  if (output.streams()) most = kStreamPart<T>;
  const bool fetches = output.streams() && input.direct() && sizeof(T) >= kFetchedSize;
  const int64_t piece = std::clamp<int64_t>(features, 1, most);
  const int64_t pieces_per_row = (features + piece - 1) / piece;
  const int64_t rows = x.numel() / std::max<int64_t>(features, 1);
  const int64_t grain = std::max<int64_t>(1, kChunkElements / piece);
  at::parallel_for(0, rows * pieces_per_row, grain, [&](int64_t first, int64_t last) {
    alignas(kBufferAlignment) T x_buffer[kBiasPiece];
    alignas(kBufferAlignment) T y_buffer[kBiasPiece];
    for (int64_t i = first; i < last; ++i) {
      const int64_t column = i % pieces_per_row * piece;
      const int64_t at = i / pieces_per_row * features + column;
      const int64_t n = std::min(piece, features - column);
      T* result = output.place(at, y_buffer);
      const T* part = input.read(at, n, x_buffer);
      add_bias(part, bias + column, result, n);
      if (fetches) fetch_lines(part, piece, piece);
      output.write(at, n, result);
    }
    stream_end();
  });
}

template <typename T>
void backward_into(const Tensor& db, const Tensor& dy, int64_t features) {
  using C = ComputeType<T>;
  const int64_t rows = features > 0 ? dy.numel() / features : 0;
  const RowChunks chunks(rows, features, kSumChunkElements);
  ChunkSums<C> sums(chunks, features, true);
  const Input<T> input(dy);
  parallel_chunks(chunks, [&](int64_t chunk, int64_t first, int64_t last) {
    const auto buffer = make_aligned_buffer<T>(4 * features);
    C* const chunk_sums = sums.chunk(chunk);
    int64_t row = first;
    for (; row + 4 <= last; row += 4) {
      accumulate_four(input.read(row * features, 4 * features, buffer.get()), chunk_sums, features);
    }
    for (; row < last; ++row) {
      accumulate(input.read(row * features, features, buffer.get()), chunk_sums, features);
    }
  });
  sums.write_total(db);
}

}  // namespace

Tensor bias_forward(const Tensor& x, const Tensor& b) {
  if (x.scalar_type() != b.scalar_type()) return at::add(x, b).to(x.scalar_type());
  Tensor y = new_like(x);
  dispatch_elements([&](auto zero) { forward_into<decltype(zero)>(y, x, b); }, x.scalar_type());
  return y;
}

Tensor bias_backward(const Tensor& dy, int64_t features) {
  Tensor db = new_tensor({features}, dy.scalar_type());
  dispatch_elements([&](auto zero) { backward_into<decltype(zero)>(db, dy, features); },
                    dy.scalar_type());
  return db;
}

}  // namespace ligature::cpu
