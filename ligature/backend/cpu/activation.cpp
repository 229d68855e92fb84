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
class Forward {
 public:
  Forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales, const Walk& walk)
      : spec_(spec),
        walk_(walk),
        forward_(activation_loops<C>(spec.kind).forward),
        x_(x),
        scales_(scales) {}

  /// Writes y for the pieces [first, last); `y_output` begins at y's element `start`.
  void run(int64_t first, int64_t last, const Output<C>& y_output, int64_t start) const {
    C a_buffer[kPiece], b_buffer[kPiece], y_buffer[kPiece];
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk_.piece(i);
      const C* a = x_.read(p.a, p.n, a_buffer);
      const C* b = walk_.gated ? x_.read(p.a + walk_.block, p.n, b_buffer) : nullptr;
      C* result = y_output.place(p.y - start, y_buffer);
      forward_(spec_, a, b, result, p.n);
      if (scales_.defined()) multiply(result, scale_of(scales_, p.row), result, p.n);
      y_output.write(p.y - start, p.n, result);
    }
  }

 private:
  ActivationSpec spec_;
  Walk walk_;
  typename ActivationLoops<C>::Forward forward_;
  Input<C> x_, scales_;
};

template <typename C>
void forward_into(const Tensor& y, const Tensor& x, const ActivationSpec& spec,
                  const Tensor& scales) {
  const Walk walk(x, spec, scales.defined());
  const Forward<C> forward(x, spec, scales, walk);
  const Output<C> y_output(y);
  parallel_pieces(walk,
                  [&](int64_t first, int64_t last) { forward.run(first, last, y_output, 0); });
}

template <typename C>
class Backward {
 public:
  Backward(const Tensor& dy, const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
           const Walk& walk)
      : spec_(spec),
        walk_(walk),
        backward_(activation_loops<C>(spec.kind).backward),
        dy_(dy),
        x_(x),
        scales_(scales) {}

  /// Writes dx for the pieces [first, last); `dx_output` begins at dx's element `start`. Where not
  /// null, dscales[row] and dbias are added to, and `y_output` is given the forward's y, which may
  /// be written over dy as dx may be over x.
  void run(int64_t first, int64_t last, const Output<C>& dx_output, int64_t start, C* dscales,
           C* dbias, const Output<C>* y_output = nullptr) const {
    C dy_buffer[kPiece], g_buffer[kPiece], a_buffer[kPiece], b_buffer[kPiece];
    C y[kPiece], da_buffer[kPiece], db_buffer[kPiece];
    const int64_t x_width = walk_.width * (walk_.gated ? 2 : 1);
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk_.piece(i);
      const int64_t b_at = p.a + walk_.block;
      const C* dy = dy_.read(p.y, p.n, dy_buffer);
      const C* a = x_.read(p.a, p.n, a_buffer);
      const C* b = walk_.gated ? x_.read(b_at, p.n, b_buffer) : nullptr;
      C* da = dx_output.place(p.a - start, da_buffer);
      C* db = walk_.gated ? dx_output.place(b_at - start, db_buffer) : nullptr;
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
      dx_output.write(p.a - start, p.n, da);
      if (walk_.gated) dx_output.write(b_at - start, p.n, db);
      if (y_output != nullptr) {
        C* again = y_output->place(p.y, y);
        if (again != y) std::copy_n(y, p.n, again);
        y_output->write(p.y, p.n, again);
      }
    }
  }

 private:
  ActivationSpec spec_;
  Walk walk_;
  typename ActivationLoops<C>::Backward backward_;
  Input<C> dy_, x_, scales_;
};

template <typename C>
void write_values(const Tensor& out, std::vector<C>& values) {
  const Output<C> output(out);
  const int64_t n = static_cast<int64_t>(values.size());
  std::copy(values.begin(), values.end(), output.place(0, values.data()));
  output.write(0, n, values.data());
}

template <typename C>
void backward_into(const ActivationBackward& result, const Tensor& dy, const Tensor& x,
                   const ActivationSpec& spec, const Tensor& scales, const Tensor& y = {}) {
  const bool sums = result.dscales.defined() || result.dbias.defined();
  const Walk walk(x, spec, sums || scales.defined());
  const Backward<C> backward(dy, x, spec, scales, walk);
  const Output<C> dx_output(result.dx);
  const Output<C> y_output(y);
  const Output<C>* again = y.defined() ? &y_output : nullptr;
  if (!sums) {
    parallel_pieces(walk, [&](int64_t first, int64_t last) {
      backward.run(first, last, dx_output, 0, nullptr, nullptr, again);
    });
    return;
  }
  const RowChunks chunks(walk.rows, walk.width * kElementCost);
  ChunkSums<C> dbias(chunks, x.size(-1), result.dbias.defined());
  std::vector<C> dscales(result.dscales.defined() ? walk.rows : 0);
  C* dscales_data = result.dscales.defined() ? dscales.data() : nullptr;
  parallel_chunks(chunks, [&](int64_t chunk, int64_t first, int64_t last) {
    backward.run(first * walk.pieces_per_row, last * walk.pieces_per_row, dx_output, 0,
                 dscales_data, dbias.chunk(chunk), again);
  });
  if (result.dbias.defined()) dbias.write_total(result.dbias);
  if (result.dscales.defined()) write_values(result.dscales, dscales);
}

at::ScalarType source_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kFloat : x.scalar_type();
}

template <typename C>
class ForwardSource : public RowSource {
 public:
  ForwardSource(const Tensor& x, const ActivationSpec& spec, const Tensor& scales)
      : pieces_(x, spec, true), forward_(x, spec, scales, pieces_) {
    rows = pieces_.rows;
    columns = pieces_.width;
    dtype = source_dtype(x);
  }

  std::unique_ptr<RowSource::Walk> walk(int64_t first, int64_t, bool) override {
    return std::make_unique<Rows>(*this, first);
  }

 private:
  class Rows : public RowSource::Walk {
   public:
    Rows(const ForwardSource& source, int64_t first) : source_(source), row_(first) {}

    void next(int64_t end, void* values) override {
      const int64_t per_row = source_.pieces_.pieces_per_row;
      source_.forward_.run(row_ * per_row, end * per_row, Output<C>(values, source_.dtype),
                           row_ * source_.columns);
      row_ = end;
    }

   private:
    const ForwardSource& source_;
    int64_t row_;
  };

  cpu::Walk pieces_;
  Forward<C> forward_;
};

// A sum over rows is taken in the chunks of the plain kernel, each from its first row to its last
// by one thread: by the one that walks its first row, which computes rows beyond its own for it.
template <typename C>
class BackwardSource : public ActivationBackwardRows {
 public:
  BackwardSource(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                 const Tensor& scales, bool need_dscales, bool need_dbias)
      : pieces_(x, spec, true),
        backward_(dy, x, spec, scales, pieces_),
        chunks_(pieces_.rows, pieces_.width * kElementCost),
        dbias_sums_(chunks_, x.size(-1), need_dbias),
        dscales_sums_(need_dscales ? pieces_.rows : 0) {
    rows = pieces_.rows;
    columns = x.size(-1);
    dtype = source_dtype(x);
    if (need_dscales) dscales = at::empty_like(scales);
    if (need_dbias) dbias = at::empty({columns}, x.options());
  }

  std::unique_ptr<RowSource::Walk> walk(int64_t first, int64_t last, bool again) override {
    return std::make_unique<Rows>(*this, first, last, again);
  }

  void write_sums() override {
    if (dbias.defined()) dbias_sums_.write_total(dbias);
    if (dscales.defined()) write_values(dscales, dscales_sums_);
  }

 private:
  class Rows : public RowSource::Walk {
   public:
    Rows(BackwardSource& source, int64_t first, int64_t last, bool again)
        : source_(source), first_(first), last_(last), row_(first) {
      if (!again && source.dscales.defined()) dscales_ = source.dscales_sums_.data();
      sums_ = !again && source.dbias.defined();
      while (chunk_ < source.chunks_.count && source.chunks_.begin(chunk_ + 1) <= first) ++chunk_;
    }

    void next(int64_t end, void* values) override {
      const Output<C> output(values, source_.dtype);
      const int64_t start = row_;
      while (row_ < end) run(std::min(end, chunk_end()), output, start, dscales_);
    }

    void finish() override {
      const int64_t end = chunk_end();
      if (!sums_ || row_ != last_ || row_ == end || !owned()) return;
      const auto buffer = make_buffer<C>(source_.columns);
      const Output<C> output(buffer.get(), c10::CppTypeToScalarType<C>::value);
      while (row_ < end) run(row_ + 1, output, row_, nullptr);
    }

   private:
    int64_t chunk_end() const { return source_.chunks_.begin(chunk_ + 1); }
    bool owned() const { return source_.chunks_.begin(chunk_) >= first_; }

    // Rows up to `end`, of one chunk.
    void run(int64_t end, const Output<C>& output, int64_t start, C* dscales) {
      const int64_t per_row = source_.pieces_.pieces_per_row;
      C* dbias = sums_ && owned() ? source_.dbias_sums_.chunk(chunk_) : nullptr;
      source_.backward_.run(row_ * per_row, end * per_row, output, start * source_.columns, dscales,
                            dbias);
      row_ = end;
      if (row_ == chunk_end() && row_ < last_) ++chunk_;
    }

    BackwardSource& source_;
    int64_t first_, last_, row_, chunk_ = 0;
    C* dscales_ = nullptr;
    bool sums_ = false;
  };

  cpu::Walk pieces_;
  Backward<C> backward_;
  RowChunks chunks_;
  ChunkSums<C> dbias_sums_;
  std::vector<C> dscales_sums_;
};

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
                                       bool need_dscales, bool need_dbias, bool over_x) {
  ActivationBackward result;
  result.dx = over_x ? x : at::empty_like(x);
  if (need_dscales) result.dscales = at::empty_like(scales);
  if (need_dbias) result.dbias = at::empty({x.size(-1)}, x.options());
  dispatch_compute(x.scalar_type(),
                   [&](auto zero) { backward_into<decltype(zero)>(result, dy, x, spec, scales); });
  return result;
}

ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x) {
  at::DimVector shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.back() /= 2;
  ActivationBackward grads;
  grads.dx = over_x ? x : at::empty_like(x);
  if (need_dbias) grads.dbias = at::empty({x.size(-1)}, x.options());
  const Tensor y = over_dy && dy.scalar_type() == x.scalar_type() ? dy.view(shape)
                                                                  : at::empty(shape, x.options());
  dispatch_compute(x.scalar_type(),
                   [&](auto zero) { backward_into<decltype(zero)>(grads, dy, x, spec, {}, y); });
  return {y, std::move(grads.dx), std::move(grads.dbias)};
}

std::unique_ptr<RowSource> activation_forward_rows(const Tensor& x, const ActivationSpec& spec,
                                                   const Tensor& scales) {
  return dispatch_compute(x.scalar_type(), [&](auto zero) -> std::unique_ptr<RowSource> {
    return std::make_unique<ForwardSource<decltype(zero)>>(x, spec, scales);
  });
}

std::unique_ptr<ActivationBackwardRows> activation_backward_rows(const Tensor& dy, const Tensor& x,
                                                                 const ActivationSpec& spec,
                                                                 const Tensor& scales,
                                                                 bool need_dscales,
                                                                 bool need_dbias) {
  return dispatch_compute(x.scalar_type(),
                          [&](auto zero) -> std::unique_ptr<ActivationBackwardRows> {
                            return std::make_unique<BackwardSource<decltype(zero)>>(
                                dy, x, spec, scales, need_dscales, need_dbias);
                          });
}

}  // namespace ligature::cpu
