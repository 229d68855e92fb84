// The CPU backend's conversions must round as ATen's do, for every bit pattern.
#include <gtest/gtest.h>

#include "kernel_test_support.h"
#include "ligature/backend/cpu/typed_io.h"
#include "tolerance.h"

using at::Tensor;
using ligature::cpu::Input;
using ligature::cpu::Output;

namespace {

Tensor every_short() { return at::arange(-32768, 32768, at::kInt).to(at::kShort); }

// Random bit patterns, and the neighbourhood of every value of a 16-bit format.
Tensor many_floats(at::ScalarType near) {
  const Tensor random = at::randint(-2147483648LL, 2147483648LL, {200000}, at::kLong);
  const Tensor values = every_short().view(near).to(at::kFloat).view(at::kInt).to(at::kLong);
  const Tensor offsets = at::tensor({-1, 0, 1, 4095, 4096, 4097, 32767, 32768, 32769}, at::kLong);
  const Tensor all = at::cat({random, (values.unsqueeze(1) + offsets).flatten()});
  return all.to(at::kInt).view(at::kFloat);
}

void expect_same_values(const Tensor& actual, const Tensor& expected) {
  ASSERT_TRUE(at::equal(actual.isnan(), expected.isnan()));
  const Tensor numbers = expected.isnan().logical_not();
  const Tensor a = actual.masked_select(numbers), e = expected.masked_select(numbers);
  EXPECT_TRUE(at::equal(a, e));
  EXPECT_TRUE(at::equal(a.signbit(), e.signbit()));
}

template <typename C>
void check_read(at::ScalarType dtype, at::ScalarType compute) {
  const Tensor source = every_short().view(dtype);
  Tensor result = at::empty(source.sizes(), compute);
  Input<C>(source).read(0, source.numel(), result.mutable_data_ptr<C>());
  expect_same_values(result, source.to(compute));
}

template <typename C>
void check_write(at::ScalarType dtype, at::ScalarType compute) {
  const Tensor source = many_floats(dtype).to(compute);
  Tensor result = at::empty(source.sizes(), dtype);
  Output<C>(result).write(0, source.numel(), source.const_data_ptr<C>());
  expect_same_values(result, source.to(dtype));
}

TEST(StagingTest, ReadsEveryValue) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    check_read<float>(dtype, at::kFloat);
    check_read<double>(dtype, at::kDouble);
  }
}

TEST(StagingTest, RoundsAsATenDoes) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    check_write<float>(dtype, at::kFloat);
    check_write<double>(dtype, at::kDouble);
  }
}

TEST(StagingTest, OwnTypeIsNotCopied) {
  const Tensor t = at::randn({8});
  float buffer[8];
  EXPECT_EQ(Input<float>(t).read(2, 4, buffer), t.const_data_ptr<float>() + 2);
  EXPECT_EQ(Output<float>(t).place(2, buffer), t.const_data_ptr<float>() + 2);
  EXPECT_NE(Input<double>(t).defined(), Input<double>(Tensor()).defined());
}

TEST(StagingTest, RefusesOtherTypesAndStrides) {
  float buffer[4];
  EXPECT_THROW(Input<float>(at::ones({4}, at::kInt)).read(0, 4, buffer), c10::Error);
  EXPECT_THROW(Input<float>(at::ones({4, 4}).t().narrow(0, 0, 2)), c10::Error);
}

}  // namespace
