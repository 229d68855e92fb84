// Values in memory as floats in registers. T is float, __half or __nv_bfloat16; a vector of them is
// read or written in accesses of at most 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
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
/// flight. They are held as words: the compiler does not join halves of words into wide accesses,
/// and spills them one by one.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Packed {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * N;
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  union {
    Word words[kWords];
    T values[N];
  };

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (sizeof(Word) == 2) {
      return to_float(values[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const uint32_t word = words[i / 2];
      return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16)));
    } else {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
  }
};

/// Two values in a word, the first at its lower end.
template <typename T>
__device__ __forceinline__ uint32_t pair_of(float first, float second) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <typename T, int N>
__device__ __forceinline__ Packed<T, N> pack(const float (&values)[N]) {
  Packed<T, N> packed;
  if constexpr (sizeof(T) == 2 && N > 1) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) packed.words[i] = pair_of<T>(values[2 * i], values[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) packed.values[i] = from_float<T>(values[i]);
  }
  return packed;
}

/// Makes the compiler forget what it derived from the values: where they are used again much later,
/// converting them again costs less than the registers that hold the results.
template <typename T, int N>
__device__ __forceinline__ void forget(Packed<T, N>& packed) {
  if constexpr (sizeof(packed.words[0]) == 4) {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords; ++i) asm volatile("" : "+r"(packed.words[i]));
  }
}

/// `p` is aligned to the smaller of 16 bytes and N values.
template <int N, typename T>
__device__ __forceinline__ Packed<T, N> load_packed(const T* p) {
  static_assert((N & (N - 1)) == 0, "vectors are powers of two");
  Packed<T, N> packed;
  if constexpr (sizeof(packed) >= 16) {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords; i += 4) {
      const uint4 part = reinterpret_cast<const uint4*>(p)[i / 4];
      packed.words[i] = part.x;
      packed.words[i + 1] = part.y;
      packed.words[i + 2] = part.z;
      packed.words[i + 3] = part.w;
    }
  } else if constexpr (sizeof(packed) == 8) {
    const uint2 part = *reinterpret_cast<const uint2*>(p);
    packed.words[0] = part.x;
    packed.words[1] = part.y;
  } else {
    packed.words[0] = *reinterpret_cast<const typename Packed<T, N>::Word*>(p);
  }
  return packed;
}

/// To global memory, in whole accesses: left to itself the compiler may store vectors word by word.
template <int N, typename T>
__device__ __forceinline__ void store_packed(T* p, const Packed<T, N>& packed) {
  const auto& words = packed.words;
  if constexpr (sizeof(packed) >= 16) {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords; i += 4) {
      __stwb(reinterpret_cast<uint4*>(p) + i / 4,
             make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
  } else if constexpr (sizeof(packed) == 8) {
    __stwb(reinterpret_cast<uint2*>(p), make_uint2(words[0], words[1]));
  } else {
    *reinterpret_cast<typename Packed<T, N>::Word*>(p) = words[0];
  }
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
  store_packed<N>(p, pack<T>(values));
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
