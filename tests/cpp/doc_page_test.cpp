// The comparison of printed output with what a page says.
#include "doc_page.h"

#include <gtest/gtest-spi.h>

#include <vector>

namespace {

/// Lines without the spaces at their ends, and without empty lines around them.
std::string trimmed(const std::string& text) {
  std::istringstream stream(text);
  std::string out;
  for (std::string line; std::getline(stream, line);) {
    const size_t end = line.find_last_not_of(" \t\r");
    out += (end == std::string::npos ? "" : line.substr(0, end + 1)) + "\n";
  }
  const size_t first = out.find_first_not_of('\n');
  if (first == std::string::npos) return "";
  return out.substr(first, out.find_last_not_of('\n') - first + 1);
}

}  // namespace

bool output_matches(const std::string& got, const std::string& wanted) {
  const std::string text = trimmed(got);
  const std::string pattern = trimmed(wanted);
  size_t at = 0;
  for (size_t begin = 0;;) {
    const size_t dots = pattern.find("...", begin);
    const std::string piece = pattern.substr(begin, dots - begin);
    if (dots == std::string::npos) {  // the last piece ends the text
      return text.size() >= at + piece.size() && text.ends_with(piece) &&
             (begin > 0 || text.size() == piece.size());
    }
    const size_t found = text.find(piece, at);
    if (found == std::string::npos || (begin == 0 && found != 0)) return false;
    at = found + piece.size();
    begin = dots + 3;
  }
}

TEST(DocPage, OutputMatches) {
  EXPECT_TRUE(output_matches("", ""));
  EXPECT_TRUE(output_matches("a \nb\n", "\na\nb"));
  EXPECT_TRUE(output_matches("loss 0.25 and more", "loss ... more"));
  EXPECT_TRUE(output_matches("one\ntwo\nthree\n", "one\n...\nthree"));
  EXPECT_TRUE(output_matches("anything", "..."));
  EXPECT_FALSE(output_matches("a", ""));
  EXPECT_FALSE(output_matches("", "a"));
  EXPECT_FALSE(output_matches("ab", "b"));
  EXPECT_FALSE(output_matches("ab", "a"));
  EXPECT_FALSE(output_matches("a c", "a ... b"));
  EXPECT_FALSE(output_matches("b a", "a..."));
  EXPECT_FALSE(output_matches("aba", "ab...ba"));
}

TEST(DocPage, OutputIsTakenAndGivenBack) {
  {
    DocOutput output;
    output.start();
    std::cout << "text";
    output.stop("here", "text");
    output.start();
  }
  testing::internal::CaptureStdout();
  std::cout << "seen" << std::flush;
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "seen");
}

TEST(DocPage, AnotherOutputFails) {
  EXPECT_NONFATAL_FAILURE(
      {
        DocOutput output;
        output.start();
        std::cout << "one";
        output.stop("page.md:7", "two");
      },
      "page.md:7 printed\none");
}
