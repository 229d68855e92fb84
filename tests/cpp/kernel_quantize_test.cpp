// Quantization against the reference of quantize_reference.h, bit for bit, for every format.
#include "ligature/config.h"
#include "quantize_reference.h"
#include "quantize_test_support.h"

namespace {

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
      {1, 1}, {1, 17}, {17, 1}, {3, 5, 33}, {129, 31}, {31, 129}, {16, 128}, {7}, {130, 700}};
  for (const Format& format : all_formats()) {
    for (const auto& shape : shapes) {
      if (shape[0] == 130 && format.element == Element::E5M2) continue;
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
    Tensor x = at::randn({256, 160}, at::kDouble);
    x.slice(1, 0, 128).slice(0, 0, 128).zero_();
    x.slice(1, 128, 160).slice(0, 0, 16).fill_(NAN);
    x[20][140] = INFINITY;
    x[40][141] = -INFINITY;
    x[60][150] = NAN;
    x[61][151] = -NAN;
    x.slice(0, 128, 192).mul_(huge / 8);
    x.slice(0, 192, 256).mul_(tiny);
    for (Format format : all_formats()) {
      if (format.stochastic_rounding && dtype == at::kHalf) continue;
      const std::string where = describe(format) + " " + c10::toString(dtype);
      check(x.to(dtype), format, "special " + where);
      if (dtype == at::kHalf) continue;
      check(x.slice(0, 128, 256).to(dtype).contiguous(), format, "finite " + where);
      check(x.slice(0, 192, 256).to(dtype).contiguous(), format, "tiny " + where);
      if (format.scaling != Scaling::Current && format.scaling != Scaling::Block) continue;
      format.amax_epsilon = 1e-30f;
      check(x.to(dtype), format, "special with epsilon " + where);
    }
  }
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

// A GPU lays scales of 1x128 out column after column; a tensor that comes from there keeps them so.
TEST(QuantizeTest, ScalesInColumns) {
  const Tensor x = at::randn({50, 300}) * at::exp(at::randn({50, 1}));
  for (const bool square : {false, true}) {
    const Format format{.scaling = Scaling::Block, .block_2d = square};
    const QuantizedMatrix q = kernels::quantize(x, args_of(format)).rowwise;
    QuantizedMatrix turned = q;
    turned.scale = q.scale.t().contiguous().t();
    ASSERT_EQ(turned.scale.is_contiguous(), q.scale.size(0) == 1);
    EXPECT_TRUE(kernels::dequantize(turned, format, 300, at::kFloat)
                    .equal(kernels::dequantize(q, format, 300, at::kFloat)));
    EXPECT_TRUE(kernels::expand(turned, format, 300, at::kFloat)
                    .equal(kernels::expand(q, format, 300, at::kFloat)));
    if (!square) continue;
    EXPECT_TRUE(kernels::transpose(turned, format, 300)
                    .scale.equal(kernels::transpose(q, format, 300).scale));
  }
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
    if (device.is_cpu() || ligature::config().cuda.built) continue;
    EXPECT_THROW(kernels::quantize(x.to(device), args_of(current)), c10::ValueError);
  }
}

}  // namespace
