// What the tests of operations and fused operations share: one run of a fuser with all its
// gradients, the same by a formula in float64 under torch's autograd, and the comparison of both.
#pragma once

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// The outputs of some operations as a formula of the input, the extra inputs and the parameters.
using Formula =
    std::function<Tensors(const Tensor& x, const Tensors& extras, const Tensors& params)>;

struct RunResult {
  Tensors outputs;
  Tensors grads;  ///< of the input, the extra inputs and the parameters; undefined where not needed
};

struct Inputs {
  Tensor x;
  Tensors extras;
};

/// torch.autocast to bfloat16 on the tested device while it lives.
class WithAutocast {
 public:
  explicit WithAutocast(bool enabled = true) {
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::set_autocast_enabled(device_, enabled);
  }
  ~WithAutocast() { at::autocast::set_autocast_enabled(device_, false); }
  WithAutocast(const WithAutocast&) = delete;
  WithAutocast& operator=(const WithAutocast&) = delete;

 private:
  at::DeviceType device_ = on_device().device().type();
};

inline Tensors parameters_of(const ligature::OpList& ops) {
  Tensors params;
  for (const auto& op : ops) {
    for (const auto& basic : op->basic_ops()) basic->collect_parameters(params);
  }
  return params;
}

inline Tensors leaves_of(const Inputs& inputs, const Tensors& params) {
  Tensors leaves{inputs.x};
  leaves.insert(leaves.end(), inputs.extras.begin(), inputs.extras.end());
  leaves.insert(leaves.end(), params.begin(), params.end());
  return leaves;
}

/// Random gradients of the outputs, the same ones for the same shapes.
inline Tensors output_grads(const Tensors& outputs) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Tensors grads;
  for (const Tensor& y : outputs) {
    grads.push_back(at::randn(y.sizes(), generator, at::kDouble).to(at::kBFloat16).to(y.options()));
  }
  return grads;
}

/// Gradients of the leaves that need one. Outputs that need none are left out.
inline Tensors gradients(const Tensors& outputs, const Tensors& leaves) {
  const Tensors all_grads = output_grads(outputs);
  Tensors ys, dys, wanted;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    ys.push_back(outputs[i]);
    dys.push_back(all_grads[i]);
  }
  for (const Tensor& leaf : leaves) {
    if (leaf.requires_grad()) wanted.push_back(leaf);
  }
  Tensors found;
  if (!ys.empty() && !wanted.empty()) {
    found = torch::autograd::grad(ys, wanted, dys, std::nullopt, false, /*allow_unused=*/true);
  }
  Tensors grads;
  for (size_t i = 0, next = 0; i < leaves.size(); ++i) {
    grads.push_back(leaves[i].requires_grad() && !found.empty() ? found[next++] : Tensor());
  }
  return grads;
}

inline RunResult run_fuser(ligature::OperationFuser& fuser, const Inputs& inputs,
                           const Tensors& params) {
  RunResult result;
  result.outputs = fuser(inputs.x, inputs.extras);
  result.grads = gradients(result.outputs, leaves_of(inputs, params));
  return result;
}

inline RunResult run_formula(const Formula& formula, const Inputs& inputs, const Tensors& params) {
  const auto in_double = [](const Tensor& t) {
    return t.detach().to(at::kCPU, at::kDouble).clone().requires_grad_(t.requires_grad());
  };
  Inputs doubles{in_double(inputs.x), {}};
  for (const Tensor& t : inputs.extras) doubles.extras.push_back(in_double(t));
  Tensors double_params;
  for (const Tensor& t : params) double_params.push_back(in_double(t));
  RunResult result;
  result.outputs = formula(doubles.x, doubles.extras, double_params);
  result.grads = gradients(result.outputs, leaves_of(doubles, double_params));
  return result;
}

/// Gradients must have the dtype of their leaves, outputs that of the reference if it is no
/// formula.
inline void expect_same_run(const RunResult& actual, const RunResult& expected,
                            const Tensors& leaves, const std::string& where, Tolerance allowed) {
  ASSERT_EQ(actual.outputs.size(), expected.outputs.size()) << where;
  for (size_t i = 0; i < actual.outputs.size(); ++i) {
    const Tensor& y = actual.outputs[i];
    EXPECT_EQ(y.requires_grad(), expected.outputs[i].requires_grad()) << where << ", output " << i;
    expect_close(y.contiguous(), expected.outputs[i], y.scalar_type(),
                 where + ", output " + std::to_string(i), allowed);
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    const std::string which = where + ", gradient " + std::to_string(i);
    ASSERT_EQ(actual.grads[i].defined(), expected.grads[i].defined()) << which;
    if (!actual.grads[i].defined()) continue;
    expect_close(actual.grads[i].contiguous(), expected.grads[i], leaves[i].scalar_type(), which,
                 allowed);
  }
}

/// Sets which leaves need gradients: bit i for leaf i.
inline void freeze(const Tensors& leaves, uint64_t trained) {
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i].requires_grad_(((trained >> i) & 1U) != 0);
  }
}

inline std::string bits(uint64_t trained, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += ((trained >> i) & 1U) != 0 ? '1' : '0';
  return out;
}

/// Runs `check(where)` for every choice of leaves that need gradients.
inline void for_each_frozen_pattern(const Tensors& leaves,
                                    const std::function<void(const std::string&)>& check) {
  for (uint64_t trained = 0; trained < (uint64_t{1} << leaves.size()); ++trained) {
    freeze(leaves, trained);
    check("trained " + bits(trained, leaves.size()));
  }
}

inline ligature::FuserOptions unfused() {
  ligature::FuserOptions options;
  options.fuse = false;
  return options;
}

inline ligature::FuserOptions fused_if(bool fuse) {
  return fuse ? ligature::FuserOptions() : unfused();
}

/// Compares operations with their formula, over every choice of leaves that need gradients.
inline void expect_formula(const ligature::OpList& ops, const Formula& formula,
                           const Inputs& inputs, const std::string& where,
                           ligature::FuserOptions options = {}) {
  ligature::OperationFuser fuser(ops, options);
  const Tensors params = parameters_of(ops);
  const Tensors leaves = leaves_of(inputs, params);
  const Tolerance allowed = tolerance(inputs.x.scalar_type());
  for_each_frozen_pattern(leaves, [&](const std::string& pattern) {
    expect_same_run(run_fuser(fuser, inputs, params), run_formula(formula, inputs, params), leaves,
                    where + ", " + pattern, allowed);
  });
}

/// Shapes of one to four dimensions, the empty batch among them, that end in `tail`.
inline std::vector<std::vector<int64_t>> op_shapes(const std::vector<int64_t>& tail) {
  std::vector<std::vector<int64_t>> shapes;
  for (const std::vector<int64_t>& batch :
       std::vector<std::vector<int64_t>>{{}, {5}, {0}, {2, 3}, {2, 0}, {2, 1, 3}}) {
    shapes.push_back(batch);
    shapes.back().insert(shapes.back().end(), tail.begin(), tail.end());
  }
  return shapes;
}

inline Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::kDouble).to(on_device(dtype));
}

/// Of this shape, with the strides of a transposed tensor and an offset.
inline Tensor strided_leaf(std::vector<int64_t> shape, at::ScalarType dtype = at::kDouble) {
  std::vector<int64_t> reversed(shape.rbegin(), shape.rend());
  reversed[0] += 1;
  Tensor t = leaf(reversed, dtype).slice(0, 1);
  std::vector<int64_t> order;
  for (size_t i = shape.size(); i-- > 0;) order.push_back(static_cast<int64_t>(i));
  return t.permute(order);
}

inline std::vector<std::string> step_names(const std::vector<ligature::PlanStep>& steps) {
  std::vector<std::string> names;
  for (const auto& step : steps) names.push_back(step.op->name());
  return names;
}

inline bool fires(const std::vector<ligature::PlanStep>& steps, const std::string& name) {
  for (const auto& step : steps) {
    if (step.op->name() == name) return true;
  }
  return false;
}

/// The message of the exception that `f` throws; empty without one.
template <class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

#define EXPECT_MESSAGE(statement, part)                                                 \
  do {                                                                                  \
    const std::string message = message_of([&] { statement; });                         \
    EXPECT_NE(message.find(part), std::string::npos) << "message: '" << message << "'"; \
  } while (false)
