// What the tests of check_fusion and check_operation share.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "ligature/ligature.h"
#include "ligature/testing/testing.h"
#include "ops_test_support.h"

/// The report says that something is wrong, and this is among it.
inline void expect_failures(const ligature::testing::Report& report, const std::string& part) {
  EXPECT_FALSE(report);
  bool found = false;
  for (const auto& failure : report.failures) {
    found = found || failure.find(part) != std::string::npos;
  }
  EXPECT_TRUE(found) << "wanted: " << part << "\n" << report.text();
}

inline ligature::OpPtr make_bias(int64_t size, at::ScalarType dtype, at::Device device) {
  ligature::BiasOptions options(size);
  options.dtype = dtype;
  options.device = device;
  return ligature::Bias(options).ptr();
}

inline ligature::OpList bias_gelu(at::ScalarType dtype, at::Device device) {
  return {make_bias(8, dtype, device), ligature::GELU().ptr()};
}

/// One thread: with tiny tensors more of them only wait for each other.
class OneThread : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};
