// The elements and scales one by one, and what is made from quantized data again.
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/philox.h"
#include "quantize_reference.h"
#include "quantize_test_support.h"

namespace cpu = ligature::cpu;

namespace {

TEST(DequantizeTest, CodesOfRandomFloatsEqualTorch) {
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

TEST(DequantizeTest, EveryCodeDecoded) {
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

TEST(DequantizeTest, Philox) {
  const auto zero = cpu::philox({0, 0, 0, 0}, 0, 0);
  EXPECT_EQ(zero, (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t f = ~0u;
  EXPECT_EQ(cpu::philox({f, f, f, f}, f, f),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(cpu::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(DequantizeTest, DequantizeAndExpand) {
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
TEST(DequantizeTest, DequantizeEveryCodeAndScale) {
  const Tensor codes = at::arange(256).to(at::kByte).repeat({256, 1});
  QuantizedMatrix mx{
      codes, at::arange(256).to(at::kByte).unsqueeze(1).expand({256, 8}).contiguous(), {}};
  QuantizedMatrix nv{codes,
                     at::arange(256).to(at::kByte).unsqueeze(1).expand({256, 32}).contiguous(),
                     at::full({1}, 5.0f)};
  const auto compare = [](const QuantizedMatrix& q, const Format& format, int64_t columns) {
    for (const bool operand : {false, true}) {
      const Tensor wanted = at::tensor(plain::values(q, format, columns, operand));
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const Tensor got = operand ? kernels::expand(q, format, columns, dtype)
                                   : kernels::dequantize(q, format, columns, dtype);
        expect_equal(bits(to_vector<float>(got.to(at::kFloat))),
                     bits(to_vector<float>(wanted.to(dtype).to(at::kFloat))), describe(format));
      }
    }
  };
  for (const Element element : {Element::E4M3, Element::E5M2}) {
    compare(mx, {.scaling = Scaling::MX, .element = element}, 256);
    QuantizedMatrix finite = mx;
    finite.data = at::where((codes & 0x7f) >= (element == Element::E4M3 ? 0x7f : 0x7c),
                            at::zeros_like(codes), codes);
    compare(finite, {.scaling = Scaling::MX, .element = element}, 256);
  }
  compare(nv, {.scaling = Scaling::NV, .element = Element::E2M1}, 512);
}

TEST(DequantizeTest, TransposeIsTheOtherOrientation) {
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

TEST(DequantizeTest, Hadamard) {
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

}  // namespace
