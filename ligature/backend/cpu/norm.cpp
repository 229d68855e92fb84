// The norms of the CPU backend: rows in parallel, each read once from memory and then from cache.
// Parameters are turned into gamma and beta of the compute type once per call.
#include "ligature/backend/cpu/norm.h"

#include <utility>

#include "ligature/backend/cpu/fetch.h"
#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/norm_rows.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

// `n` values: those of w plus `offset`, or just `offset` where w is absent.
template <typename C>
AlignedBuffer<C> make_parameter(const Tensor& w, C offset, int64_t n) {
  auto values = make_aligned_buffer<C>(n);
  if (!w.defined()) {
    std::fill_n(values.get(), n, offset);
    return values;
  }
  const C* source = Input<C>(w).read(0, n, values.get());
  for (int64_t i = 0; i < n; ++i) values[i] = source[i] + offset;
  return values;
}

template <typename C>
AlignedBuffer<C> make_gamma(const Tensor& w, bool zero_centered, int64_t n) {
  return make_parameter<C>(w, w.defined() && !zero_centered ? C(0) : C(1), n);
}

Tensor make_statistic(const Tensor& x, int64_t rows) {
  return new_tensor({rows}, compute_dtype(x.scalar_type()));
}

// Calls f(at, n) for the parts of a row: the whole, or what is written past the caches at a time.
template <typename T, typename F>
void for_each_part(const Output<T>& output, int64_t n, const F& f) {
  if (!output.streams()) return f(0, n);
  for (int64_t at = 0; at < n; at += kStreamPart<T>) f(at, std::min(kStreamPart<T>, n - at));
}

// Gives rows of y from those of x.
template <typename T>
class Normalizer {
 public:
  using C = ComputeType<T>;

  Normalizer(const Tensor& x, const Tensor& w, const Tensor& b, bool zero_centered, int64_t n)
      : n_(n),
        gamma_(make_gamma<C>(w, zero_centered, n)),
        beta_(b.defined() ? make_parameter<C>(b, C(0), n) : nullptr),
        input_(x) {}

  /// Into `output` at `at`, from the statistics that statistics_of(row, x_row) gives. `buffer`: two
  /// rows.
  template <typename StatisticsOf>
  void row(int64_t row, const StatisticsOf& statistics_of, const Output<T>& output, int64_t at,
           T* buffer) const {
    const T* x_row = input_.read(row * n_, n_, buffer);
    const RowStatistics<C> s = statistics_of(row, x_row);
    for_each_part(output, n_, [&](int64_t from, int64_t n) {
      T* y_row = output.place(at + from, buffer + n_);
      const C* beta = beta_ ? beta_.get() + from : nullptr;
      normalize_row<C>(x_row + from, s, gamma_.get() + from, beta, y_row, n);
      if (output.streams() && sizeof(T) >= kFetchedSize) fetch_lines(x_row, n_ + from, n);
      output.write(at + from, n, y_row);
    });
  }

 private:
  int64_t n_;
  AlignedBuffer<C> gamma_, beta_;
  Input<T> input_;
};

// Writes y for each row from the statistics that statistics_of(row, x_row) gives.
template <typename T, typename StatisticsOf>
Tensor normalize(const Tensor& x, const Tensor& w, const Tensor& b, bool zero_centered, int64_t n,
                 at::ScalarType out_dtype, const StatisticsOf& statistics_of) {
  Tensor y = new_tensor(x.sizes(), out_dtype);
  const int64_t rows = n > 0 ? x.numel() / n : 0;
  const Normalizer<T> normalizer(x, w, b, zero_centered, n);
  const Output<T> output(y, true);
  parallel_chunks(RowChunks(rows, n), [&](int64_t, int64_t first, int64_t last) {
    const auto buffer = make_aligned_buffer<T>(2 * n);
    for (int64_t row = first; row < last; ++row) {
      normalizer.row(row, statistics_of, output, row * n, buffer.get());
    }
  });
  return y;
}

// Where the statistics of a forward go.
template <typename C>
struct StatisticsOutput {
  C* mean;  // null unless centered
  C* rstd;

  StatisticsOutput(const Tensor& mean_tensor, const Tensor& rstd_tensor)
      : mean(mean_tensor.defined() ? mean_tensor.mutable_data_ptr<C>() : nullptr),
        rstd(rstd_tensor.mutable_data_ptr<C>()) {}

  template <typename T>
  RowStatistics<C> find(int64_t row, const T* x_row, int64_t n, NormKind kind, C eps) const {
    const RowStatistics<C> s = row_statistics<C>(x_row, n, kind, eps);
    if (mean != nullptr) mean[row] = s.mean;
    rstd[row] = s.rstd;
    return s;
  }

  RowStatistics<C> found(int64_t row) const {
    return {mean != nullptr ? mean[row] : C(0), rstd[row]};
  }
};

NormForward norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                         bool zero_centered, int64_t n, NormKind kind, at::ScalarType out_dtype) {
  const int64_t rows = n > 0 ? x.numel() / n : 0;
  NormForward result;
  if (kind.centered) result.mean = make_statistic(x, rows);
  result.rstd = make_statistic(x, rows);
  dispatch_elements(
      [&](auto zero) {
        using T = decltype(zero);
        using C = ComputeType<T>;
        const StatisticsOutput<C> statistics(result.mean, result.rstd);
        const auto statistics_of = [&](int64_t row, const T* x_row) {
          return statistics.find(row, x_row, n, kind, static_cast<C>(eps));
        };
        result.y = normalize<T>(x, w, b, zero_centered, n, out_dtype, statistics_of);
      },
      x.scalar_type(), out_dtype);
  return result;
}

template <typename T>
class NormSource : public RowSource {
 public:
  using C = ComputeType<T>;

  NormSource(const Tensor& x, const Tensor& w, const Tensor& b, double eps, bool zero_centered,
             NormKind kind, at::ScalarType out_dtype, const Tensor& mean, const Tensor& rstd)
      : normalizer_(x, w, b, zero_centered, w.numel()),
        statistics_(mean, rstd),
        kind_(kind),
        eps_(static_cast<C>(eps)) {
    columns = w.numel();
    rows = x.numel() / columns;
    dtype = out_dtype == at::kDouble ? at::kFloat : out_dtype;
  }

  std::unique_ptr<Walk> walk(int64_t first, int64_t, bool again) override {
    return std::make_unique<Rows>(*this, first, again);
  }

 private:
  class Rows : public Walk {
   public:
    Rows(const NormSource& source, int64_t first, bool again)
        : source_(source),
          row_(first),
          again_(again),
          buffer_(make_aligned_buffer<T>(2 * source.columns)) {}

    void next(int64_t end, void* values) override {
      const int64_t n = source_.columns;
      const Output<T> output(values, source_.dtype);
      const auto statistics_of = [&](int64_t row, const T* x_row) {
        if (again_) return source_.statistics_.found(row);
        return source_.statistics_.find(row, x_row, n, source_.kind_, source_.eps_);
      };
      for (int64_t at = 0; row_ < end; ++row_, at += n) {
        source_.normalizer_.row(row_, statistics_of, output, at, buffer_.get());
      }
    }

   private:
    const NormSource& source_;
    int64_t row_;
    bool again_;
    AlignedBuffer<T> buffer_;
  };

  Normalizer<T> normalizer_;
  StatisticsOutput<C> statistics_;
  NormKind kind_;
  C eps_;
};

NormRows norm_rows(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                   bool zero_centered, NormKind kind, at::ScalarType out_dtype) {
  const int64_t rows = x.numel() / w.numel();
  NormRows result;
  if (kind.centered) result.mean = make_statistic(x, rows);
  result.rstd = make_statistic(x, rows);
  dispatch_elements(
      [&](auto zero) {
        result.y = std::make_unique<NormSource<decltype(zero)>>(
            x, w, b, eps, zero_centered, kind, out_dtype, result.mean, result.rstd);
      },
      x.scalar_type(), out_dtype);
  return result;
}

Tensor norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                  const Tensor& b, bool zero_centered, at::ScalarType out_dtype) {
  return dispatch_elements(
      [&](auto zero) {
        using T = decltype(zero);
        using C = ComputeType<T>;
        const C* means = mean.defined() ? mean.const_data_ptr<C>() : nullptr;
        const C* rstds = rstd.const_data_ptr<C>();
        const auto statistics_of = [&](int64_t row, const T*) {
          return RowStatistics<C>{means != nullptr ? means[row] : C(0), rstds[row]};
        };
        return normalize<T>(x, w, b, zero_centered, w.numel(), out_dtype, statistics_of);
      },
      x.scalar_type(), out_dtype);
}

struct Needs {
  bool dx, dw, db;
};

template <typename T>
void backward_into(const NormBackward& result, const Tensor& dy, const Tensor& x,
                   const Tensor& mean, const Tensor& rstd, const Tensor& w, bool zero_centered,
                   const Tensor& add, int64_t n, NormKind kind) {
  using C = ComputeType<T>;
  const auto gamma = make_gamma<C>(w, zero_centered, n);
  const C* means = mean.defined() ? mean.const_data_ptr<C>() : nullptr;
  const C* rstds = rstd.const_data_ptr<C>();
  const Input<T> dy_input(dy), x_input(x), add_input(add);
  const Output<T> dx_output(result.dx, true);
  const RowChunks chunks(n > 0 ? x.numel() / n : 0, n, kSumChunkElements);
  ChunkSums<C> dw_sums(chunks, n, result.dw.defined()), db_sums(chunks, n, result.db.defined());
  parallel_chunks(chunks, [&](int64_t chunk, int64_t first, int64_t last) {
    const auto buffer = make_aligned_buffer<T>(4 * n);
    C* const dw = dw_sums.chunk(chunk);
    C* const db = db_sums.chunk(chunk);
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * n;
      const T* dy_row = dy_input.read(at, n, buffer.get());
      const T* x_row = x_input.read(at, n, buffer.get() + n);
      const RowStatistics<C> s{means != nullptr ? means[row] : C(0), rstds[row]};
      const bool in_one_pass = dx_output.defined() && dw != nullptr;
      if (!in_one_pass && dw != nullptr) add_row_weight_grad<C>(dy_row, x_row, s, dw, n);
      if (!in_one_pass && db != nullptr) accumulate<C>(dy_row, db, n);
      if (!dx_output.defined()) continue;
      const T* addend = add_input.defined() ? add_input.read(at, n, buffer.get() + 2 * n) : nullptr;
      const RowGradient<C> gradient = row_gradient<C>(dy_row, x_row, s, gamma.get(), kind, n);
      for_each_part(dx_output, n, [&](int64_t from, int64_t part) {
        T* dx_row = dx_output.place(at + from, buffer.get() + 3 * n);
        const RowPart<C, T> row_part{dy_row + from,
                                     x_row + from,
                                     gamma.get() + from,
                                     addend != nullptr ? addend + from : nullptr,
                                     dx_row,
                                     in_one_pass ? dw + from : nullptr,
                                     in_one_pass && db != nullptr ? db + from : nullptr};
        backward_part(gradient, row_part, part);
        dx_output.write(at + from, part, dx_row);
      });
    }
  });
  dw_sums.write_total(result.dw);
  db_sums.write_total(result.db);
}

NormBackward norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                           const Tensor& rstd, const Tensor& w, bool zero_centered,
                           const Tensor& add, int64_t n, NormKind kind, Needs needs) {
  NormBackward result;
  if (needs.dx) result.dx = new_like(x);
  if (needs.dw) result.dw = new_like(w);
  if (needs.db) result.db = new_like(w);
  dispatch_elements(
      [&](auto zero) {
        backward_into<decltype(zero)>(result, dy, x, mean, rstd, w, zero_centered, add, n, kind);
      },
      x.scalar_type(), dy.scalar_type(), add.defined() ? add.scalar_type() : x.scalar_type());
  return result;
}

}  // namespace

NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                               bool zero_centered_gamma, at::ScalarType out_dtype) {
  return norm_forward(x, w, b, eps, zero_centered_gamma, w.numel(), kLayerNorm, out_dtype);
}

NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                             at::ScalarType out_dtype) {
  return norm_forward(x, w, {}, eps, zero_centered_gamma, w.numel(), kRMSNorm, out_dtype);
}

NormRows layer_norm_rows(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                         bool zero_centered_gamma, at::ScalarType out_dtype) {
  return norm_rows(x, w, b, eps, zero_centered_gamma, kLayerNorm, out_dtype);
}

NormRows rms_norm_rows(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                       at::ScalarType out_dtype) {
  return norm_rows(x, w, {}, eps, zero_centered_gamma, kRMSNorm, out_dtype);
}

Tensor layer_norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                        const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype) {
  return norm_apply(x, mean, rstd, w, b, zero_centered_gamma, out_dtype);
}

Tensor rms_norm_apply(const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool zero_centered_gamma, at::ScalarType out_dtype) {
  return norm_apply(x, {}, rstd, w, {}, zero_centered_gamma, out_dtype);
}

NormBackward layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& w, bool zero_centered_gamma,
                                 const Tensor& add, bool need_dx, bool need_dw, bool need_db) {
  return norm_backward(dy, x, mean, rstd, w, zero_centered_gamma, add, w.numel(), kLayerNorm,
                       {need_dx, need_dw, need_db});
}

NormBackward rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                               const Tensor& w, bool zero_centered_gamma, const Tensor& add,
                               bool need_dx, bool need_dw) {
  return norm_backward(dy, x, {}, rstd, w, zero_centered_gamma, add, w.numel(), kRMSNorm,
                       {need_dx, need_dw, false});
}

L2Forward l2_normalization_forward(const Tensor& x, double eps) {
  auto result = norm_forward(x, {}, {}, eps, false, x.size(-1), kL2Norm, x.scalar_type());
  return {std::move(result.y), std::move(result.rstd)};
}

Tensor l2_normalization_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd) {
  return norm_backward(dy, x, {}, rstd, {}, false, {}, x.size(-1), kL2Norm, {true, false, false})
      .dx;
}

}  // namespace ligature::cpu
