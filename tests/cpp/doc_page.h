// What the tests made of the documentation's C++ blocks use: a tensor to begin with, and a look at
// what a block prints.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <iostream>
#include <sstream>
#include <string>

#include "device.h"

/// The `x` of a page.
inline at::Tensor doc_input() {
  torch::manual_seed(1234);
  return torch::randn({64, 256}, on_device()).requires_grad_();
}

/// Whether an output is the wanted one; "..." stands for anything, spaces at ends do not count.
bool output_matches(const std::string& got, const std::string& wanted);

/// Takes what a block writes to std::cout.
class DocOutput {
 public:
  DocOutput() = default;
  ~DocOutput() {
    if (before_ != nullptr) std::cout.rdbuf(before_);
  }
  DocOutput(const DocOutput&) = delete;
  DocOutput& operator=(const DocOutput&) = delete;

  void start() {
    text_.str("");
    before_ = std::cout.rdbuf(text_.rdbuf());
  }
  /// `where`: the page and the line of the block.
  void stop(const std::string& where, const std::string& wanted) {
    std::cout.rdbuf(before_);
    before_ = nullptr;
    EXPECT_TRUE(output_matches(text_.str(), wanted)) << where << " printed\n"
                                                     << text_.str() << "and the page says\n"
                                                     << wanted;
  }

 private:
  std::ostringstream text_;
  std::streambuf* before_ = nullptr;
};
