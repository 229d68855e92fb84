// Activations of the CPU backend. A tensor is walked in pieces that never cross a row, nor the
// border between gates and linear units: two halves of a row are one pair of blocks, interleaving
// is more and shorter pairs, so both are the same walk.
#include "ligature/backend/cpu/activation.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ligature/backend/cpu/activation_loops.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

// An exponential, next to the few operations that kChunkElements counts in.
constexpr int64_t kElementCost = 2;

struct Piece {
  int64_t row;
  int64_t a;  // offset of the gates (or plain inputs) in x
  int64_t y;  // offset of the results in y
  int64_t n;
};

// `rows` of `width` results, each in blocks of `block`; x holds a block of gates before each block
// of linear units.
struct Walk {
  bool gated;
  int64_t rows, width, block, pieces_per_block, pieces_per_row;

  Walk(const Tensor& x, const ActivationSpec& spec, bool keep_rows)
      : gated(kernels::is_gated(spec.kind)) {
    const int64_t features = gated ? x.size(-1) / 2 : x.size(-1);
    const int64_t results = gated ? x.numel() / 2 : x.numel();
    rows = results == 0 ? 0 : keep_rows ? results / features : 1;
    width = results == 0 ? features : results / rows;
    block = width;
    if (gated) block = spec.glu_interleave_size > 0 ? spec.glu_interleave_size : features;
    pieces_per_block = (block + kPiece - 1) / kPiece;
    pieces_per_row = block == 0 ? 0 : width / block * pieces_per_block;
  }

  int64_t pieces() const { return rows * pieces_per_row; }

  Piece piece(int64_t index) const {
    const int64_t whole_block = index / pieces_per_block;
    const int64_t within = index % pieces_per_block * kPiece;
    return {index / pieces_per_row, whole_block * block * (gated ? 2 : 1) + within,
            whole_block * block + within, std::min(kPiece, block - within)};
  }
};

// Calls f(first_piece, end_piece) in parallel.
template <typename F>
void parallel_pieces(const Walk& walk, const F& f) {
  const int64_t piece = std::clamp<int64_t>(walk.block, 1, kPiece);
  const int64_t grain = std::max<int64_t>(1, kChunkElements / (piece * kElementCost));
  at::parallel_for(0, walk.pieces(), grain, f);
}

template <typename C>
LIGATURE_SIMD void multiply(const C* x, C factor, C* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
}

template <typename C>
LIGATURE_SIMD void accumulate(const C* x, C* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sums[i] += x[i];
}

template <typename C>
LIGATURE_SIMD C dot(const C* a, const C* b, int64_t n) {
  return lane_sum<C>(n, [&](int64_t i) { return a[i] * b[i]; });
}

template <typename C>
C scale_of(const Input<C>& scales, int64_t row) {
  C buffer;
  return *scales.read(row, 1, &buffer);
}

template <typename C>
void forward_into(const Tensor& y, const Tensor& x, const ActivationSpec& spec,
                  const Tensor& scales) {
  const Walk walk(x, spec, scales.defined());
  const auto forward = activation_loops<C>(spec.kind).forward;
  const Input<C> x_input(x), scales_input(scales);
  const Output<C> y_output(y);
  parallel_pieces(walk, [&](int64_t first, int64_t last) {
    C a_buffer[kPiece], b_buffer[kPiece], y_buffer[kPiece];
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk.piece(i);
      const C* a = x_input.read(p.a, p.n, a_buffer);
      const C* b = walk.gated ? x_input.read(p.a + walk.block, p.n, b_buffer) : nullptr;
      C* result = y_output.place(p.y, y_buffer);
      forward(spec, a, b, result, p.n);
      if (scales_input.defined()) multiply(result, scale_of(scales_input, p.row), result, p.n);
      y_output.write(p.y, p.n, result);
    }
  });
}

template <typename C>
class Backward {
 public:
  Backward(const Tensor& dy, const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
           const Tensor& dx, const Walk& walk)
      : spec_(spec),
        walk_(walk),
        backward_(activation_loops<C>(spec.kind).backward),
        dy_(dy),
        x_(x),
        scales_(scales),
        dx_(dx) {}

  /// Writes dx for the pieces [first, last). Where not null, dscales[row] and dbias are added to.
  void run(int64_t first, int64_t last, C* dscales, C* dbias) const {
    C dy_buffer[kPiece], g_buffer[kPiece], a_buffer[kPiece], b_buffer[kPiece];
    C y[kPiece], da_buffer[kPiece], db_buffer[kPiece];
    const int64_t x_width = walk_.width * (walk_.gated ? 2 : 1);
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk_.piece(i);
      const int64_t b_at = p.a + walk_.block;
      const C* dy = dy_.read(p.y, p.n, dy_buffer);
      const C* a = x_.read(p.a, p.n, a_buffer);
      const C* b = walk_.gated ? x_.read(b_at, p.n, b_buffer) : nullptr;
      C* da = dx_.place(p.a, da_buffer);
      C* db = walk_.gated ? dx_.place(b_at, db_buffer) : nullptr;
      const C* g = dy;
      if (scales_.defined()) {
        multiply(dy, scale_of(scales_, p.row), g_buffer, p.n);
        g = g_buffer;
      }
      backward_(spec_, g, a, b, y, da, db, p.n);
      if (dscales != nullptr) dscales[p.row] += dot(dy, y, p.n);
      if (dbias != nullptr) {
        accumulate(da, dbias + (p.a - p.row * x_width), p.n);
        if (walk_.gated) accumulate(db, dbias + (b_at - p.row * x_width), p.n);
      }
      dx_.write(p.a, p.n, da);
      if (walk_.gated) dx_.write(b_at, p.n, db);
    }
  }

 private:
  const ActivationSpec& spec_;
  const Walk& walk_;
  typename ActivationLoops<C>::Backward backward_;
  Input<C> dy_, x_, scales_;
  Output<C> dx_;
};

template <typename C>
void backward_into(const ActivationBackward& result, const Tensor& dy, const Tensor& x,
                   const ActivationSpec& spec, const Tensor& scales) {
  const bool sums = result.dscales.defined() || result.dbias.defined();
  const Walk walk(x, spec, sums || scales.defined());
  const Backward<C> backward(dy, x, spec, scales, result.dx, walk);
  if (!sums) {
    parallel_pieces(
        walk, [&](int64_t first, int64_t last) { backward.run(first, last, nullptr, nullptr); });
    return;
  }
  const RowChunks chunks(walk.rows, walk.width * kElementCost);
  ChunkSums<C> dbias(chunks, x.size(-1), result.dbias.defined());
  std::vector<C> dscales(result.dscales.defined() ? walk.rows : 0);
  C* dscales_data = result.dscales.defined() ? dscales.data() : nullptr;
  parallel_chunks(chunks, [&](int64_t chunk, int64_t first, int64_t last) {
    backward.run(first * walk.pieces_per_row, last * walk.pieces_per_row, dscales_data,
                 dbias.chunk(chunk));
  });
  if (result.dbias.defined()) dbias.write_total(result.dbias);
  if (result.dscales.defined()) {
    const Output<C> output(result.dscales);
    std::copy(dscales.begin(), dscales.end(), output.place(0, dscales.data()));
    output.write(0, walk.rows, dscales.data());
  }
}

}  // namespace

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  at::DimVector shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.back() /= 2;
  Tensor y = at::empty(shape, x.options());
  dispatch_compute(x.scalar_type(),
                   [&](auto zero) { forward_into<decltype(zero)>(y, x, spec, scales); });
  return y;
}

Tensor activation_forward_(Tensor& x, const ActivationSpec& spec) {
  dispatch_compute(x.scalar_type(),
                   [&](auto zero) { forward_into<decltype(zero)>(x, x, spec, {}); });
  return x;
}

ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias) {
  ActivationBackward result;
  result.dx = at::empty_like(x);
  if (need_dscales) result.dscales = at::empty_like(scales);
  if (need_dbias) result.dbias = at::empty({x.size(-1)}, x.options());
  dispatch_compute(x.scalar_type(),
                   [&](auto zero) { backward_into<decltype(zero)>(result, dy, x, spec, scales); });
  return result;
}

}  // namespace ligature::cpu
