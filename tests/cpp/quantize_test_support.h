// What the tests of low precision share: every format there is, values, and comparisons by bits.
#pragma once

#include <gtest/gtest.h>

#include <bit>

#include "kernel_test_support.h"
#include "ligature/kernels/quantize.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;
using kernels::QuantizedPair;
using ligature::Element;
using ligature::Format;
using ligature::FourOverSix;
using ligature::Scaling;

inline std::vector<Format> all_formats() {
  std::vector<Format> formats;
  for (const Element element : {Element::E4M3, Element::E5M2}) {
    formats.push_back({.scaling = Scaling::Delayed, .element = element});
    for (const bool power_of_2 : {false, true}) {
      formats.push_back(
          {.scaling = Scaling::Current, .element = element, .power_of_2_scales = power_of_2});
      for (const bool square : {false, true}) {
        formats.push_back({.scaling = Scaling::Block,
                           .element = element,
                           .block_2d = square,
                           .power_of_2_scales = power_of_2});
      }
    }
    formats.push_back({.scaling = Scaling::Block, .element = element, .amax_epsilon = 1.5f});
    for (const bool square : {false, true}) {
      formats.push_back({.scaling = Scaling::MX, .element = element, .block_2d = square});
    }
  }
  for (const FourOverSix choice :
       {FourOverSix::None, FourOverSix::MeanAbsolute, FourOverSix::MeanSquare}) {
    for (const bool stochastic : {false, true}) {
      const auto nv = [&](bool square, bool hadamard, bool row_scaled) {
        formats.push_back({.scaling = Scaling::NV,
                           .element = Element::E2M1,
                           .block_2d = square,
                           .hadamard = hadamard,
                           .stochastic_rounding = stochastic,
                           .row_scaled = row_scaled,
                           .four_over_six = choice});
      };
      nv(false, false, false);
      nv(true, false, false);
      nv(false, true, false);
      nv(false, false, true);
      nv(false, true, true);
    }
    if (choice == FourOverSix::None) continue;
    for (const bool square : {false, true}) {
      formats.push_back({.scaling = Scaling::NV,
                         .element = Element::E2M1,
                         .block_2d = square,
                         .four_over_six = choice,
                         .scales_to_448 = true});
    }
  }
  return formats;
}

inline std::string describe(const Format& f) {
  return f.name() + (f.power_of_2_scales ? " power of 2" : "") + (f.hadamard ? " hadamard" : "") +
         (f.stochastic_rounding ? " stochastic" : "") +
         (f.four_over_six == FourOverSix::None           ? ""
          : f.four_over_six == FourOverSix::MeanAbsolute ? " 4/6 absolute"
                                                         : " 4/6 square") +
         (f.scales_to_448 ? " to 448" : "") + (f.scaling == Scaling::Delayed ? " delayed" : "");
}

template <typename T>
std::vector<T> to_vector(const Tensor& t) {
  return {t.const_data_ptr<T>(), t.const_data_ptr<T>() + t.numel()};
}

inline std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> out;
  for (const float v : values) out.push_back(std::isnan(v) ? ~0u : std::bit_cast<uint32_t>(v));
  return out;
}

template <typename T>
inline void expect_equal(const std::vector<T>& got, const std::vector<T>& wanted,
                         const std::string& where) {
  ASSERT_EQ(got.size(), wanted.size()) << where;
  int shown = 0;
  for (size_t i = 0; i < got.size() && shown < 5; ++i) {
    if (got[i] == wanted[i]) continue;
    ++shown;
    ADD_FAILURE() << where << " [" << i << "]: got " << +got[i] << ", wanted " << +wanted[i];
  }
}

inline QuantizeArgs args_of(const Format& format, bool rowwise = true, bool columnwise = true) {
  QuantizeArgs args;
  args.format = format;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  if (format.scaling == Scaling::Delayed) {
    args.scale = at::full({1}, 37.5f, at::kFloat);
    args.amax = at::full({1}, 0.25f, at::kFloat);
  }
  args.seed = 0x123456789abcdefull;
  args.offset = 0xfffffff0ull;  // the counter's upper half comes into play
  return args;
}

// Magnitudes from 2^-spread to 2^spread, some zeros.
inline Tensor spread_values(at::IntArrayRef shape, at::ScalarType dtype, double spread) {
  const WithThreads one(1);
  const Tensor x =
      at::randn(shape, at::kDouble) * at::exp2((at::rand(shape, at::kDouble) * 2 - 1) * spread);
  return at::where(at::rand(shape, at::kDouble) < 0.05, at::zeros_like(x), x).to(dtype);
}
