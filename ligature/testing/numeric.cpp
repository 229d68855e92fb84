#include "ligature/testing/numeric.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>

#include "ligature/testing/compare.h"

namespace ligature::testing {
namespace {

constexpr double kStep = 1e-6;
constexpr int64_t kElements = 24;  // of each leaf
// A difference of sums of order one, divided by the step, and the third derivative.
constexpr double kTolerance = 1e-5;

/// The outputs weighed with their gradients: a number whose gradient backward gives.
double weighed(const Graph& graph, const Data& data) {
  double sum = 0;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    if (!at::isFloatingType(graph.outputs[k].scalar_type())) continue;
    sum += (graph.outputs[k] * data.grad_outputs[k]).sum().item<double>();
  }
  return sum;
}

/// One element of a tensor, counted row by row, as a view.
Tensor element_of(Tensor t, int64_t index) {
  while (t.dim() > 0) {
    const int64_t below = t.numel() / t.size(0);
    t = t.select(0, index / below);
    index %= below;
  }
  return t;
}

class Nudge {
 public:
  explicit Nudge(Tensor place) : place_(std::move(place)), before_(place_.item<double>()) {}
  ~Nudge() { place_.fill_(before_); }
  Nudge(const Nudge&) = delete;
  Nudge& operator=(const Nudge&) = delete;
  void by(double step) { place_.fill_(before_ + step); }

 private:
  Tensor place_;
  double before_;
};

}  // namespace

std::vector<std::string> numeric_differences(const Forward& forward, const Data& given,
                                             const std::vector<std::string>& names,
                                             const Needs& leaves, double tolerance) {
  Data data = given;
  const Graph graph = forward(data, leaves);
  const std::vector<Tensor> found = gradients(graph, data, leaves).of_leaves;
  data.input = given.input.clone();
  for (Tensor& extra : data.extra_inputs) extra = extra.clone();
  const size_t first_extra = names.size() - data.extra_inputs.size();
  at::NoGradGuard no_grad;
  std::mt19937_64 random(1);
  std::vector<std::string> out;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!has(leaves, i)) continue;
    // Every forward copies the input and the extra inputs, and takes parameters as they are.
    Tensor values = i == 0             ? data.input
                    : i >= first_extra ? data.extra_inputs[i - first_extra]
                                       : graph.leaves[i].detach();
    const int64_t numel = values.numel();
    const Tensor grad = found[i].defined() ? found[i] : at::zeros_like(values);
    std::vector<double> numeric, backward;
    std::vector<int64_t> elements;
    for (int64_t n = 0; n < std::min(kElements, numel); ++n) {
      elements.push_back(
          numel <= kElements ? n : static_cast<int64_t>(random() % static_cast<uint64_t>(numel)));
      Nudge nudge(element_of(values, elements.back()));
      nudge.by(kStep);
      const double above = weighed(forward(data, 0), data);
      nudge.by(-kStep);
      const double below = weighed(forward(data, 0), data);
      numeric.push_back((above - below) / (2 * kStep));
      backward.push_back(element_of(grad, elements.back()).item<double>());
    }
    for (size_t n = 0; n < elements.size(); ++n) {
      const double off = std::abs(numeric[n] - backward[n]);
      const double allowed = tolerance * kTolerance * (1 + std::abs(numeric[n]));
      if (off <= allowed) continue;
      std::ostringstream text;
      text.precision(4);
      text << "gradient of " << names[i] << " is " << backward[n] << " at element " << elements[n]
           << ", by differences it is " << numeric[n];
      out.push_back(text.str());
      break;
    }
  }
  return out;
}

}  // namespace ligature::testing
