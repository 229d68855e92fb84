// What LayerNorm and RMSNorm have in common, so that fusions treat them alike.
#pragma once

#include "ligature/kernels/norm.h"
#include "ligature/kernels/quantize.h"
#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct NormOptions : ParameterOptions {
  NormOptions() = default;
  NormOptions(int64_t size) : normalized_shape{size} {}  // NOLINT: a size is a shape
  NormOptions(std::vector<int64_t> shape)                // NOLINT
      : normalized_shape(std::move(shape)) {}

  std::vector<int64_t> normalized_shape;  ///< the trailing dimensions that one mean is taken over
  double eps = 1e-5;
  bool zero_centered_gamma = false;  ///< the factor is 1 + weight
  /// Accepted for compatibility, no effect: no kernel leaves multiprocessors free.
  int64_t sm_margin = 0;

  template <class F>
  void fields(F&& f) {
    f("normalized_shape", normalized_shape);
    f("eps", eps);
    f("zero_centered_gamma", zero_centered_gamma);
    f("sm_margin", sm_margin);
  }
};

/// Saved from forward to backward.
struct NormState {
  std::optional<at::ScalarType> bias_dtype;
  std::optional<bool> zero_centered_gamma;

  template <class F>
  void fields(F&& f) {
    f("bias_dtype", bias_dtype);
    f("zero_centered_gamma", zero_centered_gamma);
  }
};

struct NormBwdArgs {
  Tensor x;     ///< undefined when only the bias needs a gradient, as are the statistics
  Tensor mean;  ///< undefined for RMSNorm
  Tensor rstd;
  Tensor w;
  Tensor dy;
  Tensor add;  ///< optional: added to the input's gradient
  bool input_requires_grad = false;
  bool weight_requires_grad = false;
  bool bias_requires_grad = false;
  bool zero_centered_gamma = false;  ///< as it was in forward
};

class NormOperation : public BasicOperation {
 public:
  using Options = NormOptions;

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void initialize_parameter(const std::string& name, Tensor& parameter) override;
  void pretty_print(std::ostream& stream) const override;

  // The pieces, for fusions that cover a norm.
  static at::ScalarType output_dtype(const Value& input, const OpArgs& args) {
    return under_autocast(input.dtype(), args.autocast_dtype);
  }
  virtual kernels::NormForward forward(const Tensor& x, at::ArrayRef<Tensor> params,
                                       at::ScalarType out_dtype) const = 0;
  virtual kernels::NormQuantized forward_quantize(const Tensor& x, at::ArrayRef<Tensor> params,
                                                  at::ScalarType out_dtype,
                                                  const kernels::QuantizeArgs& args) const = 0;
  struct Forward {
    Value y;
    Tensor mean;
    Tensor rstd;
  };
  /// y in the format of `target` if it has one.
  Forward forward_to(const Tensor& x, at::ArrayRef<Tensor> params, at::ScalarType out_dtype,
                     const Target& target) const;
  /// The forward's y again.
  virtual Tensor apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                       const Tensor& b, bool zero_centered_gamma,
                       at::ScalarType out_dtype) const = 0;
  void save_state(OperationContext& ctx, const OpArgs& args) const;
  bool saved_zero_centered_gamma(const OperationContext& ctx) const;
  NormBwdArgs backward_args(const OperationContext& ctx, const Value& grad_output) const;
  /// With the operands given instead of saved.
  NormBwdArgs backward_args(const OperationContext& ctx, const Value& grad_output, const Value& x,
                            const Tensor& mean, const Tensor& rstd, const Tensor& w) const;
  OpBackwardResult backward(const NormBwdArgs& args, const OperationContext& ctx) const;

  Options options;
  void check_options(const Options& options) const;
  LIGATURE_OPTIONS_AS_DATA

 protected:
  NormOperation(std::string name, Options options, bool has_bias);
  virtual kernels::NormBackward backward_kernel(const NormBwdArgs& args) const = 0;

 private:
  bool has_bias_;
};

}  // namespace ligature
