// What a .cu file and the code that calls it share. No torch here: nvcc compiles what includes
// this.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace ligature::cuda {

using Stream = CUstream_st*;  // cudaStream_t

/// Types of values in memory. Kernels compute in float; double is left to ATen.
enum class Type : uint8_t { Float32, Float16, BFloat16 };

constexpr int64_t size_of(Type type) { return type == Type::Float32 ? 4 : 2; }

}  // namespace ligature::cuda
