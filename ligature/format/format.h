// A low-precision format: everything that the bits of a quantized tensor depend on besides the
// values. One plain struct serves every format, so that kernels choose by its fields.
//
// A tensor is quantized as a matrix [rows, columns] whose columns are its last dimension. Row-wise
// data has its blocks along the columns. Column-wise data is, in every format, the row-wise data of
// the transposed matrix, with its blocks along the rows.
#pragma once

#include <cstdint>
#include <string>

namespace ligature {

enum class Element : uint8_t { E4M3, E5M2, E2M1 };

enum class Scaling : uint8_t {
  Delayed,  ///< one factor per tensor, chosen from earlier steps
  Current,  ///< one factor per tensor, from its own largest value
  Block,    ///< a float factor per 1x128 or 128x128 block
  MX,       ///< a power of two per block of 32
  NV,       ///< an E4M3 factor per block of 16, and one float factor above them
};

enum class FourOverSix : uint8_t { None, MeanAbsolute, MeanSquare };

struct Format {
  Scaling scaling = Scaling::Current;
  Element element = Element::E4M3;
  bool block_2d = false;             ///< square blocks: 128x128, 32x32, 16x16
  bool power_of_2_scales = false;    ///< Current and Block
  float amax_epsilon = 0;            ///< Current and Block: the least a largest value counts as
  bool hadamard = false;             ///< NV: column-wise data is of the transformed tensor
  bool stochastic_rounding = false;  ///< NV
  bool row_scaled = false;           ///< NV: the upper factor is one per row
  FourOverSix four_over_six = FourOverSix::None;  ///< NV: how the better of two scales is found
  bool scales_to_448 = false;  ///< NV with four_over_six: block scales reach 448 instead of 256

  bool operator==(const Format&) const = default;

  bool per_tensor() const { return scaling == Scaling::Delayed || scaling == Scaling::Current; }
  /// Elements along a block; 0 for formats with one factor per tensor.
  int64_t block_size() const {
    switch (scaling) {
      case Scaling::Block:
        return 128;
      case Scaling::MX:
        return 32;
      case Scaling::NV:
        return 16;
      default:
        return 0;
    }
  }
  /// Is one orientation's data the other's, transposed? Then either can be made from the other.
  bool orientations_agree() const {
    if (hadamard) return false;
    return per_tensor() || (block_2d && !row_scaled && !stochastic_rounding);
  }
  /// NV: 6 times the largest scale of a block, by which amax is divided for the factor above.
  constexpr float nv_range() const {
    return four_over_six == FourOverSix::None || scales_to_448 ? 2688.0f : 1536.0f;
  }
  /// Why there is no such format; empty when there is.
  std::string why_not() const;
  /// As a plan shows it on an edge: "fp8 e4m3", "fp8 e4m3 1x128", "mxfp8 e4m3", "nvfp4".
  std::string name() const;
};

/// The largest value of an element type: 448, 57344, 6.
constexpr float max_value(Element element) {
  return element == Element::E4M3 ? 448.0f : element == Element::E5M2 ? 57344.0f : 6.0f;
}

const char* element_name(Element element);

}  // namespace ligature
