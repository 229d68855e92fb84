// Rows in pieces of N values: whole vectors of 16 bytes where sizes and addresses allow it, else
// single values, which lie side by side across the threads all the same. Either way a piece is in
// its row or not; none ends within it.
#pragma once

#include "ligature/backend/cuda/device/memory.cuh"

namespace ligature::cuda {

/// The name of a type of values.
template <typename T>
constexpr Type kTypeOf = Type::Float32;
template <>
constexpr Type kTypeOf<__half> = Type::Float16;
template <>
constexpr Type kTypeOf<__nv_bfloat16> = Type::BFloat16;

/// The piece at `at`, zeros beyond the row.
template <int N, typename T>
__device__ __forceinline__ Packed<T, N> read_piece(const T* row, int64_t at, int64_t columns) {
  if (at < columns) return load_packed<N>(row + at);
  return Packed<T, N>{};
}

/// A piece of a parameter of any type, `fallback` without one; quickest where its type is T. `at`
/// is in the row.
template <typename T, int N>
__device__ __forceinline__ void read_parameter(const void* w, Type type, int64_t at, float fallback,
                                               float (&values)[N]) {
  if (w == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = fallback;
  } else if (type == kTypeOf<T>) {
    load<N>(static_cast<const T*>(w) + at, values);
  } else {
    load_any<N>(w, type, at, N, true, values);
  }
}

}  // namespace ligature::cuda
