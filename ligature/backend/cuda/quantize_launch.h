// Launches of the kernels of low precision. No torch here: quantize.cpp allocates and calls.
//
// Every kernel takes a matrix in tiles of 128x128 (device/tile.cuh). Where one factor of the whole
// tensor must be known first, a kernel is launched twice with the same arguments: with `find_amax`
// it raises the largest magnitudes, which have to be zero before, and then it writes.
#pragma once

#include "ligature/backend/cuda/activation_params.h"
#include "ligature/backend/cuda/random_state.h"
#include "ligature/backend/cuda/types.h"
#include "ligature/format/format.h"

namespace ligature::cuda {

/// One orientation of a result: the matrix that its data is, and where.
struct QuantizeOutput {
  uint8_t* data = nullptr;  ///< null: not wanted
  void* scale = nullptr;
  float* amax = nullptr;  ///< NV
  int64_t rows = 0, columns = 0;
  int64_t stride = 0, scale_stride = 0;  ///< from a row to the next
  int64_t scale_step = 1;                ///< from a block to the next along a row
  bool vectors = false;                  ///< whole parts of a row are stored at once
};

struct QuantizePlan {
  Format format;
  int64_t rows = 0, columns = 0;
  QuantizeOutput rowwise, columnwise;
  const float* factor = nullptr;  ///< Delayed
  float* amax = nullptr;          ///< Delayed: raised; Current: raised, then used
  /// Current, above 0: what the amax becomes, instead of the largest value of the elements; then
  /// only finite values count.
  float fit_to = 0;
  uint64_t seed = 0, offset = 0;
  RandomState generator;  ///< of a graph that is captured, instead of the seed: `seed_at` is set
  bool find_amax = false;
  uint32_t tiles_across = 1;  ///< set by the launch
};

void launch_quantize(const void* x, Type type, const QuantizePlan& plan, Stream stream);

/// The sources below take rows that can be read 16 bytes at a time, of float16 or bfloat16, and
/// formats other than NV.
struct NormSource {
  const void* x;
  const float* mean;  ///< null for RMSNorm
  const float* rstd;
  const void* w;
  const void* b;  ///< may be null
  Type w_type, b_type;
  bool zero_centered_gamma;
};
/// Up to 65535 * 128 rows; MX without square blocks.
void launch_quantize_norm(const NormSource& source, Type type, const QuantizePlan& plan,
                          Stream stream);

/// Gates in the first half of a row and linear units in the second where the activation is gated.
struct ActivationSource {
  Activation kind;
  ActivationParams params;
  const void* dy;  ///< backward
  const void* x;
  const void* scales;  ///< per row; may be null
  Type scales_type;
  float* dbias;    ///< backward: [tiles down, columns of x], sums over a tile's rows; may be null
  float* dscales;  ///< backward: [rows, tiles across], sums over a tile's units; may be null
};
void launch_quantize_activation(const ActivationSource& source, Type type, const QuantizePlan& plan,
                                Stream stream);
/// The plan's matrix is dx; of a gated activation each half of its rows is a multiple of 128.
void launch_quantize_activation_backward(const ActivationSource& source, Type type,
                                         const QuantizePlan& plan, Stream stream);

/// What an infinity counts as in a largest magnitude.
enum class Infinity : uint8_t { Infinite, Largest, Nothing };
/// Raises amax[0] to the largest magnitude of n values, without NaN.
void launch_amax(const void* x, Type type, int64_t n, float* amax, Stream stream,
                 Infinity infinity = Infinity::Infinite);
/// The same of n FP8 codes times *scale.
void launch_code_amax(const uint8_t* codes, int64_t n, Element element, const float* scale,
                      float* amax, Stream stream);

struct DecodePlan {
  Format format;
  const uint8_t* data;
  const void* scale;
  const float* amax;
  int64_t rows, columns, scale_stride, scale_step;
  bool operand;  ///< without the factors that a matrix product takes by itself
};
void launch_decode(const DecodePlan& plan, void* out, Type out_type, Stream stream);

/// Codes of a matrix [rows, columns] turned on their side; two to a byte where `fp4`.
void launch_transpose_codes(const uint8_t* data, int64_t rows, int64_t columns, bool fp4,
                            uint8_t* out, Stream stream);

/// Rows of `columns` values, filled up with zeros to a multiple of 16.
void launch_hadamard(const void* x, Type type, int64_t rows, int64_t columns, bool inverse,
                     void* out, Stream stream);

/// What delayed scaling has of one tensor; see DelayedScale.
struct DelayedEntry {
  float* history;
  float* amax;
  const float* scale;  ///< as it was
  float* updated;      ///< the new one; may be the same memory
  const float* noted;  ///< where it is below 0 nothing changes; may be null
  int32_t length;
  float max_value;
};
constexpr int kDelayedEntries = 80;
struct DelayedUpdate {
  DelayedEntry entries[kDelayedEntries];
  float divisor;     ///< 2^margin
  bool most_recent;  ///< else the largest of the history
};
/// Moves each amax into its history and chooses the factor anew, all in one kernel.
void launch_delayed_update(const DelayedUpdate& update, int count, Stream stream);

}  // namespace ligature::cuda
