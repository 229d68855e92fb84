#include "ligature/format/format.h"

#include <sstream>

namespace ligature {
namespace {

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class Enum>
std::string no_enumerator(const char* field, Enum value) {
  return joined("a format's ", field, " must be one of its enumerators, got number ",
                static_cast<int>(value));
}

}  // namespace

std::string Format::why_not() const {
  // A user may have cast any number.
  if (scaling > Scaling::NV) return no_enumerator("scaling", scaling);
  if (element > Element::E2M1) return no_enumerator("element", element);
  if (four_over_six > FourOverSix::MeanSquare) return no_enumerator("four_over_six", four_over_six);
  if (!(amax_epsilon >= 0)) return joined("amax_epsilon must be zero or more, got ", amax_epsilon);
  const bool nv = scaling == Scaling::NV;
  if (nv != (element == Element::E2M1)) {
    return joined("wanted E2M1 elements for NVFP4 and E4M3 or E5M2 for the other formats, got ",
                  element_name(element), " for ", name());
  }
  const bool only_nv =
      hadamard || stochastic_rounding || row_scaled || four_over_six != FourOverSix::None;
  if (only_nv && !nv) {
    return joined("wanted NVFP4 for a Hadamard transform, stochastic rounding, factors by row or ",
                  "four over six, got ", name());
  }
  if (scales_to_448 && four_over_six == FourOverSix::None) {
    return joined("wanted four over six for scales_to_448, got ", name());
  }
  if (block_2d && per_tensor()) {
    return joined("wanted a format of blocks for square blocks, got ", name());
  }
  if (block_2d && row_scaled) return "wanted square blocks or factors by row, got both";
  if (block_2d && hadamard) return "wanted square blocks or a Hadamard transform, got both";
  return "";
}

const char* element_name(Element element) {
  return element == Element::E4M3 ? "e4m3" : element == Element::E5M2 ? "e5m2" : "e2m1";
}

std::string Format::name() const {
  const std::string size = std::to_string(block_size());
  const std::string block = (block_2d ? size : "1") + "x" + size;
  switch (scaling) {
    case Scaling::Delayed:
    case Scaling::Current:
      return std::string("fp8 ") + element_name(element);
    case Scaling::Block:
      return std::string("fp8 ") + element_name(element) + " " + block;
    case Scaling::MX:
      return std::string("mxfp8 ") + element_name(element) + (block_2d ? " " + block : "");
    case Scaling::NV:
      return std::string("nvfp4") + (block_2d ? " " + block : "") + (row_scaled ? " by row" : "");
  }
  return "unknown format";
}

}  // namespace ligature
