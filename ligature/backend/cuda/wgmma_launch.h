// The launches of a linear layer's products with a gated activation beside it (wgmma_gemm.cuh), and
// which of them exist and pay. bfloat16, or forward FP8, on Hopper alone. No torch here.
#pragma once

#include "ligature/backend/cuda/activation_params.h"
#include "ligature/backend/cuda/types.h"

namespace ligature::cuda {

/// Forward alone: x and w are E4M3 codes with one factor each, and z is bfloat16 as before. The
/// activation is bfloat16 too, or becomes E4M3 codes.
struct GatedCodes {
  const float* x_scale = nullptr;  // codes times it are values; null: no codes
  const float* w_scale = nullptr;
  float* amax = nullptr;          // raised to the activation's largest magnitude; may be null
  const float* factor = nullptr;  // the activation times it becomes codes; null: bfloat16
  float* scale = nullptr;         // gets 1 / factor
  uint8_t* rowwise = nullptr;     // [rows, units]; may be null
  uint8_t* columnwise = nullptr;  // [units, rows]; may be null
};

/// Row-major matrices without gaps. `units`: gates, and as many linear units behind them.
///   forward    z [rows, 2 units] = x [rows, k] w [2 units, k]^T, activated [rows, units] = act(z)
///   backward   dz [rows, 2 units] = the activation's gradient at z of x [rows, k] w [k, units],
///              where x is the gradient behind; and activated = act(z) where it is wanted
struct GatedLinearArgs {
  int64_t rows = 0, units = 0, k = 0;
  const void* x = nullptr;
  const void* w = nullptr;
  const void* z = nullptr;    // backward alone
  void* out = nullptr;        // z or dz; dz may be z; of codes z may be null
  void* activated = nullptr;  // backward: null unless wanted
  ActivationParams params;
  GatedCodes codes;
};

/// Do kernels take such sizes, addresses (null: not known yet) and activation, and are they in this
/// build for the current device?
bool gated_forward_fits(const GatedLinearArgs& args);
bool gated_backward_fits(const GatedLinearArgs& args);
bool gated_codes_fit(const GatedLinearArgs& args);  // rows are a multiple of 16

enum class GatedLinear : uint8_t { Forward, ForwardCodes, Backward, BackwardBoth };

/// Alone: a block by itself; Pair: two blocks share w, the epilogue is apart; Skewed: the same with
/// an epilogue by the warps that multiply, in turns.
enum class GatedTile : uint8_t { Alone, Pair, Skewed };

struct GatedChoice {
  GatedTile tile;
  bool pays;  ///< is it faster than cuBLASLt and the activation's kernel?
};

GatedChoice choose_gated(GatedLinear what, const GatedLinearArgs& args, int sm_count);

// For args that fit. False where the driver refuses; else the launch's error is to be looked at.
bool launch_gated_forward(const GatedLinearArgs& args, int sm_count, Stream stream);
bool launch_gated_backward(const GatedLinearArgs& args, int sm_count, Stream stream);
bool launch_gated_codes(const GatedLinearArgs& args, int sm_count, Stream stream);

// Is the code in this build for the current device?
bool has_gated_forward();
bool has_gated_backward();
bool has_gated_codes();

}  // namespace ligature::cuda
