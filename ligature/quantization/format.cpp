#include "ligature/quantization/format.h"

namespace ligature {

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
