// The activations of the CPU backend as rows that are computed when they are asked for.

#include "ligature/backend/cpu/activation.h"
#include "ligature/backend/cpu/activation_pieces.h"
#include "ligature/backend/cpu/new_tensor.h"

namespace ligature::cpu {
namespace {

at::ScalarType source_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kFloat : x.scalar_type();
}

template <typename T>
class ForwardSource : public RowSource {
 public:
  ForwardSource(const Tensor& x, const ActivationSpec& spec, const Tensor& scales)
      : pieces_(x, spec, true, kPiece<T>), forward_(x, spec, scales, pieces_) {
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
      source_.forward_.run(row_ * per_row, end * per_row, Output<T>(values, source_.dtype),
                           row_ * source_.columns);
      row_ = end;
    }

   private:
    const ForwardSource& source_;
    int64_t row_;
  };

  PieceWalk pieces_;
  ForwardPieces<T> forward_;
};

// A sum over rows is taken in the chunks of the plain kernel, each from its first row to its last
// by one thread: by the one that walks its first row, which computes rows beyond its own for it.
template <typename T>
class BackwardSource : public ActivationBackwardRows {
 public:
  using C = ComputeType<T>;

  BackwardSource(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                 const Tensor& scales, bool need_dscales, bool need_dbias)
      : pieces_(x, spec, true, kPiece<T>),
        backward_(dy, x, spec, scales, pieces_),
        chunks_(pieces_.rows, pieces_.width * kElementCost),
        dbias_sums_(chunks_, x.size(-1), need_dbias),
        dscales_sums_(need_dscales ? pieces_.rows : 0) {
    rows = pieces_.rows;
    columns = x.size(-1);
    dtype = source_dtype(x);
    if (need_dscales) dscales = new_like(scales);
    if (need_dbias) dbias = new_tensor({columns}, x.scalar_type());
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
      const Output<T> output(values, source_.dtype);
      const int64_t start = row_;
      while (row_ < end) run(std::min(end, chunk_end()), output, start, dscales_);
    }

    void finish() override {
      const int64_t end = chunk_end();
      if (!sums_ || row_ != last_ || row_ == end || !owned()) return;
      const auto buffer = make_aligned_buffer<T>(source_.columns);
      const Output<T> output(buffer.get(), c10::CppTypeToScalarType<T>::value);
      while (row_ < end) run(row_ + 1, output, row_, nullptr);
    }

   private:
    int64_t chunk_end() const { return source_.chunks_.begin(chunk_ + 1); }
    bool owned() const { return source_.chunks_.begin(chunk_) >= first_; }

    // Rows up to `end`, of one chunk.
    void run(int64_t end, const Output<T>& output, int64_t start, C* dscales) {
      const int64_t per_row = source_.pieces_.pieces_per_row;
      C* dbias = sums_ && owned() ? source_.dbias_sums_.chunk(chunk_) : nullptr;
      source_.backward_.run(row_ * per_row, end * per_row, output, start * source_.columns,
                            {dscales, dbias});
      row_ = end;
      if (row_ == chunk_end() && row_ < last_) ++chunk_;
    }

    BackwardSource& source_;
    int64_t first_, last_, row_, chunk_ = 0;
    C* dscales_ = nullptr;
    bool sums_ = false;
  };

  PieceWalk pieces_;
  BackwardPieces<T> backward_;
  RowChunks chunks_;
  ChunkSums<C> dbias_sums_;
  std::vector<C> dscales_sums_;
};

}  // namespace

std::unique_ptr<RowSource> activation_forward_rows(const Tensor& x, const ActivationSpec& spec,
                                                   const Tensor& scales) {
  return dispatch_activation(
      scales.defined(),
      [&](auto zero) -> std::unique_ptr<RowSource> {
        return std::make_unique<ForwardSource<decltype(zero)>>(x, spec, scales);
      },
      x.scalar_type());
}

std::unique_ptr<ActivationBackwardRows> activation_backward_rows(const Tensor& dy, const Tensor& x,
                                                                 const ActivationSpec& spec,
                                                                 const Tensor& scales,
                                                                 bool need_dscales,
                                                                 bool need_dbias) {
  return dispatch_activation(
      scales.defined(),
      [&](auto zero) -> std::unique_ptr<ActivationBackwardRows> {
        return std::make_unique<BackwardSource<decltype(zero)>>(dy, x, spec, scales, need_dscales,
                                                                need_dbias);
      },
      x.scalar_type(), dy.scalar_type());
}

}  // namespace ligature::cpu
