// y = x W^T + b as one module with the names of torch.nn.Linear. It only holds parameters: whatever
// runs sees its basic operations, so every fusion of BasicLinear and Bias is one of Linear.
#pragma once

#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"
#include "ligature/ops/collective.h"

namespace ligature {

struct LinearOptions : ParameterOptions {
  LinearOptions() = default;
  LinearOptions(int64_t in_features_, int64_t out_features_, bool bias_ = true)
      : in_features(in_features_), out_features(out_features_), bias(bias_) {}

  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  bool accumulate_into_main_grad = false;
  /// The sizes above are those of the whole layer. In mode "row" it is a BasicLinear, a Bias and a
  /// ReduceScatter (sequence_parallel) or AllReduce: each rank's bias is added before the sum.
  TensorParallelOptions tensor_parallel;

  template <class F>
  void fields(F&& f) {
    f("in_features", in_features);
    f("out_features", out_features);
    f("bias", bias);
    f("accumulate_into_main_grad", accumulate_into_main_grad);
    tensor_parallel.fields(f);
  }
};

/// Example:
/// ```
/// Linear fc(LinearOptions(1024, 4096, /*bias=*/false));
/// OperationFuser fuser({fc.ptr(), GELU().ptr()});
/// ```
class LinearImpl : public FusedOperation {
 public:
  LIGATURE_BUILTIN(LinearImpl)
  using Options = LinearOptions;
  explicit LinearImpl(Options options);
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(Options(in_features, out_features)) {}

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override;

  BasicOperation* recipe_state_owner() override { return &basic_linear(); }
  BasicLinearImpl& basic_linear() const { return basic_op<BasicLinearImpl>(0); }
  const Tensor& weight() const { return parameters_["weight"]; }
  /// Undefined without a bias.
  Tensor bias() const;
  /// An undefined one takes the bias away. One that was made without a bias cannot be given one.
  void set_bias(Tensor bias);
  /// Gives a fresh weight its initial values: those of the whole layer, whatever the ranks.
  void initialize_weight(Tensor& w) const;
  /// Does this rank's bias begin with values? In mode "row" the biases of all ranks are added up,
  /// and those of all but the first begin as zeros.
  bool adds_bias() const;
  bool is_row() const { return options.tensor_parallel.parsed() == TensorParallel::Row; }

  Options options;
};
TORCH_MODULE(Linear);

}  // namespace ligature
