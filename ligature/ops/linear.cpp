#include "ligature/ops/linear.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "ligature/recipes/model_init.h"

namespace ligature {
namespace {

OpList make_basic_ops(const LinearOptions& options) {
  LIGATURE_CHECK(options.in_features > 0, "[Linear] in_features must be positive, got ",
                 options.in_features);
  LIGATURE_CHECK(options.out_features > 0, "[Linear] out_features must be positive, got ",
                 options.out_features);
  BasicLinearOptions linear(options.in_features, options.out_features);
  linear.accumulate_into_main_grad = options.accumulate_into_main_grad;
  linear.device = at::kMeta;
  linear.dtype = options.dtype;
  const QuantizedModelInit describing({.enabled = false});
  OpList ops{std::make_shared<BasicLinearImpl>(linear)};
  if (options.bias) {
    BiasOptions bias(options.out_features);
    bias.device = at::kMeta;
    bias.dtype = options.dtype;
    ops.push_back(std::make_shared<BiasImpl>(bias));
  }
  return ops;
}

}  // namespace

LinearImpl::LinearImpl(Options options_)
    : FusedOperation("Linear", make_basic_ops(options_)), options(std::move(options_)) {
  for (const auto& op : basic_ops()) {
    op->set_parameter_owner(this);
    op->set_label("Linear");
  }
  torch::NoGradGuard no_grad;
  const at::TensorOptions like = options.tensor_options();
  Tensor w = at::empty({options.out_features, options.in_features}, like);
  if (!w.is_meta()) basic_linear().initialize_parameter("weight", w);
  register_parameter("weight", new_weight(basic_linear(), w));
  if (!options.bias) return;
  // As torch.nn.Linear; a Bias on its own begins at zero.
  const double limit = 1.0 / std::sqrt(static_cast<double>(options.in_features));
  Tensor b = at::empty({options.out_features}, like);
  if (!b.is_meta()) b.uniform_(-limit, limit);
  register_parameter("bias", b);
}

Tensor LinearImpl::bias() const {
  const Tensor* found = parameters_.find("bias");
  return found != nullptr ? *found : Tensor();
}

void LinearImpl::set_bias(Tensor bias) {
  if (!bias.defined()) {
    if (parameters_.contains("bias")) parameters_.erase("bias");
    return;
  }
  LIGATURE_CHECK(options.bias, "[Linear] it was made with bias=false and cannot be given a bias");
  LIGATURE_CHECK(bias.dim() == 1 && bias.size(0) == options.out_features, "[Linear] bias must be [",
                 options.out_features, "], got ", sizes_string(bias.sizes()));
  if (parameters_.contains("bias")) {
    parameters_["bias"] = std::move(bias);
  } else {
    const bool requires_grad = bias.requires_grad();
    register_parameter("bias", std::move(bias), requires_grad);
  }
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(
    const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<LinearImpl>(options);
  if (!bias().defined()) copy->set_bias({});
  copy_parameters(*this, *copy, device);
  copy->train(is_training());
  return copy;
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Linear(in_features=" << options.in_features
         << ", out_features=" << options.out_features << ", bias=" << std::boolalpha
         << bias().defined() << ")";
}

}  // namespace ligature
