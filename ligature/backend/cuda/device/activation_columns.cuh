// The columns of x that belong to N neighbouring columns of an activation's y. Gates and linear
// units lie in blocks, the two halves of a row or, interleaved, more and shorter ones; N divides
// their length.
#pragma once

#include "ligature/backend/cuda/device/activation.cuh"
#include "ligature/backend/cuda/device/columns.cuh"

namespace ligature::cuda {

template <bool Gated, int N>
struct ActivationColumns {
  int64_t width;  // of a row of x
  int64_t block;
  int64_t a_at;  // the gates' first column, or the only one; linear units are `block` further on

  __device__ __forceinline__ ActivationColumns(int64_t columns, int64_t interleave, int64_t column)
      : width(Gated ? 2 * columns : columns),
        block(interleave > 0 ? interleave : columns),
        a_at(column) {
    if (Gated && interleave > 0) a_at = column / block * 2 * block + column % block;
  }

  template <typename T>
  __device__ __forceinline__ void read(const T* x, int64_t row, Packed<T, N>& a,
                                       Packed<T, N>& b) const {
    const T* from = x + row * width + a_at;
    a = load_packed<N>(from);
    if constexpr (Gated) b = load_packed<N>(from + block);
  }

  template <typename T>
  __device__ __forceinline__ void write(T* dx, int64_t row, const float (&a)[N],
                                        const float (&b)[N]) const {
    T* to = dx + row * width + a_at;
    store<N>(to, a);
    if constexpr (Gated) store<N>(to + block, b);
  }
};

/// The factors of the rows first, first + step, ..., of those before `end`; 1 without any. Read for
/// all at once: their type is looked at only once.
template <int Rows>
__device__ __forceinline__ void read_scales(const void* scales, Type type, int64_t first,
                                            int64_t step, int64_t end, float (&values)[Rows]) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) values[r] = 1.0f;
  if (scales == nullptr) return;
  with_type(type, [&](auto zero) {
    using S = decltype(zero);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const int64_t row = first + r * step;
      if (row < end) values[r] = to_float(static_cast<const S*>(scales)[row]);
    }
  });
}

/// Where rows mean nothing: vectors of a whole tensor, of which the last may be a part of one.
constexpr int kActivationThreads = 256;

template <int N, typename T>
__device__ __forceinline__ Packed<T, N> read_flat(const T* p, int64_t at, int64_t count) {
  if (count - at >= N) return load_packed<N>(p + at);
  return load_packed_part<N>(p + at, static_cast<int>(count - at));
}

template <int N, typename T>
__device__ __forceinline__ void write_flat(T* p, int64_t at, int64_t count,
                                           const float (&values)[N]) {
  if (count - at >= N) return store<N>(p + at, values);
  store_part<N>(p + at, static_cast<int>(count - at), values);
}

/// Host: one thread for `piece` values.
inline unsigned int flat_blocks(int64_t count, int piece) {
  const int64_t of_block = int64_t{kActivationThreads} * piece;
  return static_cast<unsigned int>((count + of_block - 1) / of_block);
}

/// Host: does all begin at whole vectors? A null does.
inline bool flat_vectors(const void* x, const void* y, const void* dx) {
  const auto begins = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return begins(x) && begins(y) && begins(dx);
}

/// Host: how many gates may be read at once, 16 bytes of them or one. `y` and `dx` may be null.
inline int activation_piece(bool gated, Type type, const void* x, const void* y, const void* dx,
                            int64_t columns, int64_t interleave) {
  const int vector = static_cast<int>(16 / size_of(type));
  const int64_t block = gated && interleave > 0 ? interleave : columns;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return block % vector == 0 && columns % vector == 0 && aligned(x) && aligned(y) && aligned(dx)
             ? vector
             : 1;
}

/// Calls f(functor) with the kind's own where pieces are vectors, else with the family's.
template <bool Gated, typename F>
inline void with_family(Activation kind, bool vectors, const F& f) {
  if (!vectors) return f(AnyActivation<Gated>());
  with_activation(kind, [&](auto functor) {
    if constexpr (decltype(functor)::gated == Gated) f(functor);
  });
}

}  // namespace ligature::cuda
