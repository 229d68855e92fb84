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
  const TensorParallelOptions& parallel = options.tensor_parallel;
  const bool row = parallel.parsed() == TensorParallel::Row;
  BasicLinearOptions linear(options.in_features / (row ? parallel.ranks() : 1),
                            options.out_features);
  if (!row) linear.tensor_parallel = parallel;
  linear.accumulate_into_main_grad = options.accumulate_into_main_grad;
  linear.device = at::kMeta;
  linear.dtype = options.dtype;
  const QuantizedModelInit describing({.enabled = false});
  OpList ops{std::make_shared<BasicLinearImpl>(linear)};
  if (options.bias) {
    BiasOptions bias(options.out_features * (row ? parallel.ranks() : 1));
    bias.tensor_parallel = parallel.mode.has_value();
    bias.tensor_parallel_group = parallel.group;
    bias.tensor_parallel_size = parallel.size;
    bias.device = at::kMeta;
    bias.dtype = options.dtype;
    ops.push_back(std::make_shared<BiasImpl>(bias));
  }
  if (row && parallel.sequence_parallel) {
    ReduceScatterOptions scatter;
    scatter.process_group = parallel.group;
    ops.push_back(std::make_shared<ReduceScatterImpl>(scatter));
  } else if (row) {
    AllReduceOptions sum;
    sum.process_group = parallel.group;
    ops.push_back(std::make_shared<AllReduceImpl>(sum));
  }
  return ops;
}

}  // namespace

namespace {

LinearOptions canonical(LinearOptions given) {
  given.tensor_parallel =
      canonical(given.tensor_parallel, "Linear", given.in_features, given.out_features);
  return given;
}

}  // namespace

LinearImpl::LinearImpl(Options given)
    : FusedOperation("Linear", make_basic_ops(canonical(given))), options(canonical(given)) {
  for (const auto& op : basic_ops()) {
    op->set_label("Linear");
    if (op->as<CollectiveOperation>() == nullptr) op->set_parameter_owner(this);
  }
  torch::NoGradGuard no_grad;
  const at::TensorOptions like = options.tensor_options();
  const int64_t in = basic_linear().local_in_features();
  const int64_t out = basic_linear().local_out_features();
  Tensor w = at::empty({out, in}, like);
  if (!w.is_meta()) initialize_weight(w);
  register_parameter("weight", new_weight(basic_linear(), w));
  if (!options.bias) return;
  // As torch.nn.Linear; a Bias on its own begins at zero.
  const double limit = 1.0 / std::sqrt(static_cast<double>(options.in_features));
  Tensor b = at::empty({out}, like);
  if (!b.is_meta()) b.uniform_(-limit, limit);
  if (!b.is_meta() && !adds_bias()) b.zero_();
  register_parameter("bias", b);
}

void LinearImpl::initialize_weight(Tensor& w) const {
  basic_linear().initialize_parameter("weight", w);
  if (!is_row()) return;
  w.mul_(1.0 / std::sqrt(static_cast<double>(options.tensor_parallel.ranks())));
}

bool LinearImpl::adds_bias() const {
  return !is_row() || group_of(options.tensor_parallel, label())->rank() == 0;
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
  LIGATURE_CHECK(bias.dim() == 1 && bias.size(0) == basic_linear().local_out_features(),
                 "[Linear] bias must be [", basic_linear().local_out_features(), "], got ",
                 sizes_string(bias.sizes()));
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
