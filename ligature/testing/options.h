// What a check is told: which dtypes and shapes to try, how many choices of what needs a gradient,
// and how exact the results must be.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "ligature/fuser/rule.h"

namespace ligature::testing {

using at::Tensor;

/// The dtype of the input and the extra inputs, and that of the parameters.
struct Dtypes {
  Dtypes(at::ScalarType both) : input(both), params(both) {}  // NOLINT: one dtype is a pair
  Dtypes(at::ScalarType input_, at::ScalarType params_) : input(input_), params(params_) {}

  at::ScalarType input;
  at::ScalarType params;
};

struct ExampleShapes {
  ExampleShapes(std::vector<int64_t> input_,  // NOLINT: a shape is an example
                std::vector<std::vector<int64_t>> extra_inputs_ = {})
      : input(std::move(input_)), extra_inputs(std::move(extra_inputs_)) {}

  std::vector<int64_t> input;
  /// Of the caller's extra inputs, in order. Left out, they are worked out where the operations'
  /// `infer` tells them: the shape of the value, or that without its last dimension.
  std::vector<std::vector<int64_t>> extra_inputs;
  /// Those that are sizes or indices (BasicOperation::example_extra_input); the others undefined,
  /// or none at all.
  std::vector<Tensor> extra_values = {};
};

/// What a forward-only fusion owes the contexts of its basic operations.
enum class ContextMatch {
  Exact,   ///< the same saved tensors and the same plain state
  Enough,  ///< at least those; where both have a plain value it is the same
};

struct CheckOptions {
  std::vector<Dtypes> dtypes;        ///< empty: float64 (without a recipe), float32 and bfloat16
  std::optional<at::Device> device;  ///< where operations are made by default
  uint64_t seed = 0;
  /// How many choices of the tensors that need gradients are tried, at most. As many subsets as
  /// that are all tried; otherwise all, none, one, all but one, and random ones.
  size_t max_patterns = 16;
  double tolerance = 1.0;  ///< factor of the tolerances
  ContextMatch contexts = ContextMatch::Exact;
  Recompute recompute = Recompute::Cheap;  ///< what joint fusions may do
  std::optional<at::ScalarType> autocast;  ///< runs everything under autocast to this dtype
  RecipePtr recipe;                        ///< runs a fusion in low precision

  bool may_alias = false;             ///< outputs may share memory with inputs
  bool may_give_unneeded = false;     ///< backward may give gradients that nobody needs
  bool may_change_gradients = false;  ///< backward may overwrite the gradients it is given
  bool may_change_dtype = false;      ///< outputs may have another dtype than the input
  bool randomize_parameters = true;   ///< adds noise to the parameters' initial values
  bool numeric = true;                ///< also check gradients by differences, in float64

  /// Values in float64 of this shape; standard normal ones without it.
  std::function<Tensor(at::IntArrayRef)> sample;
  /// Tells an exception that ends the check from one that is a failure.
  std::function<bool(const std::exception&)> is_fatal;
};

}  // namespace ligature::testing
