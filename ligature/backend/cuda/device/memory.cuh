// Values in memory as floats in registers. T is float, __half or __nv_bfloat16; a vector of them is
// read or written in accesses of at most 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

/// How many T make 16 bytes.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// N values as they lie in memory. Reading them first and converting later keeps several loads in
/// flight.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Packed {
  T values[N];

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }
};

/// Makes the compiler forget what it derived from the values: where they are used again much later,
/// converting them again costs less than the registers that hold the results.
template <typename T, int N>
__device__ __forceinline__ void forget(Packed<T, N>& packed) {
  if constexpr (sizeof(packed) % 4 == 0) {
    auto* words = reinterpret_cast<uint32_t*>(packed.values);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(packed) / 4); ++i) {
      asm volatile("" : "+r"(words[i]));
    }
  }
}

/// `p` is aligned to the smaller of 16 bytes and N values.
template <int N, typename T>
__device__ __forceinline__ Packed<T, N> load_packed(const T* p) {
  static_assert((N & (N - 1)) == 0, "vectors are powers of two");
  return *reinterpret_cast<const Packed<T, N>*>(p);
}

/// The first `count` of N values, the rest zero; no alignment beyond T's.
template <int N, typename T>
__device__ __forceinline__ Packed<T, N> load_packed_part(const T* p, int count) {
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < N; ++i) packed.values[i] = i < count ? p[i] : from_float<T>(0.0f);
  return packed;
}

template <int N, typename T>
__device__ __forceinline__ void load(const T* p, float (&values)[N]) {
  const Packed<T, N> packed = load_packed<N>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = packed[i];
}

template <int N, typename T>
__device__ __forceinline__ void load_part(const T* p, int count, float (&values)[N]) {
  const Packed<T, N> packed = load_packed_part<N>(p, count);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = packed[i];
}

template <int N, typename T>
__device__ __forceinline__ void store(T* p, const float (&values)[N]) {
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < N; ++i) packed.values[i] = from_float<T>(values[i]);
  *reinterpret_cast<Packed<T, N>*>(p) = packed;
}

template <int N, typename T>
__device__ __forceinline__ void store_part(T* p, int count, const float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) p[i] = from_float<T>(values[i]);
  }
}

/// Calls f(T()) for the type of values that `type` names; on both sides.
#pragma nv_exec_check_disable
template <typename F>
__host__ __device__ __forceinline__ void with_type(Type type, const F& f) {
  switch (type) {
    case Type::Float32:
      return f(float());
    case Type::Float16:
      return f(__half());
    case Type::BFloat16:
      return f(__nv_bfloat16());
  }
}

/// As the forms above for a type that is known only at run time: `at` is an index, and with
/// `vectors` false, or fewer than N values, no alignment is asked for.
template <int N>
__device__ __forceinline__ void load_any(const void* p, Type type, int64_t at, int count,
                                         bool vectors, float (&values)[N]) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(p) + at;
    if (vectors && count >= N) {
      load<N>(from, values);
    } else {
      load_part<N>(from, count, values);
    }
  });
}

template <int N>
__device__ __forceinline__ void store_any(void* p, Type type, int64_t at, int count, bool vectors,
                                          const float (&values)[N]) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    T* to = static_cast<T*>(p) + at;
    if (vectors && count >= N) {
      store<N>(to, values);
    } else {
      store_part<N>(to, count, values);
    }
  });
}

/// One value of a type that is known only at run time.
__device__ __forceinline__ float load_one(const void* p, Type type, int64_t at) {
  float value = 0.0f;
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    value = to_float(static_cast<const T*>(p)[at]);
  });
  return value;
}

/// Host: can rows of `columns` values beginning at `p` be read N at a time? True for a null `p`.
template <int N>
inline bool allows_vectors(const void* p, Type type, int64_t columns) {
  const int64_t bytes = size_of(type) * N < 16 ? size_of(type) * N : 16;
  return p == nullptr ||
         (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0 && columns % N == 0);
}

}  // namespace ligature::cuda
