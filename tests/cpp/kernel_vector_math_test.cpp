// The transcendental functions of the CPU kernels against float64, over the whole range of float:
// as the loops of the kernels compute them on this processor, and as every processor can.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ligature/backend/cpu/vector_math.h"

namespace cpu = ligature::cpu;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// From here on exp is infinite, and a sigmoid 0, which is wrong by no more than this.
constexpr double kInfiniteFrom = 88.3763;
constexpr double kZeroBelow = 4.3e-39;

struct Exp {
  LIGATURE_INLINE static float of(float x) { return cpu::bounded_exp(x); }
  static double wanted(double x) {
    return x > kInfiniteFrom ? kInfinity : std::exp(std::fmax(x, -87.0));
  }
};

struct Sigmoid {
  LIGATURE_INLINE static float of(float x) { return cpu::sigmoid(x); }
  static double wanted(double x) { return 1.0 / (1.0 + std::exp(-x)); }
};

struct Tanh {
  LIGATURE_INLINE static float of(float x) { return cpu::tanh(x); }
  static double wanted(double x) { return std::tanh(x); }
};

template <typename F>
LIGATURE_SIMD void on_this_processor(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = F::of(x[i]);
}

template <typename F>
void on_every_processor(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = F::of(x[i]);
}

// Every exponent with both signs, subnormal numbers among them.
std::vector<float> many_values() {
  std::vector<float> values{0.0f, -0.0f, 87.0f, -87.0f, 0.625f, -0.625f};
  for (uint32_t bits = 1; bits < 0x7f800000u; bits += 2003) {
    const float value = std::bit_cast<float>(bits);
    values.push_back(value);
    values.push_back(-value);
  }
  return values;
}

// How many floats away from the nearest one to `wanted`.
int64_t distance(float got, double wanted) {
  const auto place = [](float value) {
    const int32_t bits = std::bit_cast<int32_t>(value);
    return bits >= 0 ? int64_t{bits} : int64_t{std::numeric_limits<int32_t>::min()} - bits;
  };
  return std::abs(place(got) - place(static_cast<float>(wanted)));
}

template <typename F>
void check(const char* name, double held_error) {
  const std::vector<float> x = many_values();
  const int64_t n = static_cast<int64_t>(x.size());
  using Loop = void (*)(const float*, float*, int64_t);
  for (const Loop loop : {Loop{on_this_processor<F>}, Loop{on_every_processor<F>}}) {
    std::vector<float> y(x.size());
    loop(x.data(), y.data(), n);
    int64_t wrong = 0, worst = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double wanted = F::wanted(x[i]);
      const int64_t away = distance(y[i], wanted);
      if (away <= 2 || std::abs(y[i] - wanted) <= held_error) continue;
      ++wrong;
      if (away > distance(y[worst], F::wanted(x[worst]))) worst = i;
    }
    EXPECT_EQ(wrong, 0) << name << " at " << x[worst] << ": " << y[worst] << ", wanted "
                        << F::wanted(x[worst]);
  }
}

template <typename F>
std::vector<float> at_the_ends() {
  const std::vector<float> x{-kInfinity, kInfinity, kNaN};
  std::vector<float> y(x.size());
  on_this_processor<F>(x.data(), y.data(), 3);
  return y;
}

TEST(VectorMathTest, WithinTwoUlp) {
  check<Exp>("exp", 0.0);
  check<Sigmoid>("sigmoid", kZeroBelow);
  check<Tanh>("tanh", 0.0);
}

TEST(VectorMathTest, InfinitiesAndNaN) {
  const auto exp = at_the_ends<Exp>();
  EXPECT_NEAR(exp[0], std::exp(-87.0f), 1e-6 * std::exp(-87.0f));
  EXPECT_EQ(exp[1], kInfinity);
  const auto sigmoid = at_the_ends<Sigmoid>();
  EXPECT_EQ(sigmoid[0], 0.0f);
  EXPECT_EQ(sigmoid[1], 1.0f);
  const auto tanh = at_the_ends<Tanh>();
  EXPECT_EQ(tanh[0], -1.0f);
  EXPECT_EQ(tanh[1], 1.0f);
  for (const auto& y : {exp, sigmoid, tanh}) EXPECT_TRUE(std::isnan(y[2]));
}

TEST(VectorMathTest, SumsOfAnyLength) {
  for (int64_t n = 0; n < 130; ++n) {
    const auto sums = cpu::lane_sums<double>(
        n, [](int64_t i) { return static_cast<double>(i + 1); },
        [](int64_t i) { return static_cast<double>((i + 1) * (i + 1)); });
    EXPECT_EQ(sums.first, n * (n + 1) / 2);
    EXPECT_EQ(sums.second, n * (n + 1) * (2 * n + 1) / 6);
    EXPECT_EQ(cpu::lane_sum<double>(n, [](int64_t i) { return static_cast<double>(i + 1); }),
              n * (n + 1) / 2);
  }
}

}  // namespace
