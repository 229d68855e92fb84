// Matrix products as cuBLASLt takes them: a plain description, and plans that are made once for
// each kind of product and kept. Nothing of torch's tensors is known here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

enum class GemmType : uint8_t { Float32, Float16, BFloat16, E4M3, E5M2, E2M1 };

/// How an operand's factors lie in memory, once they are arranged for cuBLASLt.
enum class ScaleMode : uint8_t {
  None,
  Tensor,     ///< one float
  Vector128,  ///< floats of 1x128 blocks, neighbouring rows beside each other
  Block128,   ///< floats of 128x128 blocks, row-major, rows filled up to a multiple of 4
  Vector32,   ///< E8M0 of 1x32 blocks, in tiles of 128x4
  Vector16,   ///< E4M3 of 1x16 blocks, in tiles of 128x4
};

enum class Epilogue : uint8_t {
  None,
  Gelu,          ///< tanh form; with `aux`: also what goes into it
  BiasGradient,  ///< `bias` [m] is an output: the sums of the rows of a
};

struct GemmOperand {
  const void* data = nullptr;
  int64_t ld = 0;           ///< elements between two rows in memory
  bool transposed = false;  ///< memory holds the transpose
  GemmType type = GemmType::Float32;
  ScaleMode scale_mode = ScaleMode::None;
  const void* scale = nullptr;  ///< on the device
};

/// d [m, n] = epilogue(alpha * a [m, k] b [k, n] + beta * c + bias [n]), all row-major. c and d
/// have one type. Sizes are positive.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  GemmOperand a, b;
  const void* c = nullptr;  ///< null where beta is 0; may be d
  int64_t ldc = 0;
  void* d = nullptr;
  int64_t ldd = 0;
  GemmType type = GemmType::Float32;
  void* bias = nullptr;
  GemmType bias_type = GemmType::Float32;
  Epilogue epilogue = Epilogue::None;
  void* aux = nullptr;
  int64_t ld_aux = 0;
  float alpha = 1.0F, beta = 0.0F;
  const float* coefficients = nullptr;  ///< on the device: alpha and beta, instead of the above
  bool tf32 = false;                    ///< float32 operands may be rounded to TF32
  bool fast_accumulation = false;       ///< FP8: sums are not moved to float32 now and then
};

/// Has cuBLASLt such a product on this device? Pointers say only how they are aligned; a null one
/// stands for memory of the allocator.
bool gemm_available(const Gemm& gemm, int device);

/// Queues it. `device` is the current one, and the stream is its current stream.
void run_gemm(const Gemm& gemm, int device, Stream stream);

/// Whether the first product of each kind tries several algorithms and keeps the fastest, which
/// waits for the device; off unless LIGATURE_GEMM_SEARCH=1 is set. Never while a graph is captured.
bool gemm_search();

}  // namespace ligature::cuda
