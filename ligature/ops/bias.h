// y = x + b over the last dimension; y = x as a part of a Linear whose bias was taken away.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct BiasOptions : ParameterOptions {
  BiasOptions() = default;
  explicit BiasOptions(int64_t size_) : size(size_) {}

  int64_t size = 0;
  /// Spread over the ranks of a group, each of which has a part; `size` is that of the whole.
  bool tensor_parallel = false;
  std::optional<std::string> tensor_parallel_group;  ///< none: torch's default group
  std::optional<int64_t> tensor_parallel_size;       ///< none: the group is asked

  template <class F>
  void fields(F&& f) {
    f("size", size);
    f("tensor_parallel", tensor_parallel);
    f("tensor_parallel_group", tensor_parallel_group);
    f("tensor_parallel_size", tensor_parallel_size);
  }
};

/// Saved from forward to backward.
struct BiasState {
  std::optional<at::ScalarType> bias_dtype;
  bool no_bias = false;

  template <class F>
  void fields(F&& f) {
    f("bias_dtype", bias_dtype);
    f("no_bias", no_bias);
  }
};

class BiasImpl : public Operation<BiasImpl> {
 public:
  LIGATURE_BUILTIN(BiasImpl)
  using Options = BiasOptions;
  explicit BiasImpl(Options options);
  explicit BiasImpl(int64_t size) : BiasImpl(Options(size)) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void initialize_parameter(const std::string& name, Tensor& parameter) override;
  void pretty_print(std::ostream& stream) const override;
  bool parameters_are_optional() const override { return true; }

  /// In this dtype; undefined without one.
  static Tensor bias_of(const OpArgs& args, at::ScalarType dtype);
  /// The dtype of its gradient, kept for fusions that compute it elsewhere.
  static void save_dtypes(OperationContext& ctx, const OpArgs& args);
  Tensor cast_grad(const OperationContext& ctx, const Tensor& db) const;
  /// Of this rank's part.
  int64_t local_size() const { return options.size / options.tensor_parallel_size.value_or(1); }

  Options options;
  static void check_options(const Options& options);
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(Bias);

}  // namespace ligature
