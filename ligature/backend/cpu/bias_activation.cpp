// A bias and an activation over tensors in memory, piece by piece: the sum is in the nearest cache
// when the activation reads it.
#include "ligature/backend/cpu/bias_activation.h"

#include "ligature/backend/cpu/activation_pieces.h"
#include "ligature/backend/cpu/bias_rows.h"
#include "ligature/backend/cpu/new_tensor.h"

namespace ligature::cpu {
namespace {

using at::Tensor;

// z is rounded to T between the sum and the activation, as if it had been stored.
template <typename T>
void forward_into(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& b,
                  const ActivationSpec& spec) {
  using C = ComputeType<T>;
  const auto b_buffer = make_aligned_buffer<C>(b.numel());
  const C* bias = Input<C>(b).read(0, b.numel(), b_buffer.get());
  const Input<T> x_input(x);
  const Output<T> y_output(y, worth_streaming<T>(spec)), z_output(z, true);
  const PieceWalk walk(x, spec, true, kPiece<T>);
  const auto forward = activation_loops<T>(spec.kind).forward;
  const int64_t x_width = walk.width * (walk.gated ? 2 : 1);
  parallel_pieces(walk, [&](int64_t first, int64_t last) {
    alignas(kBufferAlignment) T z_buffer[2][kPiece<T>];
    alignas(kBufferAlignment) T sorted_buffer[2][kSortedPiece];
    alignas(kBufferAlignment) T y_buffer[kPiece<T>];
    for (int64_t i = first; i < last; ++i) {
      const Piece p = walk.piece(i);
      const int64_t spans = walk.gated && !walk.sorted ? 2 : 1, n = walk.sorted ? 2 * p.n : p.n;
      const T* parts[2] = {nullptr, nullptr};
      for (int64_t k = 0; k < spans; ++k) {
        const int64_t at = p.a + k * walk.block;
        T* part = z_output.defined() ? z_output.place(at, z_buffer[k]) : z_buffer[k];
        add_bias(x_input.read(at, n, z_buffer[k]), bias + (at - p.row * x_width), part, n);
        if (z_output.defined()) z_output.write(at, n, part);
        parts[k] = part;
      }
      if (walk.sorted) {
        sort_blocks(parts[0], walk.block, p.n, sorted_buffer[0], sorted_buffer[1]);
        parts[0] = sorted_buffer[0];
        parts[1] = sorted_buffer[1];
      }
      T* result = y_output.place(p.y, y_buffer);
      forward(spec, parts[0], parts[1], result, p.n);
      y_output.write(p.y, p.n, result);
    }
  });
}

}  // namespace

kernels::BiasActivation bias_activation_forward(const Tensor& x, const Tensor& b,
                                                const ActivationSpec& spec, bool need_z) {
  at::DimVector shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.back() /= 2;
  kernels::BiasActivation result{new_tensor(shape, x.scalar_type()),
                                 need_z ? new_like(x) : Tensor()};
  dispatch_elements(
      [&](auto zero) { forward_into<decltype(zero)>(result.y, result.z, x, b, spec); },
      x.scalar_type());
  return result;
}

}  // namespace ligature::cpu
