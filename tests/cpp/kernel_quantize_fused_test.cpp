// A kernel and its cast in one give the bits of the two after each other, whatever the number of
// threads.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/kernels/norm.h"
#include "ligature/kernels/quantize.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;
using kernels::QuantizedPair;
using ligature::Element;
using ligature::Format;
using ligature::Scaling;

namespace {

constexpr int kThreads[] = {1, 2, 5};

std::vector<Format> some_formats() {
  return {{.scaling = Scaling::Delayed},
          {.scaling = Scaling::Current, .element = Element::E5M2},
          {.scaling = Scaling::Block},
          {.scaling = Scaling::Block, .block_2d = true},
          {.scaling = Scaling::MX},
          {.scaling = Scaling::NV, .element = Element::E2M1},
          {.scaling = Scaling::NV,
           .element = Element::E2M1,
           .hadamard = true,
           .stochastic_rounding = true},
          {.scaling = Scaling::NV, .element = Element::E2M1, .row_scaled = true}};
}

QuantizeArgs args_of(const Format& format, bool rowwise = true, bool columnwise = true) {
  QuantizeArgs args;
  args.format = format;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  args.seed = 99;
  if (format.scaling == Scaling::Delayed) {
    args.scale = at::full({1}, 20.0f);
    args.amax = at::zeros({1});
  }
  return args;
}

bool same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || (a.scalar_type() == b.scalar_type() && a.equal(b));
}

bool same(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  return same(a.data, b.data) && same(a.scale, b.scale) && same(a.amax, b.amax);
}

void expect_same(const QuantizedPair& got, const QuantizedPair& wanted, const QuantizeArgs& args,
                 const QuantizeArgs& wanted_args, const std::string& where) {
  EXPECT_TRUE(same(got.rowwise, wanted.rowwise)) << where << " rows";
  EXPECT_TRUE(same(got.columnwise, wanted.columnwise)) << where << " columns";
  EXPECT_TRUE(same(args.amax, wanted_args.amax)) << where << " amax";
}

// Runs check(x's shape, dtype, format, rowwise, columnwise, where) for each number of threads.
template <typename F>
void for_each_case(int64_t columns, const F& check) {
  for (const Format& format : some_formats()) {
    for (const int threads : kThreads) {
      const WithThreads with(threads);
      const std::string name = format.name() + " " + std::to_string(threads) + " threads ";
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        const std::string where = name + c10::toString(dtype);
        torch::manual_seed(1);
        check(std::vector<int64_t>{3, 50, columns}, dtype, format, true, true, where);
      }
      check(std::vector<int64_t>{1, columns}, at::kBFloat16, format, true, true, name);
      check(std::vector<int64_t>{777, columns}, at::kBFloat16, format, true, false, name);
      check(std::vector<int64_t>{777, columns}, at::kBFloat16, format, false, true, name);
      check(std::vector<int64_t>{0, columns}, at::kBFloat16, format, true, true, name);
    }
  }
}

TEST(QuantizeFusedTest, Norms) {
  for_each_case(130, [](const std::vector<int64_t>& shape, at::ScalarType dtype,
                        const Format& format, bool rowwise, bool columnwise,
                        const std::string& where) {
    const Tensor x = random_tensor(shape, dtype), w = random_tensor({130}, at::kFloat),
                 b = random_tensor({130}, at::kFloat);
    for (const auto out_dtype : {dtype, at::kBFloat16}) {
      const QuantizeArgs args = args_of(format, rowwise, columnwise);
      const QuantizeArgs again = args_of(format, rowwise, columnwise);
      const auto got = kernels::layer_norm_forward_quantize(x, w, b, 1e-5, true, out_dtype, args);
      const auto wanted = kernels::layer_norm_forward(x, w, b, 1e-5, true, out_dtype);
      expect_same(got.y, kernels::quantize(wanted.y, again), args, again, where + " layer");
      EXPECT_TRUE(same(got.mean, wanted.mean) && same(got.rstd, wanted.rstd)) << where;

      const QuantizeArgs rms_args = args_of(format, rowwise, columnwise);
      const QuantizeArgs rms_again = args_of(format, rowwise, columnwise);
      const auto rms = kernels::rms_norm_forward_quantize(x, w, 1e-5, false, out_dtype, rms_args);
      const auto plain = kernels::rms_norm_forward(x, w, 1e-5, false, out_dtype);
      expect_same(rms.y, kernels::quantize(plain.y, rms_again), rms_args, rms_again,
                  where + " rms");
      EXPECT_TRUE(!rms.mean.defined() && same(rms.rstd, plain.rstd)) << where;
    }
  });
}

TEST(QuantizeFusedTest, NormOverSeveralDimensions) {
  const Tensor x = random_tensor({40, 4, 6}, at::kBFloat16), w = random_tensor({4, 6}, at::kFloat);
  for (const Format& format : some_formats()) {
    const QuantizeArgs args = args_of(format), again = args_of(format);
    const auto got = kernels::rms_norm_forward_quantize(x, w, 1e-5, false, at::kBFloat16, args);
    const auto wanted = kernels::rms_norm_forward(x, w, 1e-5, false, at::kBFloat16);
    expect_same(got.y, kernels::quantize(wanted.y, again), args, again, format.name());
    EXPECT_TRUE(same(got.rstd, wanted.rstd));
  }
}

void check_activation(const Tensor& x, const ActivationSpec& spec, bool scaled,
                      const Format& format, bool rowwise, bool columnwise,
                      const std::string& where) {
  const Tensor scales =
      scaled ? random_tensor(x.sizes().slice(0, x.dim() - 1), at::kFloat) : Tensor();
  const QuantizeArgs args = args_of(format, rowwise, columnwise);
  const QuantizeArgs again = args_of(format, rowwise, columnwise);
  const Tensor y = kernels::activation_forward(x, spec, scales);
  expect_same(kernels::activation_forward_quantize(x, spec, scales, args),
              kernels::quantize(y, again), args, again, where + " y");
  const Tensor dy = random_tensor(y.sizes(), x.scalar_type());
  for (const bool sums : {false, true}) {
    const QuantizeArgs dx_args = args_of(format, rowwise, columnwise);
    const QuantizeArgs dx_again = args_of(format, rowwise, columnwise);
    const auto got =
        kernels::activation_backward_quantize(dy, x, spec, scales, scaled && sums, sums, dx_args);
    const auto wanted = kernels::activation_backward(dy, x, spec, scales, scaled && sums, sums);
    expect_same(got.dx, kernels::quantize(wanted.dx, dx_again), dx_args, dx_again, where + " dx");
    EXPECT_TRUE(same(got.dscales, wanted.dscales)) << where << " dscales";
    EXPECT_TRUE(same(got.dbias, wanted.dbias)) << where << " dbias";
  }
}

TEST(QuantizeFusedTest, Activations) {
  for_each_case(
      134, [](const std::vector<int64_t>& shape, at::ScalarType dtype, const Format& format,
              bool rowwise, bool columnwise, const std::string& where) {
        const Tensor x = random_tensor(shape, dtype);
        check_activation(x, {ActivationKind::GELU}, false, format, rowwise, columnwise, where);
        check_activation(x, {ActivationKind::SwiGLU}, true, format, rowwise, columnwise, where);
      });
}

TEST(QuantizeFusedTest, EveryActivation) {
  const Format format{.scaling = Scaling::MX};
  for (const ActivationKind kind : kernels::kActivationKinds) {
    ActivationSpec spec{kind};
    const std::string where = kernels::activation_name(spec.kind);
    for (const int64_t columns : {2, 70, 1066}) {
      torch::manual_seed(2);
      const Tensor x = random_tensor({301, columns}, at::kBFloat16);
      check_activation(x, spec, false, format, true, true, where);
      check_activation(x, spec, true, format, true, true, where);
      if (!kernels::is_gated(spec.kind)) continue;
      ActivationSpec interleaved = spec;
      interleaved.glu_interleave_size = columns == 1066 ? 13 : 1;
      check_activation(x, interleaved, true, format, true, true, where + " interleaved");
    }
  }
}

TEST(QuantizeFusedTest, ShapesWithoutMemory) {
  const Tensor x = at::empty({8, 64}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16));
  const Tensor w = at::empty({64}, at::kMeta);
  const QuantizeArgs args = args_of({.scaling = Scaling::MX});
  const auto norm = kernels::layer_norm_forward_quantize(x, w, w, 1e-5, false, at::kBFloat16, args);
  EXPECT_TRUE(norm.y.rowwise.data.is_meta() && norm.mean.is_meta() && norm.rstd.is_meta());
  const ActivationSpec spec{ActivationKind::SwiGLU};
  const auto y = kernels::activation_forward_quantize(x, spec, {}, args);
  EXPECT_EQ(y.columnwise.data.sizes(), at::IntArrayRef({32, 8}));
  const auto g =
      kernels::activation_backward_quantize(y.rowwise.data, x, spec, {}, false, true, args);
  EXPECT_EQ(g.dx.rowwise.data.sizes(), at::IntArrayRef({8, 64}));
  EXPECT_EQ(g.dbias.sizes(), at::IntArrayRef({64}));
}

TEST(QuantizeFusedTest, Refusals) {
  const QuantizeArgs args = args_of({.scaling = Scaling::MX});
  const Tensor x = at::randn({4, 6});
  EXPECT_THROW(kernels::rms_norm_forward_quantize(x, at::ones({5}), 1e-5, false, at::kFloat, args),
               c10::ValueError);
  EXPECT_THROW(
      kernels::activation_forward_quantize(at::randn({4, 5}), {ActivationKind::GLU}, {}, args),
      c10::ValueError);
  EXPECT_THROW(kernels::activation_backward_quantize(at::randn({3, 6}), x, {ActivationKind::GELU},
                                                     {}, false, false, args),
               c10::ValueError);
  const QuantizeArgs wrong = args_of({.scaling = Scaling::MX, .element = Element::E2M1});
  EXPECT_THROW(kernels::activation_forward_quantize(x, {ActivationKind::GELU}, {}, wrong),
               c10::ValueError);
}

}  // namespace
