// Compares one way to compute with another, and looks for what a comparison of results alone does
// not show: memory shared with an input, inputs that were changed, state between calls, saved
// tensors that were forgotten or spoiled.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ligature/testing/report.h"
#include "ligature/testing/run.h"

namespace ligature::testing {

class Comparison {
 public:
  struct Sides {
    Forward actual;
    Forward expected;
    /// The other side is a formula: its values count, not its dtypes and flags.
    bool formula = false;
  };

  Comparison(Report& report, const CheckOptions& options, const Subject& subject,
             const Wiring& wiring, Dtypes dtypes, Sides sides);

  enum class Layout { Plain, Strided };
  /// Random values, the same for the same arguments.
  Data make_data(const ExampleShapes& shapes, Layout layout, uint64_t salt) const;

  const std::vector<std::string>& leaves() const { return leaves_; }
  /// Every leaf that can have a gradient.
  const Needs& all() const { return all_; }

  // Each adds to the report; `where` begins its messages.
  /// Outputs, gradients, shared memory, changed arguments.
  void compare(const std::string& where, const Data& data, const Needs& needs);
  /// Gradients of single leaves, and through single outputs.
  void compare_narrower(const std::string& where, const Data& data);
  /// A second backward through the same graph.
  void compare_twice(const std::string& where, const Data& data);
  /// Two forwards, then their backwards in the same order.
  void compare_interleaved(const std::string& where, const Data& first, const Data& second);
  /// A leaf edited in place between forward and backward: an error, or the gradient of before.
  void compare_edited(const std::string& where, const Data& data);

  /// Runs `check`; an exception is a failure.
  void guarded(const std::string& where, const std::function<void()>& check);
  void fail(const std::string& where, const std::string& what);
  size_t num_failures() const { return report_.failures.size(); }
  double tolerance() const { return tolerance_; }

 private:
  struct Values {
    std::vector<Tensor> outputs;
    std::vector<Tensor> grads;
    std::vector<bool> leaf_changed;
    std::vector<bool> grad_changed;
    std::vector<std::pair<size_t, size_t>> shared;  // output and leaf, or output after the leaves
  };
  struct Choice {
    Needs needs;
    Needs wanted;
    Needs outputs = ~Needs();
  };

  /// Gradients to be taken of a graph, and what they should be.
  struct Part {
    std::string what;
    std::shared_ptr<const Graph> graph;
    const Data* data;
    Choice choice;
    Values expected;
  };

  Values evaluate(const Forward& forward, const Data& data, const Choice& choice);
  /// How far the expected values move when what they are computed from moves by a rounding: of its
  /// dtype, or under a recipe of its format.
  Values spread(const Values& expected, const Data& data, const Choice& choice, int tries);
  std::vector<bool> changed_leaves(const Graph& graph, const Data& data) const;
  void restore_parameters() const;
  void compare_values(const std::string& where, const Values& actual, const Values& expected,
                      const Data& data, const Choice& choice);
  void compare_parts(const std::string& where, const std::vector<Part>& parts);
  void compare_hazards(const std::string& where, const Values& actual, const Values& expected);
  bool missing(const Tensor& actual, const Tensor& expected, const Choice& choice) const;
  double tolerance_for(const Tensor& expected) const;

  Report& report_;
  const CheckOptions& options_;
  const Subject& subject_;
  Dtypes dtypes_;
  Sides sides_;
  std::vector<std::string> leaves_;
  std::vector<std::string> outputs_;
  std::vector<Tensor> params_;     // of all operations, in order
  std::vector<Tensor> snapshots_;  // of the parameters
  std::vector<bool> overwritten_;  // by leaf: an operation says that it writes to it
  Needs all_;
  double tolerance_;
  double rounding_ = 0;  // of the recipe's formats
};

}  // namespace ligature::testing
