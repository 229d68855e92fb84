// The walk of the activations of the CPU backend. A tensor is walked in pieces that never cross a
// row, nor the border between gates and linear units: two halves of a row are one pair of blocks,
// interleaving is more and shorter pairs, so both are the same walk. Blocks too short for a vector
// are sorted into gates and linear units, a piece of several at a time. Tensors hold elements T.
#pragma once

#include <algorithm>
#include <vector>

#include "ligature/backend/cpu/activation_loops.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {

using kernels::ActivationSpec;

// An exponential, next to the few operations that kChunkElements counts in.
constexpr int64_t kElementCost = 2;

/// What a buffer holds.
template <typename T>
constexpr int64_t kPiece = kStreamPart<T>;

// With half as many bytes memory is no longer what an activation waits for, unless it is a simple
// one.
template <typename T>
bool worth_streaming(const ActivationSpec& spec) {
  return sizeof(T) >= 4 || spec.kind == kernels::ActivationKind::ReLU;
}

/// Blocks up to this long are sorted; so many results at a time, whose x fits in a buffer.
constexpr int64_t kShortBlock = 16;
constexpr int64_t kSortedPiece = kPiece<double> / 2;

struct Piece {
  int64_t row;
  int64_t a;  // offset of the gates (or plain inputs) in x
  int64_t y;  // offset of the results in y
  int64_t n;
};

// `rows` of `width` results, each in blocks of `block`; x holds a block of gates before each block
// of linear units.
struct PieceWalk {
  bool gated, sorted = false;
  int64_t rows, width, block, length, pieces_per_block = 0, pieces_per_row;

  /// `piece_length`: of a piece, at most; kPiece<T> where it goes through a buffer.
  PieceWalk(const at::Tensor& x, const ActivationSpec& spec, bool keep_rows, int64_t piece_length)
      : gated(kernels::is_gated(spec.kind)), length(piece_length) {
    const int64_t features = gated ? x.size(-1) / 2 : x.size(-1);
    const int64_t results = gated ? x.numel() / 2 : x.numel();
    rows = results == 0 ? 0 : keep_rows ? results / features : 1;
    width = results == 0 ? features : results / rows;
    block = width;
    if (gated) block = spec.glu_interleave_size > 0 ? spec.glu_interleave_size : features;
    sorted = gated && block <= kShortBlock && block < features;
    if (sorted) {
      length = kSortedPiece / block * block;
      pieces_per_row = (width + length - 1) / length;
      return;
    }
    pieces_per_block = (block + length - 1) / length;
    pieces_per_row = block == 0 ? 0 : width / block * pieces_per_block;
  }

  int64_t pieces() const { return rows * pieces_per_row; }

  Piece piece(int64_t index) const {
    if (sorted) {
      const int64_t row = index / pieces_per_row, within = index % pieces_per_row * length;
      const int64_t y = row * width + within;
      return {row, 2 * y, y, std::min(length, width - within)};
    }
    const int64_t whole_block = index / pieces_per_block;
    const int64_t within = index % pieces_per_block * length;
    return {index / pieces_per_row, whole_block * block * (gated ? 2 : 1) + within,
            whole_block * block + within, std::min(length, block - within)};
  }
};

// Calls f(first_piece, end_piece) in parallel.
template <typename F>
void parallel_pieces(const PieceWalk& walk, const F& f) {
  const int64_t piece = walk.sorted ? walk.length : std::clamp<int64_t>(walk.block, 1, walk.length);
  const int64_t grain = std::max<int64_t>(1, kChunkElements / (piece * kElementCost));
  at::parallel_for(0, walk.pieces(), grain, [&](int64_t first, int64_t last) {
    f(first, last);
    stream_end();
  });
}

template <typename C>
LIGATURE_SIMD void multiply(const C* x, C factor, C* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
}

template <typename C>
LIGATURE_SIMD C dot(const C* a, const C* b, int64_t n) {
  return lane_sum<C>(n, [&](int64_t i) { return a[i] * b[i]; });
}

/// n gates to a and n linear units to b, of 2 n elements in blocks that alternate.
template <typename T>
LIGATURE_SIMD void sort_blocks(const T* both, int64_t block, int64_t n, T* a, T* b) {
  if (block == 1) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      a[i] = both[2 * i];
      b[i] = both[2 * i + 1];
    }
    return;
  }
  for (int64_t i = 0; i < n; i += block) {
    for (int64_t k = 0; k < block; ++k) {
      a[i + k] = both[2 * i + k];
      b[i + k] = both[2 * i + block + k];
    }
  }
}

/// The way back; with `add`, added to what is there.
template <bool add, typename T>
LIGATURE_SIMD void mix_blocks(const T* a, const T* b, int64_t block, int64_t n, T* both) {
  const auto put = [&](int64_t at, T value) {
    if constexpr (add) {
      both[at] += value;
    } else {
      both[at] = value;
    }
  };
  if (block == 1) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      put(2 * i, a[i]);
      put(2 * i + 1, b[i]);
    }
    return;
  }
  for (int64_t i = 0; i < n; i += block) {
    for (int64_t k = 0; k < block; ++k) {
      put(2 * i + k, a[i + k]);
      put(2 * i + block + k, b[i + k]);
    }
  }
}

template <typename T>
bool holds(const at::Tensor& t) {
  return t.scalar_type() == c10::CppTypeToScalarType<T>::value;
}

/// Rows' factors. They need elements that are not rounded between two operations: T is what is
/// computed in.
template <typename T>
class Scales {
 public:
  using C = ComputeType<T>;

  explicit Scales(const at::Tensor& scales) : input_(scales) {}

  bool defined() const { return std::is_same_v<T, C> && input_.defined(); }

  C of(int64_t row) const {
    C buffer;
    return *input_.read(row, 1, &buffer);
  }

  void multiply_by(int64_t row, const T* x, T* y, int64_t n) const {
    if constexpr (std::is_same_v<T, C>) multiply(x, of(row), y, n);
  }

 private:
  Input<C> input_;
};

/// Calls f(T{}) with the element type for tensors of these dtypes, `exact` where T must be what is
/// computed in.
template <typename F, typename... Others>
auto dispatch_activation(bool exact, const F& f, at::ScalarType dtype, Others... others) {
  return exact ? dispatch_compute(dtype, f) : dispatch_elements(f, dtype, others...);
}

template <typename T>
class ForwardPieces {
 public:
  ForwardPieces(const at::Tensor& x, const ActivationSpec& spec, const at::Tensor& scales,
                const PieceWalk& walk)
      : spec_(spec),
        walk_(walk),
        forward_(activation_loops<T>(spec.kind).forward),
        x_(x),
        scales_(scales) {}

  /// Writes y for the pieces [first, last); `y_output` begins at y's element `start`.
  void run(int64_t first, int64_t last, const Output<T>& y_output, int64_t start) const {
    alignas(kBufferAlignment) T a_buffer[kPiece<T>];
    alignas(kBufferAlignment) T b_buffer[kPiece<T>];
    alignas(kBufferAlignment) T y_buffer[kPiece<T>];
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk_.piece(i);
      const T *a = a_buffer, *b = b_buffer;
      if (walk_.sorted) {
        sort_blocks(x_.read(p.a, 2 * p.n, y_buffer), walk_.block, p.n, a_buffer, b_buffer);
      } else {
        a = x_.read(p.a, p.n, a_buffer);
        b = walk_.gated ? x_.read(p.a + walk_.block, p.n, b_buffer) : nullptr;
      }
      T* result = y_output.place(p.y - start, y_buffer);
      forward_(spec_, a, b, result, p.n);
      if (scales_.defined()) scales_.multiply_by(p.row, result, result, p.n);
      y_output.write(p.y - start, p.n, result);
    }
  }

 private:
  ActivationSpec spec_;
  PieceWalk walk_;
  typename ActivationLoops<T>::Forward forward_;
  Input<T> x_;
  Scales<T> scales_;
};

/// Where a backward's sums over rows are added to; null where not wanted. `dscales` needs elements
/// that are not rounded, and so does `dbias` beside the forward's y.
template <typename C>
struct ActivationSums {
  C* dscales = nullptr;
  C* dbias = nullptr;
};

template <typename T>
class BackwardPieces {
 public:
  using C = ComputeType<T>;

  BackwardPieces(const at::Tensor& dy, const at::Tensor& x, const ActivationSpec& spec,
                 const at::Tensor& scales, const PieceWalk& walk)
      : spec_(spec),
        walk_(walk),
        loops_(activation_loops<T>(spec.kind)),
        dy_(dy),
        x_(x),
        scales_(scales) {}

  /// Writes dx for the pieces [first, last); `dx_output` begins at dx's element `start`. Where it
  /// is not null, `y_output` is given the forward's y, which may be written over dy as dx may be
  /// over x.
  void run(int64_t first, int64_t last, const Output<T>& dx_output, int64_t start,
           const ActivationSums<C>& sums, const Output<T>* y_output = nullptr) const {
    alignas(kBufferAlignment) T dy_buffer[kPiece<T>];
    alignas(kBufferAlignment) T g_buffer[kPiece<T>];
    alignas(kBufferAlignment) T a_buffer[kPiece<T>];
    alignas(kBufferAlignment) T b_buffer[kPiece<T>];
    alignas(kBufferAlignment) T y_buffer[kPiece<T>];
    alignas(kBufferAlignment) T da_buffer[kPiece<T>];
    alignas(kBufferAlignment) T db_buffer[kPiece<T>];
    if (walk_.sorted) return run_sorted(first, last, dx_output, start, sums, y_output);
    const int64_t x_width = walk_.width * (walk_.gated ? 2 : 1);
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk_.piece(i);
      const int64_t b_at = p.a + walk_.block;
      const T* dy = dy_.read(p.y, p.n, dy_buffer);
      BackwardPiece<T> piece{dy, x_.read(p.a, p.n, a_buffer), nullptr,
                             dx_output.place(p.a - start, da_buffer), nullptr};
      if (walk_.gated) {
        piece.b = x_.read(b_at, p.n, b_buffer);
        piece.db = dx_output.place(b_at - start, db_buffer);
      }
      if (scales_.defined()) {
        scales_.multiply_by(p.row, dy, g_buffer, p.n);
        piece.dy = g_buffer;
      }
      if (sums.dbias != nullptr) {
        piece.da_sums = sums.dbias + (p.a - p.row * x_width);
        if (walk_.gated) piece.db_sums = sums.dbias + (b_at - p.row * x_width);
      }
      compute(piece, p, sums, y_buffer, y_output, dy);
      dx_output.write(p.a - start, p.n, piece.da);
      if (walk_.gated) dx_output.write(b_at - start, p.n, piece.db);
    }
  }

 private:
  // As run(), with gates and linear units apart while they are computed with.
  void run_sorted(int64_t first, int64_t last, const Output<T>& dx_output, int64_t start,
                  const ActivationSums<C>& sums, const Output<T>* y_output) const {
    alignas(kBufferAlignment) T dy_buffer[kPiece<T>];
    alignas(kBufferAlignment) T g_buffer[kPiece<T>];
    alignas(kBufferAlignment) T a_buffer[kPiece<T>];
    alignas(kBufferAlignment) T b_buffer[kPiece<T>];
    alignas(kBufferAlignment) T y_buffer[kPiece<T>];
    alignas(kBufferAlignment) T both_buffer[kPiece<T>];
    alignas(kBufferAlignment) C sum_buffer[2 * kSortedPiece];
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk_.piece(i);
      const T* dy = dy_.read(p.y, p.n, dy_buffer);
      sort_blocks(x_.read(p.a, 2 * p.n, both_buffer), walk_.block, p.n, a_buffer, b_buffer);
      BackwardPiece<T> piece{dy, a_buffer, b_buffer, a_buffer, b_buffer};
      if (scales_.defined()) {
        scales_.multiply_by(p.row, dy, g_buffer, p.n);
        piece.dy = g_buffer;
      }
      if (sums.dbias != nullptr) {
        std::fill_n(sum_buffer, 2 * kSortedPiece, C(0));
        piece.da_sums = sum_buffer;
        piece.db_sums = sum_buffer + kSortedPiece;
      }
      compute(piece, p, sums, y_buffer, y_output, dy);
      if (sums.dbias != nullptr) {
        C* columns = sums.dbias + (p.a - p.row * 2 * walk_.width);
        mix_blocks<true>(sum_buffer, sum_buffer + kSortedPiece, walk_.block, p.n, columns);
      }
      T* dx = dx_output.place(p.a - start, both_buffer);
      mix_blocks<false>(a_buffer, b_buffer, walk_.block, p.n, dx);
      dx_output.write(p.a - start, 2 * p.n, dx);
    }
  }

  void compute(BackwardPiece<T>& piece, const Piece& p, const ActivationSums<C>& sums, T* y_buffer,
               const Output<T>* y_output, const T* dy) const {
    if (sums.dscales == nullptr && y_output == nullptr) {
      (sums.dbias != nullptr ? loops_.backward_sums : loops_.backward)(spec_, piece, p.n);
      return;
    }
    // What is multiplied by a scale must not be written over dy before.
    T* const y = y_output != nullptr ? y_output->place(p.y, y_buffer) : y_buffer;
    piece.y = scales_.defined() ? y_buffer : y;
    run_again(piece, p, sums, dy);
    if (y_output == nullptr) return;
    if (scales_.defined()) scales_.multiply_by(p.row, y_buffer, y, p.n);
    y_output->write(p.y, p.n, y);
  }

  void run_again(const BackwardPiece<T>& piece, const Piece& p, const ActivationSums<C>& sums,
                 const T* dy) const {
    loops_.backward_recompute(spec_, piece, p.n);
    if constexpr (std::is_same_v<T, C>) {
      if (sums.dscales != nullptr) sums.dscales[p.row] += dot(dy, piece.y, p.n);
    }
    if (sums.dbias == nullptr) return;
    accumulate(piece.da, piece.da_sums, p.n);
    if (walk_.gated) accumulate(piece.db, piece.db_sums, p.n);
  }

  ActivationSpec spec_;
  PieceWalk walk_;
  ActivationLoops<T> loops_;
  Input<T> dy_, x_;
  Scales<T> scales_;
};

template <typename C>
void write_values(const at::Tensor& out, std::vector<C>& values) {
  const Output<C> output(out);
  const int64_t n = static_cast<int64_t>(values.size());
  std::copy(values.begin(), values.end(), output.place(0, values.data()));
  output.write(0, n, values.data());
}

}  // namespace ligature::cpu
