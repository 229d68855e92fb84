// The torch side of the norms: memory and launches. Where dy or add is not of x's dtype, all are
// made float32; the kernels read one type.
#include "ligature/backend/cuda/norm.h"

#include <ATen/ops/clone.h>

#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/norm_launch.h"
#include "ligature/backend/cuda/sums_launch.h"

namespace ligature::cuda {
namespace {

struct Kind {
  bool centered, averaged;
};
constexpr Kind kLayerNorm{true, true}, kRMSNorm{false, true}, kL2Norm{false, false};

Tensor make_statistic(const Tensor& x, int64_t rows) {
  return small_on({rows}, at::kFloat, x.device());
}

NormForwardArgs forward_args(const Tensor& x, int64_t columns, Kind kind, const Tensor& mean,
                             const Tensor& rstd) {
  NormForwardArgs args;
  args.rows = columns > 0 ? x.numel() / columns : 0;
  args.columns = columns;
  args.x = x.const_data_ptr();
  args.x_type = type_of(x);
  args.mean = mean.defined() ? static_cast<float*>(mean.data_ptr()) : nullptr;
  args.rstd = static_cast<float*>(rstd.data_ptr());
  args.centered = kind.centered;
  args.averaged = kind.averaged;
  return args;
}

/// A parameter that begins at a whole vector, as the kernels read it.
Tensor in_vectors(const Tensor& w) {
  return reinterpret_cast<uintptr_t>(data_of(w)) % 16 == 0 ? w : w.clone();
}

/// y, with the statistics found or, where `given`, read.
Tensor run_forward(NormForwardArgs args, const Tensor& x, const Tensor& w, const Tensor& b,
                   bool zero_centered, at::ScalarType out_dtype, const char* name) {
  const at::ScalarType x_dtype = x.scalar_type();
  const bool same =
      (!w.defined() || w.scalar_type() == x_dtype) && (!b.defined() || b.scalar_type() == x_dtype);
  const at::ScalarType w_dtype = same ? x_dtype : at::kFloat;
  const at::ScalarType y_dtype =
      x_dtype == at::kFloat ? served(out_dtype) : (out_dtype == x_dtype ? x_dtype : at::kFloat);
  const Tensor weight = in_vectors(cast(w, w_dtype)), bias = in_vectors(cast(b, w_dtype));
  Tensor y = empty_on(x.sizes(), y_dtype, x.device());
  args.y = y.mutable_data_ptr();
  args.y_type = type_of(y_dtype);
  args.zero_centered = zero_centered;
  args.w = data_of(weight);
  args.b = data_of(bias);
  args.w_type = type_of(w_dtype);
  launch<&launch_norm_forward>(name, stream_of(x), args);
  return cast(y, out_dtype);
}

NormForward forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                    bool zero_centered, int64_t columns, Kind kind, at::ScalarType out_dtype,
                    const char* name) {
  const DeviceGuard guard(x.device());
  const int64_t rows = columns > 0 ? x.numel() / columns : 0;
  NormForward result;
  if (kind.centered) result.mean = make_statistic(x, rows);
  result.rstd = make_statistic(x, rows);
  NormForwardArgs args = forward_args(x, columns, kind, result.mean, result.rstd);
  args.eps = static_cast<float>(eps);
  result.y = run_forward(args, x, w, b, zero_centered, out_dtype, name);
  return result;
}

Tensor apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
             const Tensor& b, bool zero_centered, Kind kind, at::ScalarType out_dtype,
             const char* name) {
  const DeviceGuard guard(x.device());
  NormForwardArgs args = forward_args(x, w.numel(), kind, mean, rstd);
  args.given = true;
  return run_forward(args, x, w, b, zero_centered, out_dtype, name);
}

struct Needs {
  bool dx, dw, db;
};

/// Per-block sums of dw and db, and where their total goes.
struct WeightGrads {
  Tensor partials, dw, db;
  int64_t blocks, columns;

  WeightGrads(const Tensor& w, Needs needs, int64_t blocks_, int64_t columns_)
      : blocks(blocks_), columns(columns_) {
    const int64_t count = (needs.dw ? 1 : 0) + (needs.db ? 1 : 0);
    if (count == 0) return;
    partials = small_on({count, blocks, columns}, at::kFloat, w.device());
    const at::ScalarType dtype = served(w.scalar_type());
    if (needs.dw) dw = empty_on(w.sizes(), dtype, w.device());
    if (needs.db) db = empty_on(w.sizes(), dtype, w.device());
  }

  float* dw_partials() const { return dw.defined() ? start() : nullptr; }
  float* db_partials() const {
    return db.defined() ? start() + (dw.defined() ? blocks * columns : 0) : nullptr;
  }

  void sum(NormBackward& result, const Tensor& w, Stream stream, const char* name) const {
    if (!partials.defined()) return;
    PartialSums of_dw{dw_partials(), mutable_data_of(dw)},
        of_db{db_partials(), mutable_data_of(db)};
    of_dw.type = of_db.type = type_of(served(w.scalar_type()));
    launch<&launch_sum_partials>(name, stream, of_dw, of_db, blocks, columns);
    result.dw = cast(dw, w.scalar_type());
    result.db = cast(db, w.scalar_type());
  }

 private:
  float* start() const { return static_cast<float*>(partials.data_ptr()); }
};

NormBackward backward(const Tensor& dy_, const Tensor& x_, const Tensor& mean, const Tensor& rstd,
                      const Tensor& w_, bool zero_centered, const Tensor& add_, int64_t columns,
                      Kind kind, Needs needs, const char* name) {
  const DeviceGuard guard(x_.device());
  const bool same = dy_.scalar_type() == x_.scalar_type() &&
                    (!add_.defined() || add_.scalar_type() == x_.scalar_type());
  const auto as_read = [same](const Tensor& t) { return same ? t : cast(t, at::kFloat); };
  const Tensor dy = as_read(dy_), x = as_read(x_), add = as_read(add_), w = serve(w_);
  const Stream stream = stream_of(x);
  NormBackward result;
  if (needs.dx) result.dx = empty_as(x_);

  NormBackwardArgs args;
  args.rows = columns > 0 ? x.numel() / columns : 0;
  args.columns = columns;
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.add = data_of(add);
  args.w = data_of(w);
  args.mean = static_cast<const float*>(data_of(mean));
  args.rstd = static_cast<const float*>(rstd.const_data_ptr());
  args.dx = mutable_data_of(result.dx);
  args.x_type = type_of(x);
  args.dx_type = type_of(x_);
  if (w.defined()) args.w_type = type_of(w);
  args.zero_centered = zero_centered;
  args.centered = kind.centered;
  args.averaged = kind.averaged;
  const int64_t blocks = norm_backward_blocks(args.rows, columns, args.x_type, sm_count(x));
  const WeightGrads grads(w_.defined() ? w_ : x_, needs, blocks, columns);
  args.dw_partials = grads.dw_partials();
  args.db_partials = grads.db_partials();
  launch<&launch_norm_backward>(name, stream, args, blocks);
  grads.sum(result, w_, stream, name);
  return result;
}

}  // namespace

NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                               bool zero_centered_gamma, at::ScalarType out_dtype) {
  return forward(x, w, b, eps, zero_centered_gamma, w.numel(), kLayerNorm, out_dtype,
                 "layer_norm_forward");
}

NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                             at::ScalarType out_dtype) {
  return forward(x, w, {}, eps, zero_centered_gamma, w.numel(), kRMSNorm, out_dtype,
                 "rms_norm_forward");
}

NormForward norm_statistics(const Tensor& x, int64_t columns, double eps, bool centered) {
  const DeviceGuard guard(x.device());
  const int64_t rows = columns > 0 ? x.numel() / columns : 0;
  NormForward result;
  if (centered) result.mean = make_statistic(x, rows);
  result.rstd = make_statistic(x, rows);
  NormForwardArgs args =
      forward_args(x, columns, centered ? kLayerNorm : kRMSNorm, result.mean, result.rstd);
  args.eps = static_cast<float>(eps);
  launch<&launch_norm_forward>("norm_statistics", stream_of(x), args);
  return result;
}

Tensor layer_norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                        const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype) {
  return apply(x, mean, rstd, w, b, zero_centered_gamma, kLayerNorm, out_dtype, "layer_norm_apply");
}

Tensor rms_norm_apply(const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool zero_centered_gamma, at::ScalarType out_dtype) {
  return apply(x, {}, rstd, w, {}, zero_centered_gamma, kRMSNorm, out_dtype, "rms_norm_apply");
}

NormBackward layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& w, bool zero_centered_gamma,
                                 const Tensor& add, bool need_dx, bool need_dw, bool need_db) {
  return backward(dy, x, mean, rstd, w, zero_centered_gamma, add, w.numel(), kLayerNorm,
                  {need_dx, need_dw, need_db}, "layer_norm_backward");
}

NormBackward rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                               const Tensor& w, bool zero_centered_gamma, const Tensor& add,
                               bool need_dx, bool need_dw) {
  return backward(dy, x, {}, rstd, w, zero_centered_gamma, add, w.numel(), kRMSNorm,
                  {need_dx, need_dw, false}, "rms_norm_backward");
}

L2Forward l2_normalization_forward(const Tensor& x, double eps) {
  NormForward result = forward(x, {}, {}, eps, false, x.size(-1), kL2Norm, x.scalar_type(),
                               "l2_normalization_forward");
  return {std::move(result.y), std::move(result.rstd)};
}

Tensor l2_normalization_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd) {
  return backward(dy, x, {}, rstd, {}, false, {}, x.size(-1), kL2Norm, {true, false, false},
                  "l2_normalization_backward")
      .dx;
}

}  // namespace ligature::cuda
