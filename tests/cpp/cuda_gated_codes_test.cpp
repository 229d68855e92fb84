// Products of FP8 operands with a gated activation behind them, which is written in FP8: the bits
// of the product, the activation and the cast one after the other; and against float64.
#include <cmath>
#include <limits>
#include <utility>

#include "cuda_test_support.h"
#include "ligature/backend/cuda/gated_linear.h"
#include "ligature/kernels/log.h"
#include "ligature/kernels/quantized_gemm.h"
#include "ligature/quantized/quantizer.h"
#include "ligature/value.h"
#include "quantize_test_support.h"

namespace cuda = ligature::cuda;
using kernels::Accumulation;
using kernels::ActivationKind;
using kernels::ActivationSpec;
using kernels::ProductArgs;
using ligature::Quantizer;
using ligature::Usage;
using ligature::Value;

namespace {

const ActivationSpec kSwiGLU{ActivationKind::SwiGLU}, kGEGLU{ActivationKind::GEGLU};
const Format kDelayed{.scaling = Scaling::Delayed}, kCurrent{.scaling = Scaling::Current};
const Usage kRows{true, false};

ProductArgs to_bfloat16() {
  ProductArgs args;
  args.dtype = at::kBFloat16;
  return args;
}

Tensor random(at::IntArrayRef shape, double scale = 1.0) {
  return (at::randn(shape, at::TensorOptions(at::kFloat).device(kGpu)) * scale).to(at::kBFloat16);
}

/// In FP8 with a factor from its own largest value.
Value codes(const Tensor& x, Format format = kCurrent) {
  return std::make_shared<Quantizer>(format)->quantize(x, kRows);
}

QuantizeArgs gpu_args(const Format& format, bool rowwise = true, bool columnwise = true) {
  QuantizeArgs args = args_of(format, rowwise, columnwise);
  if (args.scale.defined()) args.scale = args.scale.to(kGpu);
  if (args.amax.defined()) args.amax = args.amax.to(kGpu);
  return args;
}

void expect_same_matrix(const QuantizedMatrix& got, const QuantizedMatrix& wanted,
                        const std::string& where) {
  ASSERT_EQ(got.defined(), wanted.defined()) << where;
  if (!got.defined()) return;
  EXPECT_TRUE(got.data.equal(wanted.data)) << where << ": data";
  EXPECT_TRUE(got.scale.equal(wanted.scale)) << where << ": scale";
}

struct Orientations {
  bool rowwise, columnwise;
};

/// The fused kernel beside the two.
void compare(const Value& x, const Value& w, const ActivationSpec& spec, const Format& format,
             Orientations wanted, const std::string& where) {
  const QuantizeArgs to = gpu_args(format, wanted.rowwise, wanted.columnwise);
  const QuantizeArgs own = gpu_args(format, wanted.rowwise, wanted.columnwise);
  const Tensor z = kernels::quantized_linear_forward(x, w, to_bfloat16());
  const QuantizedPair a = kernels::activation_forward_quantize(z, spec, {}, to);
  const auto got = kernels::quantized_linear_gated_forward(x, w, to_bfloat16(), spec, own, true);
  EXPECT_TRUE(got.z.isnan().equal(z.isnan())) << where << " z: NaN";
  expect_same_bits(got.z.nan_to_num(), z.nan_to_num(), where + " z");
  expect_same_matrix(got.a.rowwise, a.rowwise, where + " by rows");
  expect_same_matrix(got.a.columnwise, a.columnwise, where + " by columns");
  if (to.amax.defined()) {
    EXPECT_TRUE(own.amax.equal(to.amax)) << where << ": amax";
  }
}

cuda::QuantizedOperand operand(const Value& v) {
  const ligature::QuantizedTensor& q = *v.quantized();
  return {q.rowwise(), q.format_tag(), q.rows(), q.columns()};
}

bool takes(const Value& x, const Value& w, const ActivationSpec& spec = kSwiGLU,
           const Format& to = kDelayed) {
  return cuda::takes_gated_codes(operand(x), operand(w), spec, to);
}

class CudaGatedCodes : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    if (!takes(codes(random({16, 128})), codes(random({256, 128})))) {
      GTEST_SKIP() << "no kernels for this GPU, or a build for another one";
    }
    torch::manual_seed(3);
  }
};

TEST_F(CudaGatedCodes, HasTheBitsOfTwoKernels) {
  const std::pair<int64_t, int64_t> columns[] = {{128, 128}, {640, 384}, {256, 2048}};
  for (const auto& [units, k] : columns) {
    for (const int64_t rows : {16, 112, 128, 144, 304, 4112}) {
      const Value x = codes(random({rows, k}));
      const Value w = codes(random({2 * units, k}, 1.0 / std::sqrt(static_cast<double>(k))));
      for (const ActivationSpec& spec : {kSwiGLU, kGEGLU}) {
        for (const Format& format : {kDelayed, kCurrent}) {
          for (const Orientations wanted :
               {Orientations{true, true}, {true, false}, {false, true}}) {
            compare(x, w, spec, format, wanted,
                    describe(kernels::activation_name(spec.kind), kGpu, at::kBFloat16,
                             {rows, units, k}) +
                        describe(format) + (wanted.rowwise ? " rows" : "") +
                        (wanted.columnwise ? " columns" : ""));
          }
        }
      }
    }
  }
}

TEST_F(CudaGatedCodes, IsCloseToFloat64) {
  for (const int64_t k : {128, 4096}) {
    const Value x = codes(random({272, k}));
    const Value w = codes(random({512, k}, 1.0 / std::sqrt(static_cast<double>(k))));
    const auto got = kernels::quantized_linear_gated_forward(x, w, to_bfloat16(), kSwiGLU,
                                                             gpu_args(kCurrent), true);
    const Tensor z =
        x.quantized()->dequantize(at::kDouble).mm(w.quantized()->dequantize(at::kDouble).t());
    const Tensor gates = z.narrow(1, 0, 256), linear = z.narrow(1, 256, 256);
    const Tensor a = gates * gates.sigmoid() * linear;
    const auto error = [](const Tensor& is, const Tensor& wanted) {
      return ((is.to(at::kDouble) - wanted).norm() / wanted.norm()).item<double>();
    };
    EXPECT_LT(error(got.z, z), 4e-3) << k;
    const Tensor by_rows = kernels::dequantize(got.a.rowwise, kCurrent, a.size(1), at::kFloat);
    const Tensor by_columns =
        kernels::dequantize(got.a.columnwise, kCurrent, a.size(0), at::kFloat);
    EXPECT_LT(error(by_rows, a), 4e-2) << k;
    expect_same_bits(by_columns.t().contiguous(), by_rows, "columns");
  }
}

TEST_F(CudaGatedCodes, NaNAndInfinityAreThoseOfTwoKernels) {
  Tensor x = random({144, 128});
  x[129][3] = std::numeric_limits<double>::quiet_NaN();
  x[7][0] = std::numeric_limits<double>::infinity();
  for (const Format& format : {kDelayed, kCurrent}) {
    compare(codes(x), codes(random({256, 128})), kSwiGLU, format, {true, true}, describe(format));
  }
}

TEST_F(CudaGatedCodes, KeepsTheDimensionsInFrontAndLeavesZOut) {
  const Tensor x = random({4, 8, 128});
  const Value q = codes(x), w = codes(random({256, 128}));
  const auto got = kernels::quantized_linear_gated_forward(q, w, to_bfloat16(), kSwiGLU,
                                                           gpu_args(kDelayed), true);
  EXPECT_EQ(got.z.sizes(), at::IntArrayRef({4, 8, 256}));
  for (const Format& format : {kDelayed, kCurrent}) {
    const auto with = kernels::quantized_linear_gated_forward(q, w, to_bfloat16(), kSwiGLU,
                                                              gpu_args(format), true);
    const auto without = kernels::quantized_linear_gated_forward(q, w, to_bfloat16(), kSwiGLU,
                                                                 gpu_args(format), false);
    EXPECT_FALSE(without.z.defined());
    expect_same_matrix(without.a.rowwise, with.a.rowwise, describe(format));
    expect_same_matrix(without.a.columnwise, with.a.columnwise, describe(format));
  }
}

TEST_F(CudaGatedCodes, DoesNotNoteWhatIsNotAsked) {
  QuantizeArgs to = gpu_args(kDelayed);
  to.amax = Tensor();
  const Value x = codes(random({32, 128})), w = codes(random({256, 128}));
  const auto got = kernels::quantized_linear_gated_forward(x, w, to_bfloat16(), kSwiGLU, to, true);
  const auto noted = kernels::quantized_linear_gated_forward(x, w, to_bfloat16(), kSwiGLU,
                                                             gpu_args(kDelayed), true);
  expect_same_matrix(got.a.rowwise, noted.a.rowwise, "by rows");
  expect_same_matrix(got.a.columnwise, noted.a.columnwise, "by columns");
}

TEST_F(CudaGatedCodes, MoreThanTwoToThe31Elements) {
  const LargeMemory alone;
  const int64_t rows = 70016, units = 16384, k = 128, few = 208;
  const Tensor x = random({rows, k});
  const Value w = codes(random({2 * units, k}, 0.1));
  // A factor of its own for each would differ: one that both have.
  const auto by_one = ligature::make_delayed_quantizer(Element::E4M3, 1, kGpu);
  const Value all = by_one->quantize(x, kRows);
  const Value last = by_one->quantize(x.narrow(0, rows - few, few).contiguous(), kRows);
  const auto got = kernels::quantized_linear_gated_forward(all, w, to_bfloat16(), kSwiGLU,
                                                           gpu_args(kDelayed), true);
  const auto wanted = kernels::quantized_linear_gated_forward(last, w, to_bfloat16(), kSwiGLU,
                                                              gpu_args(kDelayed), true);
  expect_same_bits(got.z.narrow(0, rows - few, few), wanted.z, "z");
  EXPECT_TRUE(got.a.rowwise.data.narrow(0, rows - few, few).equal(wanted.a.rowwise.data));
  EXPECT_TRUE(got.a.columnwise.data.narrow(1, rows - few, few).equal(wanted.a.columnwise.data));
}

TEST_F(CudaGatedCodes, TakesWhatItsKernelsRead) {
  const Value x = codes(random({32, 128})), w = codes(random({256, 128}));
  EXPECT_TRUE(takes(x, w));
  EXPECT_TRUE(takes(x, w, kGEGLU, kCurrent));
  EXPECT_FALSE(takes(x, w, {ActivationKind::ReGLU}));
  EXPECT_FALSE(takes(x, w, {.kind = ActivationKind::SwiGLU, .glu_interleave_size = 32}));
  EXPECT_FALSE(takes(x, w, kSwiGLU, {.scaling = Scaling::Block}));
  EXPECT_FALSE(takes(x, w, kSwiGLU, {.scaling = Scaling::Delayed, .element = Element::E5M2}));
  EXPECT_FALSE(takes(codes(random({24, 128})), w)) << "24 rows";
  EXPECT_FALSE(takes(codes(random({32, 64})), codes(random({256, 64})))) << "k 64";
  EXPECT_FALSE(takes(x, codes(random({128, 128})))) << "64 gates";
  EXPECT_FALSE(takes(codes(random({32, 128}), {.element = Element::E5M2}), w));
  const Value blocks = codes(random({32, 128}), {.scaling = Scaling::Block});
  EXPECT_FALSE(takes(blocks, w));
  ProductArgs split = to_bfloat16();
  split.accumulation = Accumulation::Split;
  EXPECT_FALSE(kernels::quantized_gated_pays(x, w, split, kSwiGLU, kDelayed));
  EXPECT_THROW(
      kernels::quantized_linear_gated_forward(x, w, split, kSwiGLU, gpu_args(kDelayed), true),
      c10::ValueError);
  EXPECT_THROW(kernels::quantized_linear_gated_forward(blocks, w, to_bfloat16(), kSwiGLU,
                                                       gpu_args(kDelayed), true),
               c10::ValueError);
}

TEST_F(CudaGatedCodes, RunsWhereItPays) {
  const auto runs = [](int64_t rows, int64_t k, int64_t units, Accumulation accumulation) {
    ProductArgs args = to_bfloat16();
    args.accumulation = accumulation;
    return kernels::quantized_gated_pays(codes(random({rows, k})), codes(random({2 * units, k})),
                                         args, kSwiGLU, kDelayed);
  };
  EXPECT_TRUE(runs(4096, 4096, 14336, Accumulation::Fast));
  EXPECT_TRUE(runs(2048, 1024, 2816, Accumulation::Default));
  EXPECT_FALSE(runs(4096, 4096, 14336, Accumulation::Split));
  EXPECT_FALSE(runs(256, 256, 512, Accumulation::Fast));
}

TEST_F(CudaGatedCodes, NotesItself) {
  const Value x = codes(random({16, 128})), w = codes(random({256, 128}));
  kernels::KernelLog log(at::kCUDA);
  kernels::quantized_linear_gated_forward(x, w, to_bfloat16(), kSwiGLU, gpu_args(kDelayed), true);
  bool noted = false;
  for (const auto& call : log.take()) {
    noted = noted || (call.name == "linear_gated_forward_quantize" &&
                      call.backend == "cuda, fast accumulation");
  }
  EXPECT_TRUE(noted);
}

TEST(GatedCodes, RefusesTheCPU) {
  const Tensor x = at::randn({16, 128}, at::kBFloat16), w = at::randn({256, 128}, at::kBFloat16);
  const Value xq = codes(x), wq = codes(w);
  EXPECT_FALSE(kernels::quantized_gated_pays(xq, wq, to_bfloat16(), kSwiGLU, kDelayed));
  EXPECT_THROW(kernels::quantized_linear_gated_forward(xq, wq, to_bfloat16(), kSwiGLU,
                                                       args_of(kDelayed), true),
               c10::ValueError);
}

}  // namespace
