// Quantization against the reference of quantize_reference.h, bit for bit, for every format.
#include <gtest/gtest.h>

#include <bit>

#include "kernel_test_support.h"
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/philox.h"
#include "ligature/kernels/quantize.h"
#include "quantize_reference.h"

namespace kernels = ligature::kernels;
namespace cpu = ligature::cpu;
using at::Tensor;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;
using kernels::QuantizedPair;
using ligature::Element;
using ligature::Format;
using ligature::FourOverSix;
using ligature::Scaling;

namespace {

std::vector<Format> all_formats() {
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
  }
  return formats;
}

std::string describe(const Format& f) {
  return f.name() + (f.power_of_2_scales ? " power of 2" : "") + (f.hadamard ? " hadamard" : "") +
         (f.stochastic_rounding ? " stochastic" : "") +
         (f.four_over_six == FourOverSix::None           ? ""
          : f.four_over_six == FourOverSix::MeanAbsolute ? " 4/6 absolute"
                                                         : " 4/6 square") +
         (f.scaling == Scaling::Delayed ? " delayed" : "");
}

template <typename T>
std::vector<T> to_vector(const Tensor& t) {
  return {t.const_data_ptr<T>(), t.const_data_ptr<T>() + t.numel()};
}

std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> out;
  for (const float v : values) out.push_back(std::isnan(v) ? ~0u : std::bit_cast<uint32_t>(v));
  return out;
}

template <typename T>
void expect_equal(const std::vector<T>& got, const std::vector<T>& wanted,
                  const std::string& where) {
  ASSERT_EQ(got.size(), wanted.size()) << where;
  int shown = 0;
  for (size_t i = 0; i < got.size() && shown < 5; ++i) {
    if (got[i] == wanted[i]) continue;
    ++shown;
    ADD_FAILURE() << where << " [" << i << "]: got " << +got[i] << ", wanted " << +wanted[i];
  }
}

void expect_matrix(const QuantizedMatrix& got, const plain::Quantized& wanted, const Format& format,
                   const std::string& where) {
  std::vector<uint8_t> bytes = wanted.codes;
  if (format.element == Element::E2M1) {
    const int64_t stride = (wanted.columns + 1) / 2;
    bytes.assign(wanted.rows * stride, 0);
    for (int64_t r = 0; r < wanted.rows; ++r) {
      for (int64_t c = 0; c < wanted.columns; ++c) {
        bytes[r * stride + c / 2] |= wanted.codes[r * wanted.columns + c] << (c % 2 * 4);
      }
    }
  }
  ASSERT_EQ(got.data.size(0), wanted.rows) << where;
  expect_equal(to_vector<uint8_t>(got.data), bytes, where + " data");
  if (format.per_tensor() || format.scaling == Scaling::Block) {
    expect_equal(bits(to_vector<float>(got.scale)), bits(wanted.scales), where + " scale");
  } else {
    expect_equal(to_vector<uint8_t>(got.scale), wanted.scale_codes, where + " scale");
  }
  ASSERT_EQ(got.amax.defined(), format.scaling == Scaling::NV) << where;
  if (got.amax.defined()) {
    expect_equal(bits(to_vector<float>(got.amax)), bits(wanted.amax), where + " amax");
  }
}

QuantizeArgs args_of(const Format& format, bool rowwise = true, bool columnwise = true) {
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

void check(const Tensor& x, const Format& format, const std::string& where, bool rowwise = true,
           bool columnwise = true) {
  const QuantizeArgs args = args_of(format, rowwise, columnwise);
  const plain::Matrix matrix(x);
  const QuantizedPair got = kernels::quantize(x, args);
  ASSERT_EQ(got.rowwise.defined(), rowwise);
  ASSERT_EQ(got.columnwise.defined(), columnwise);
  if (rowwise) {
    expect_matrix(got.rowwise, plain::quantize(matrix, args, 0), format, where + " rows");
  }
  if (columnwise) {
    const plain::Matrix turned = matrix.transposed();
    expect_matrix(got.columnwise,
                  plain::quantize(format.hadamard ? turned.hadamard() : turned, args, 1), format,
                  where + " columns");
  }
  if (args.amax.defined()) {
    const float amax = plain::amax_of(matrix, 0, matrix.rows, 0, matrix.columns);
    EXPECT_EQ(args.amax.item<float>(), std::max(0.25f, amax)) << where;
  }
}

// Magnitudes from 2^-spread to 2^spread, some zeros.
Tensor spread_values(at::IntArrayRef shape, at::ScalarType dtype, double spread) {
  const Tensor x =
      at::randn(shape, at::kDouble) * at::exp2((at::rand(shape, at::kDouble) * 2 - 1) * spread);
  return at::where(at::rand(shape, at::kDouble) < 0.05, at::zeros_like(x), x).to(dtype);
}

TEST(QuantizeTest, EveryFormatEveryDtype) {
  for (const Format& format : all_formats()) {
    for (const at::ScalarType dtype : test_dtypes()) {
      torch::manual_seed(2);
      const std::string where = describe(format) + " " + c10::toString(dtype);
      check(spread_values({150, 150}, dtype, 3), format, where);
    }
  }
}

TEST(QuantizeTest, OddSizes) {
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 1}, {1, 17}, {17, 1}, {3, 5, 33}, {129, 31}, {31, 129}, {16, 128}, {7}, {260, 1030}};
  for (const Format& format : all_formats()) {
    for (const auto& shape : shapes) {
      if (shape[0] == 260 && (format.stochastic_rounding || format.element == Element::E5M2))
        continue;
      torch::manual_seed(3);
      const std::string where = describe(format) + " " + std::to_string(shape[0]);
      check(spread_values(shape, at::kBFloat16, 2), format, where, true, shape[0] % 2 == 1);
      check(spread_values(shape, at::kFloat, 2), format, where, shape[0] % 2 == 0, true);
    }
  }
}

TEST(QuantizeTest, EmptyTensors) {
  for (const Format& format : all_formats()) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0, 40}, {40, 0}, {0}}) {
      const Tensor x = at::empty(shape);
      const QuantizedPair q = kernels::quantize(x, args_of(format));
      EXPECT_EQ(q.rowwise.data.numel(), 0);
      EXPECT_EQ(q.columnwise.data.numel(), 0);
      const Tensor y = kernels::dequantize(q.rowwise, format, shape.back(), at::kFloat);
      EXPECT_EQ(y.numel(), 0);
      if (format.scaling == Scaling::Current) {
        EXPECT_EQ(q.rowwise.scale.item<float>(), 1.0f);
      }
    }
  }
}

TEST(QuantizeTest, EveryBFloat16) {
  std::vector<int16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<int16_t>(i);
  const Tensor x = at::tensor(all, at::kShort).view(at::kBFloat16).reshape({256, 256});
  for (const Format& format : all_formats()) {
    if (format.stochastic_rounding) continue;
    check(x, format, "all bfloat16 " + describe(format));
    check(x.flatten(), format, "one row of all bfloat16 " + describe(format), true, false);
  }
}

// Blocks of zeros, of NaNs, with infinities, of the largest and of the least values.
TEST(QuantizeTest, SpecialBlocks) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    torch::manual_seed(4);
    const double huge = dtype == at::kHalf ? 60000 : 3e38, tiny = dtype == at::kHalf ? 6e-8 : 1e-40;
    Tensor x = at::randn({256, 256}, at::kDouble);
    x.slice(1, 0, 128).slice(0, 0, 128).zero_();
    x.slice(1, 128, 256).slice(0, 0, 16).fill_(NAN);
    x[20][200] = INFINITY;
    x[40][201] = -INFINITY;
    x[60][210] = NAN;
    x[61][211] = -NAN;
    x.slice(0, 128, 192).mul_(huge / 8);
    x.slice(0, 192, 256).mul_(tiny);
    for (Format format : all_formats()) {
      for (const float epsilon : {0.0f, 1e-30f}) {
        format.amax_epsilon = epsilon;
        check(x.to(dtype), format, "special " + describe(format) + c10::toString(dtype));
        check(x.slice(0, 128, 256).to(dtype).contiguous(), format, "finite " + describe(format));
        check(x.slice(0, 192, 256).to(dtype).contiguous(), format, "tiny " + describe(format));
      }
    }
  }
}

TEST(QuantizeTest, CodesOfRandomFloatsEqualTorch) {
  torch::manual_seed(5);
  const Tensor raw = at::randint(-2147483648ll, 2147483647ll, {1 << 20}, at::kLong).to(at::kInt);
  Tensor v = raw.view(at::kFloat);
  v = at::cat({v, at::randn({1 << 18}) * 100, at::randn({1 << 18}) * 1e-3});
  const auto compare = [&]<Element E>(at::ScalarType dtype) {
    const float max = ligature::max_value(E);
    const Tensor wanted = v.clamp(-max, max).to(dtype).view(at::kByte);
    const auto values = to_vector<float>(v);
    std::vector<uint8_t> codes;
    for (const float value : values) codes.push_back(cpu::encode_fp8<E>(value));
    expect_equal(codes, to_vector<uint8_t>(wanted), ligature::element_name(E));
  };
  compare.operator()<Element::E4M3>(at::kFloat8_e4m3fn);
  compare.operator()<Element::E5M2>(at::kFloat8_e5m2);
}

TEST(QuantizeTest, EveryCodeDecoded) {
  for (int code = 0; code < 256; ++code) {
    const uint8_t c = static_cast<uint8_t>(code);
    const std::vector<float> got = {cpu::decode_fp8<Element::E4M3>(c),
                                    cpu::decode_fp8<Element::E5M2>(c), cpu::decode_fp4(c & 15),
                                    cpu::decode_e8m0(code)};
    const std::vector<float> wanted = {static_cast<float>(plain::decode(Element::E4M3, code)),
                                       static_cast<float>(plain::decode(Element::E5M2, code)),
                                       static_cast<float>(plain::decode(Element::E2M1, code & 15)),
                                       static_cast<float>(plain::decode_e8m0(code))};
    expect_equal(bits(got), bits(wanted), "code " + std::to_string(code));
  }
}

TEST(QuantizeTest, Philox) {
  const auto zero = cpu::philox({0, 0, 0, 0}, 0, 0);
  EXPECT_EQ(zero, (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t f = ~0u;
  EXPECT_EQ(cpu::philox({f, f, f, f}, f, f),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(cpu::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Every block has a 6, which makes all of its factors 1: nothing is cut off. The mean of n draws
// has a standard error of at most step / 2 / sqrt(n), where no step is larger than 2.
TEST(QuantizeTest, StochasticRoundingIsUnbiased) {
  const Format format{
      .scaling = Scaling::NV, .element = Element::E2M1, .stochastic_rounding = true};
  torch::manual_seed(6);
  const int64_t rows = 4096, columns = 256, n = rows / 16 * 15;
  const Tensor row = at::rand({columns}) * 12 - 6;
  Tensor x = row.expand({rows, columns}).clone();
  x.slice(0, 0, rows, 16).fill_(6);
  x.slice(1, 0, columns, 16).fill_(6);
  const QuantizedPair q = kernels::quantize(x, args_of(format));
  const Tensor by_row = kernels::dequantize(q.rowwise, format, columns, at::kFloat);
  const Tensor by_column = kernels::dequantize(q.columnwise, format, rows, at::kFloat).t();
  for (const Tensor& values : {by_row, by_column}) {
    const Tensor off = (values - x).to(at::kDouble).sum(0) / n;
    const double error = 1.0 / std::sqrt(static_cast<double>(n));
    EXPECT_LT(off.abs().max().item<double>(), 5 * error);
    EXPECT_LT(std::fabs(off.mean().item<double>()), 5 * error / 16);
    EXPECT_GT(off.abs().max().item<double>(), error / 4);
  }
  EXPECT_GT(at::ne(by_row, by_column).sum().item<int64_t>(), rows * columns / 4);
}

TEST(QuantizeTest, SharedAmax) {
  for (const Format& format :
       {Format{.scaling = Scaling::Current},
        Format{.scaling = Scaling::NV, .element = Element::E2M1},
        Format{.scaling = Scaling::NV, .element = Element::E2M1, .row_scaled = true}}) {
    torch::manual_seed(7);
    const Tensor x = at::randn({40, 50});
    QuantizeArgs args = args_of(format);
    args.reduce_amax = [](Tensor& amax) { amax.mul_(3.0f); };
    const QuantizedPair q = kernels::quantize(x, args);
    const plain::Matrix matrix(x);
    expect_matrix(q.rowwise, plain::quantize(matrix, args, 0), format, "shared");
    expect_matrix(q.columnwise, plain::quantize(matrix.transposed(), args, 1), format, "shared");
  }
}

TEST(QuantizeTest, UpdateAmax) {
  for (const at::ScalarType dtype : test_dtypes()) {
    Tensor amax = at::zeros({1});
    Tensor x = at::randn({333, 77}).to(dtype);
    x[100][50] = -100;
    x[3][4] = NAN;
    kernels::update_amax(x, amax);
    EXPECT_EQ(amax.item<float>(), 100.0f);
    kernels::update_amax(at::ones({3}).to(dtype), amax);
    EXPECT_EQ(amax.item<float>(), 100.0f);
    x[1][1] = -INFINITY;
    kernels::update_amax(x, amax);
    EXPECT_EQ(amax.item<float>(), INFINITY);
  }
}

TEST(QuantizeTest, DequantizeAndExpand) {
  for (const Format& format : all_formats()) {
    torch::manual_seed(8);
    Tensor x = spread_values({40, 150}, at::kFloat, 6);
    x[0][0] = NAN;
    x[39][149] = -INFINITY;
    const QuantizedMatrix q = kernels::quantize(x, args_of(format)).rowwise;
    for (const bool operand : {false, true}) {
      const auto values = plain::values(q, format, 150, operand);
      const Tensor wanted = at::tensor(values).reshape({40, 150});
      for (const at::ScalarType dtype : test_dtypes()) {
        if (operand && dtype != at::kFloat && dtype != at::kBFloat16) continue;
        const Tensor got = operand ? kernels::expand(q, format, 150, dtype)
                                   : kernels::dequantize(q, format, 150, dtype);
        EXPECT_EQ(got.scalar_type(), dtype);
        expect_equal(bits(to_vector<float>(got.to(at::kFloat))),
                     bits(to_vector<float>(wanted.to(dtype).to(at::kFloat))),
                     describe(format) + (operand ? " operand " : " ") + c10::toString(dtype));
      }
    }
  }
}

// Every code with scales from one end to the other.
TEST(QuantizeTest, DequantizeEveryCodeAndScale) {
  const Tensor codes = at::arange(256).to(at::kByte).repeat({256, 1});
  QuantizedMatrix mx{
      codes, at::arange(256).to(at::kByte).unsqueeze(1).expand({256, 8}).contiguous(), {}};
  QuantizedMatrix nv{codes,
                     at::arange(256).to(at::kByte).unsqueeze(1).expand({256, 32}).contiguous(),
                     at::full({1}, 3.0f)};
  const auto compare = [](const QuantizedMatrix& q, const Format& format, int64_t columns) {
    for (const bool operand : {false, true}) {
      const auto wanted = plain::values(q, format, columns, operand);
      const Tensor got = operand ? kernels::expand(q, format, columns, at::kFloat)
                                 : kernels::dequantize(q, format, columns, at::kFloat);
      expect_equal(bits(to_vector<float>(got)), bits(wanted), describe(format));
    }
  };
  for (const Element element : {Element::E4M3, Element::E5M2}) {
    compare(mx, {.scaling = Scaling::MX, .element = element}, 256);
  }
  compare(nv, {.scaling = Scaling::NV, .element = Element::E2M1}, 512);
}

TEST(QuantizeTest, TransposeIsTheOtherOrientation) {
  for (const Format& format : all_formats()) {
    torch::manual_seed(9);
    const Tensor x = spread_values({150, 277}, at::kBFloat16, 3);
    const QuantizedPair q = kernels::quantize(x, args_of(format));
    if (!format.orientations_agree()) {
      EXPECT_THROW(kernels::transpose(q.rowwise, format, 277), c10::Error);
      continue;
    }
    const QuantizedMatrix columns = kernels::transpose(q.rowwise, format, 277);
    const QuantizedMatrix rows = kernels::transpose(columns, format, 150);
    EXPECT_TRUE(columns.data.equal(q.columnwise.data)) << describe(format);
    EXPECT_TRUE(columns.scale.equal(q.columnwise.scale)) << describe(format);
    EXPECT_TRUE(rows.data.equal(q.rowwise.data)) << describe(format);
    EXPECT_TRUE(rows.scale.equal(q.rowwise.scale)) << describe(format);
    EXPECT_EQ(columns.amax.defined(), format.scaling == Scaling::NV);
  }
}

TEST(QuantizeTest, Hadamard) {
  for (const at::ScalarType dtype : test_dtypes()) {
    for (const int64_t n : {16, 40, 1600, 1}) {
      torch::manual_seed(10);
      const Tensor x = random_tensor({2, 5, n}, dtype);
      const Tensor y = kernels::hadamard(x);
      const plain::Matrix wanted = plain::Matrix(x).hadamard();
      const Tensor rounded = at::tensor(wanted.values).reshape({2, 5, wanted.columns}).to(dtype);
      EXPECT_TRUE(y.equal(rounded)) << dtype << " " << n;
      const Tensor back = kernels::hadamard(y, true);
      const Tensor undone = at::tensor(plain::Matrix(y).hadamard(true).values).to(dtype);
      EXPECT_TRUE(back.flatten().equal(undone)) << dtype << " " << n;
      EXPECT_TRUE(at::allclose(back.slice(2, 0, n).to(at::kDouble), x.to(at::kDouble),
                               dtype == at::kDouble || dtype == at::kFloat ? 1e-5 : 0.02, 0.05));
    }
  }
}

TEST(QuantizeTest, IndependentOfThreads) {
  for (const Format& format : all_formats()) {
    torch::manual_seed(11);
    const Tensor x = spread_values({300, 1300}, at::kBFloat16, 3);
    std::vector<QuantizedPair> results;
    for (const int threads : {1, 2, 5}) {
      const WithThreads with(threads);
      results.push_back(kernels::quantize(x, args_of(format)));
    }
    for (size_t i = 1; i < results.size(); ++i) {
      EXPECT_TRUE(results[i].rowwise.data.equal(results[0].rowwise.data)) << describe(format);
      EXPECT_TRUE(results[i].columnwise.data.equal(results[0].columnwise.data));
      EXPECT_TRUE(results[i].rowwise.scale.equal(results[0].rowwise.scale));
      EXPECT_TRUE(results[i].columnwise.scale.equal(results[0].columnwise.scale));
    }
  }
}

TEST(QuantizeTest, ShapesWithoutMemory) {
  for (const Format& format : all_formats()) {
    const Tensor x = at::randn({3, 7, 50});
    const QuantizeArgs args = args_of(format);
    const QuantizedPair real = kernels::quantize(x, args);
    const QuantizedPair meta = kernels::quantize(x.to(at::kMeta), args);
    const auto same = [](const Tensor& a, const Tensor& b) {
      return a.defined() == b.defined() &&
             (!a.defined() || (a.sizes() == b.sizes() && a.is_meta() && a.dtype() == b.dtype()));
    };
    for (const auto& [m, r] :
         {std::pair(meta.rowwise, real.rowwise), std::pair(meta.columnwise, real.columnwise)}) {
      EXPECT_TRUE(same(m.data, r.data) && same(m.scale, r.scale) && same(m.amax, r.amax))
          << describe(format);
    }
    const Tensor y = kernels::dequantize(meta.rowwise, format, 50, at::kBFloat16);
    EXPECT_TRUE(y.is_meta() && y.size(0) == 21 && y.size(1) == 50);
    EXPECT_TRUE(kernels::expand(meta.rowwise, format, 50, at::kBFloat16).is_meta());
    if (format.orientations_agree()) {
      EXPECT_TRUE(same(kernels::transpose(meta.rowwise, format, 50).data, real.columnwise.data));
    }
  }
  EXPECT_EQ(kernels::hadamard(at::empty({2, 30}, at::kMeta)).size(-1), 32);
}

TEST(QuantizeTest, Refusals) {
  const Tensor x = at::randn({32, 32});
  const auto refused = [&](const Format& format) {
    EXPECT_THROW(kernels::quantize(x, args_of(format)), c10::ValueError) << describe(format);
  };
  refused({.scaling = Scaling::NV, .element = Element::E4M3});
  refused({.scaling = Scaling::MX, .element = Element::E2M1});
  refused({.scaling = Scaling::MX, .hadamard = true});
  refused({.scaling = Scaling::Current, .block_2d = true});
  refused({.scaling = Scaling::NV, .element = Element::E2M1, .block_2d = true, .row_scaled = true});
  refused({.scaling = Scaling::NV, .element = Element::E2M1, .block_2d = true, .hadamard = true});
  const Format current{.scaling = Scaling::Current};
  EXPECT_THROW(kernels::quantize(x, args_of(current, false, false)), c10::ValueError);
  EXPECT_THROW(kernels::quantize(x.t().slice(0, 0, 5), args_of(current)), c10::ValueError);
  EXPECT_THROW(kernels::quantize(at::zeros({2, 2}, at::kInt), args_of(current)), c10::TypeError);
  EXPECT_THROW(kernels::quantize(at::scalar_tensor(1.0), args_of(current)), c10::ValueError);
  QuantizeArgs delayed = args_of({.scaling = Scaling::Delayed});
  delayed.scale = Tensor();
  EXPECT_THROW(kernels::quantize(x, delayed), c10::ValueError);
  const QuantizedMatrix q = kernels::quantize(x, args_of(current)).rowwise;
  EXPECT_THROW(kernels::dequantize(q, current, 31, at::kFloat), c10::ValueError);
  EXPECT_THROW(kernels::dequantize(q, {.scaling = Scaling::MX}, 32, at::kFloat), c10::Error);
  EXPECT_THROW(kernels::expand(q, current, 32, at::kHalf), c10::TypeError);
  for (const at::Device device : test_devices()) {
    if (device.is_cpu()) continue;
    EXPECT_THROW(kernels::quantize(x.to(device), args_of(current)), c10::ValueError);
  }
}

}  // namespace
