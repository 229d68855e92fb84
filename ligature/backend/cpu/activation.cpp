// The activations of the CPU backend over tensors in memory.
#include "ligature/backend/cpu/activation.h"

#include "ligature/backend/cpu/activation_pieces.h"
#include "ligature/backend/cpu/new_tensor.h"

namespace ligature::cpu {
namespace {

void forward_into(const Tensor& y, const Tensor& x, const ActivationSpec& spec,
                  const Tensor& scales) {
  const bool in_place = y.is_same(x);
  dispatch_activation(
      scales.defined(),
      [&](auto zero) {
        using T = decltype(zero);
        const Output<T> y_output(y, worth_streaming<T>(spec) && !in_place);
        const bool staged = !holds<T>(x) || y_output.streams();
        const PieceWalk walk(x, spec, scales.defined(), staged ? kPiece<T> : kChunkElements);
        const ForwardPieces<T> forward(x, spec, scales, walk);
        parallel_pieces(
            walk, [&](int64_t first, int64_t last) { forward.run(first, last, y_output, 0); });
      },
      x.scalar_type());
}

template <typename T>
void backward_with(const ActivationBackward& result, const Tensor& dy, const Tensor& x,
                   const ActivationSpec& spec, const Tensor& scales, const Tensor& y) {
  using C = ComputeType<T>;
  const bool has_sums = result.dscales.defined() || result.dbias.defined();
  const Output<T> dx_output(result.dx, worth_streaming<T>(spec) && !result.dx.is_same(x));
  const Output<T> y_output(y, worth_streaming<T>(spec) && y.defined() && !y.is_alias_of(dy));
  const bool staged = !holds<T>(x) || !holds<T>(dy) || result.dscales.defined() ||
                      scales.defined() || dx_output.streams() || y_output.streams();
  const PieceWalk walk(x, spec, has_sums || scales.defined(), staged ? kPiece<T> : kChunkElements);
  const BackwardPieces<T> backward(dy, x, spec, scales, walk);
  const Output<T>* again = y.defined() ? &y_output : nullptr;
  if (!has_sums) {
    parallel_pieces(walk, [&](int64_t first, int64_t last) {
      backward.run(first, last, dx_output, 0, {}, again);
    });
    return;
  }
  const RowChunks chunks(walk.rows, walk.width * kElementCost);
  ChunkSums<C> dbias(chunks, x.size(-1), result.dbias.defined());
  std::vector<C> dscales(result.dscales.defined() ? walk.rows : 0);
  C* dscales_data = result.dscales.defined() ? dscales.data() : nullptr;
  parallel_chunks(chunks, [&](int64_t chunk, int64_t first, int64_t last) {
    backward.run(first * walk.pieces_per_row, last * walk.pieces_per_row, dx_output, 0,
                 {dscales_data, dbias.chunk(chunk)}, again);
  });
  if (result.dbias.defined()) dbias.write_total(result.dbias);
  if (result.dscales.defined()) write_values(result.dscales, dscales);
}

// y, where defined, is of x's dtype.
void backward_into(const ActivationBackward& result, const Tensor& dy, const Tensor& x,
                   const ActivationSpec& spec, const Tensor& scales, const Tensor& y) {
  const bool exact = scales.defined() || (y.defined() && result.dbias.defined());
  dispatch_activation(
      exact, [&](auto zero) { backward_with<decltype(zero)>(result, dy, x, spec, scales, y); },
      x.scalar_type(), dy.scalar_type());
}

ActivationRecompute recompute(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                              const Tensor& scales, bool need_dscales, bool need_dbias,
                              bool over_dy, bool over_x) {
  at::DimVector shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.back() /= 2;
  ActivationBackward grads;
  grads.dx = over_x ? x : new_like(x);
  if (need_dscales) grads.dscales = new_like(scales);
  if (need_dbias) grads.dbias = new_tensor({x.size(-1)}, x.scalar_type());
  const Tensor y = over_dy && dy.scalar_type() == x.scalar_type()
                       ? dy.view(shape)
                       : new_tensor(shape, x.scalar_type());
  backward_into(grads, dy, x, spec, scales, y);
  return {y, std::move(grads.dx), std::move(grads.dbias), std::move(grads.dscales)};
}

}  // namespace

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  at::DimVector shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.back() /= 2;
  Tensor y = new_tensor(shape, x.scalar_type());
  forward_into(y, x, spec, scales);
  return y;
}

Tensor activation_forward_(Tensor& x, const ActivationSpec& spec) {
  forward_into(x, x, spec, {});
  return x;
}

ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x) {
  ActivationBackward result;
  result.dx = over_x ? x : new_like(x);
  if (need_dscales) result.dscales = new_like(scales);
  if (need_dbias) result.dbias = new_tensor({x.size(-1)}, x.scalar_type());
  backward_into(result, dy, x, spec, scales, {});
  return result;
}

ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x) {
  return recompute(dy, x, spec, {}, false, need_dbias, over_dy, over_x);
}

ActivationRecompute activation_recompute_scaled(const Tensor& dy, const Tensor& x,
                                                const ActivationSpec& spec, const Tensor& scales,
                                                bool need_dscales, bool over_dy, bool over_x) {
  return recompute(dy, x, spec, scales, need_dscales, false, over_dy, over_x);
}

}  // namespace ligature::cpu
