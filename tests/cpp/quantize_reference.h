// The formats once more, as plainly as they can be written: codes are found in a table of all
// values, and one value is looked at after the other.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "ligature/kernels/quantize.h"

namespace plain {

using ligature::Element;
using ligature::Format;
using ligature::FourOverSix;
using ligature::Scaling;
using ligature::kernels::QuantizeArgs;
using ligature::kernels::QuantizedMatrix;

inline double decode(Element element, int code) {
  const int mantissa_bits = element == Element::E4M3 ? 3 : element == Element::E5M2 ? 2 : 1;
  const int bias = element == Element::E4M3 ? 7 : element == Element::E5M2 ? 15 : 1;
  const int sign_bit = element == Element::E2M1 ? 8 : 128;
  const double sign = code & sign_bit ? -1 : 1;
  const int magnitude = code & (sign_bit - 1);
  const int exponent = magnitude >> mantissa_bits;
  const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
  if (element == Element::E4M3 && magnitude == 0x7f) return NAN;
  if (element == Element::E5M2 && magnitude > 0x7c) return NAN;
  if (element == Element::E5M2 && magnitude == 0x7c) return sign * INFINITY;
  const double one = 1 << mantissa_bits;
  if (exponent == 0) return sign * std::ldexp(mantissa / one, 1 - bias);
  return sign * std::ldexp(1 + mantissa / one, exponent - bias);
}

inline double decode_e8m0(int code) { return code == 255 ? NAN : std::ldexp(1.0, code - 127); }

inline int largest_code(Element element) {
  return element == Element::E4M3 ? 0x7e : element == Element::E5M2 ? 0x7b : 7;
}

/// The code nearest to v, of two that are as near the even one; found in the table of all.
inline uint8_t encode(Element element, float v) {
  const int sign = std::signbit(v) ? (element == Element::E2M1 ? 8 : 0x80) : 0;
  if (std::isnan(v)) return static_cast<uint8_t>(0x7f | sign);
  const double a = std::min<double>(std::fabs(v), 1e6);
  static const std::vector<std::vector<double>> tables = [] {
    std::vector<std::vector<double>> all;
    for (const Element e : {Element::E4M3, Element::E5M2, Element::E2M1}) {
      all.emplace_back();
      for (int c = 0; c <= largest_code(e); ++c) all.back().push_back(decode(e, c));
    }
    return all;
  }();
  const auto& table = tables[static_cast<int>(element)];
  const int above =
      static_cast<int>(std::lower_bound(table.begin(), table.end(), a) - table.begin());
  int best = std::min(above, static_cast<int>(table.size()) - 1);
  if (above > 0) {
    const double d = a - table[above - 1], before = std::fabs(table[best] - a);
    if (d < before || (d == before && best % 2 != 0)) best = above - 1;
  }
  return static_cast<uint8_t>(best | sign);
}

inline std::array<uint32_t, 4> philox(uint64_t counter, uint32_t stream, uint64_t seed) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), stream, 0};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
        static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return {c[0], c[1], c[2], c[3]};
}

inline uint8_t encode_stochastic(float v, uint32_t random) {
  const double a = std::min<double>(std::fabs(v), 6.0);
  int low = 0;
  while (low < 7 && decode(Element::E2M1, low + 1) <= a) ++low;
  if (low < 7) {
    const double lo = decode(Element::E2M1, low), hi = decode(Element::E2M1, low + 1);
    const double u = static_cast<double>(random >> 8) / 16777216.0;
    if (u < (a - lo) / (hi - lo)) ++low;
  }
  return static_cast<uint8_t>(low | (std::signbit(v) ? 8 : 0));
}

inline float factor(float amax, float max, const Format& format) {
  if (!std::isnan(amax)) amax = std::max(amax, format.amax_epsilon);
  if (amax == 0 || !std::isfinite(amax)) return 1;
  float s = max / amax;
  if (std::isinf(s)) s = FLT_MAX;
  if (format.power_of_2_scales) s = std::ldexp(1.0f, std::ilogb(s));
  return s;
}

inline int e8m0(float q) {
  if (q == 0) return 0;
  if (std::isinf(q)) return 254;
  for (int code = 0; code < 255; ++code) {
    if (std::ldexp(1.0, code - 127) >= q) return code;
  }
  return 254;
}

/// A matrix of floats, and its row-wise quantized form in plain vectors.
struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<float> values;

  float at(int64_t r, int64_t c) const { return values[r * columns + c]; }

  explicit Matrix(const at::Tensor& t) {
    columns = t.size(-1);
    rows = 1;
    for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
    const at::Tensor f = t.to(at::kFloat).contiguous();
    values.assign(f.const_data_ptr<float>(), f.const_data_ptr<float>() + f.numel());
  }
  Matrix(int64_t r, int64_t c) : rows(r), columns(c), values(r * c) {}

  Matrix transposed() const {
    Matrix t(columns, rows);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) t.values[c * rows + r] = at(r, c);
    }
    return t;
  }

  Matrix hadamard(bool inverse = false) const {
    static const int signs[] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
    Matrix y(rows, (columns + 15) / 16 * 16);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < y.columns; g += 16) {
        float v[16];
        for (int i = 0; i < 16; ++i) {
          v[i] = (g + i < columns ? at(r, g + i) : 0.0f) * (inverse ? 1.0f : float(signs[i]));
        }
        for (int step = 1; step < 16; step *= 2) {
          for (int i = 0; i < 16; ++i) {
            if (i & step) continue;
            const float a = v[i], b = v[i + step];
            v[i] = a + b;
            v[i + step] = a - b;
          }
        }
        for (int i = 0; i < 16; ++i) {
          y.values[r * y.columns + g + i] = v[i] * 0.25f * (inverse ? float(signs[i]) : 1.0f);
        }
      }
    }
    return y;
  }
};

struct Quantized {
  int64_t rows = 0, columns = 0;
  std::vector<uint8_t> codes;        // one per value
  std::vector<float> scales;         // float scales ...
  std::vector<uint8_t> scale_codes;  // ... or E8M0, E4M3
  std::vector<float> amax;
};

inline float amax_of(const Matrix& x, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  float amax = 0;
  for (int64_t r = r0; r < std::min(r1, x.rows); ++r) {
    for (int64_t c = c0; c < std::min(c1, x.columns); ++c) {
      if (!std::isnan(x.at(r, c))) amax = std::max(amax, std::fabs(x.at(r, c)));
    }
  }
  return amax;
}

struct NvBlock {
  uint8_t scale = 0;
  std::vector<uint8_t> codes;
  float error = 0;
};

inline NvBlock nv_block(const Matrix& x, int64_t r0, int64_t r1, int64_t c0, int64_t c1, float amax,
                        float upper, float top, const QuantizeArgs& args, uint32_t stream) {
  NvBlock b;
  b.scale = encode(Element::E4M3, amax / top / upper);
  const float scale = static_cast<float>(decode(Element::E4M3, b.scale));
  const float f = scale * upper;
  const float inverse = f == 0 ? 0 : std::min(1.0f / f, FLT_MAX);
  for (int64_t r = r0; r < r1; ++r) {
    float e[16] = {};
    for (int64_t c = c0; c < c1; ++c) {
      const float v = x.at(r, c) * inverse;
      const uint64_t i = r * x.columns + c;
      const uint8_t code =
          args.format.stochastic_rounding
              ? encode_stochastic(v, philox(args.offset + i / 4, stream, args.seed)[i % 4])
              : encode(Element::E2M1, v);
      b.codes.push_back(code);
      const float back = static_cast<float>(decode(Element::E2M1, code)) * scale * upper;
      const float d = x.at(r, c) - back;
      e[c - c0] = args.format.four_over_six == FourOverSix::MeanSquare ? d * d : std::fabs(d);
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) e[i] += e[i + half];
    }
    b.error += e[0];
  }
  return b;
}

inline void quantize_nv(Quantized& q, const Matrix& x, const QuantizeArgs& args, uint32_t stream) {
  const Format& format = args.format;
  const bool choose = format.four_over_six != FourOverSix::None;
  for (int64_t r = 0; r < (format.row_scaled ? x.rows : 1); ++r) {
    const float amax = format.row_scaled ? amax_of(x, r, r + 1, 0, x.columns)
                                         : amax_of(x, 0, x.rows, 0, x.columns);
    q.amax.push_back(std::min(amax, FLT_MAX));
  }
  if (args.reduce_amax) {
    at::Tensor t = at::tensor(q.amax);
    args.reduce_amax(t);
    q.amax.assign(t.const_data_ptr<float>(), t.const_data_ptr<float>() + t.numel());
  }
  const int64_t group = format.block_2d ? 16 : 1;
  for (int64_t r = 0; r < x.rows; r += group) {
    const float upper = std::max(
        q.amax[format.row_scaled ? r : 0] / (choose && !format.scales_to_448 ? 1536.0f : 2688.0f),
        FLT_MIN);
    for (int64_t c = 0; c < x.columns; c += 16) {
      const int64_t r1 = std::min(r + group, x.rows), c1 = std::min(c + 16, x.columns);
      bool nan = false;
      for (int64_t i = r; i < r1; ++i) {
        for (int64_t j = c; j < c1; ++j) nan = nan || std::isnan(x.at(i, j));
      }
      const float amax = amax_of(x, r, r1, c, c1);
      NvBlock b = nv_block(x, r, r1, c, c1, amax, upper, 6, args, stream);
      if (choose) {
        NvBlock other = nv_block(x, r, r1, c, c1, amax, upper, 4, args, stream);
        if (other.error < b.error) b = other;
      }
      if (nan) {
        b.scale = 0x7f;
        std::fill(b.codes.begin(), b.codes.end(), 0);
      }
      q.scale_codes.push_back(b.scale);
      for (int64_t i = r; i < r1; ++i) {
        for (int64_t j = c; j < c1; ++j) {
          q.codes[i * x.columns + j] = b.codes[(i - r) * (c1 - c) + (j - c)];
        }
      }
    }
  }
}

/// Row-wise data of x. Stream: 0 row-wise, 1 column-wise.
inline Quantized quantize(const Matrix& x, const QuantizeArgs& args, uint32_t stream) {
  const Format& format = args.format;
  Quantized q;
  q.rows = x.rows;
  q.columns = x.columns;
  q.codes.resize(x.values.size());
  if (format.scaling == Scaling::NV) {
    quantize_nv(q, x, args, stream);
    return q;
  }
  const float max = format.element == Element::E4M3 ? 448.0f : 57344.0f;
  if (format.per_tensor()) {
    float amax = amax_of(x, 0, x.rows, 0, x.columns);
    if (args.reduce_amax) {
      at::Tensor t = at::full({1}, amax, at::kFloat);
      args.reduce_amax(t);
      amax = t.item<float>();
    }
    const float s =
        format.scaling == Scaling::Delayed ? args.scale.item<float>() : factor(amax, max, format);
    for (size_t i = 0; i < x.values.size(); ++i)
      q.codes[i] = encode(format.element, x.values[i] * s);
    q.scales = {1.0f / s};
    return q;
  }
  const int64_t size = format.scaling == Scaling::Block ? 128 : 32;
  const int64_t group = format.block_2d ? size : 1;
  for (int64_t r = 0; r < x.rows; r += group) {
    for (int64_t c = 0; c < x.columns; c += size) {
      const float amax = amax_of(x, r, r + group, c, c + size);
      float s = 0;
      if (format.scaling == Scaling::Block) {
        s = factor(amax, max, format);
        q.scales.push_back(1.0f / s);
      } else {
        const int code = e8m0(amax / max);
        s = static_cast<float>(std::ldexp(1.0, 127 - code));
        q.scale_codes.push_back(static_cast<uint8_t>(code));
      }
      for (int64_t i = r; i < std::min(r + group, x.rows); ++i) {
        for (int64_t j = c; j < std::min(c + size, x.columns); ++j) {
          q.codes[i * x.columns + j] = encode(format.element, x.at(i, j) * s);
        }
      }
    }
  }
  return q;
}

/// The values of a matrix as the kernels give it, before rounding to a dtype; with `operand`
/// without the factors that expand() leaves out.
inline std::vector<float> values(const QuantizedMatrix& m, const Format& format, int64_t columns,
                                 bool operand) {
  const int64_t rows = m.data.size(0), stride = m.data.size(1), size = format.block_size();
  const uint8_t* data = m.data.const_data_ptr<uint8_t>();
  std::vector<float> out;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      if (format.scaling == Scaling::NV) {
        const int code = c % 2 == 0 ? data[r * stride + c / 2] & 15 : data[r * stride + c / 2] >> 4;
        const uint8_t scale =
            m.scale[format.block_2d ? r / 16 : r][c / 16].template item<uint8_t>();
        const float v = static_cast<float>(decode(Element::E2M1, code)) *
                        static_cast<float>(decode(Element::E4M3, scale));
        const float amax = m.amax[format.row_scaled ? r : 0].template item<float>();
        const bool to_448 = format.four_over_six == FourOverSix::None || format.scales_to_448;
        const float most = to_448 ? 2688.0f : 1536.0f;
        out.push_back(operand ? v : v * std::max(amax / most, FLT_MIN));
        continue;
      }
      const float v = static_cast<float>(decode(format.element, data[r * stride + c]));
      float scale = 1;
      if (format.per_tensor()) {
        if (!operand) scale = m.scale.item<float>();
      } else {
        const at::Tensor s = m.scale[format.block_2d ? r / size : r][c / size];
        if (format.scaling == Scaling::MX) {
          scale = static_cast<float>(decode_e8m0(s.item<uint8_t>()));
        } else if (!operand || format.power_of_2_scales) {
          scale = s.item<float>();
        }
      }
      out.push_back(v * scale);
    }
  }
  return out;
}

}  // namespace plain
