// Activations whose result is multiplied by a factor per row, as after the routing of a mixture of
// experts. The factors are an extra input of the shape of the input without its last dimension.
#pragma once

#include "ligature/ops/activation.h"

namespace ligature {

class ScaledActivationOperation : public BasicOperation {
 public:
  using BasicOperation::BasicOperation;

  virtual kernels::ActivationSpec spec() const = 0;
  virtual bool caches_quantized_input() const { return false; }
  /// Scales are taken for 1, and may be a single element.
  virtual bool has_unit_scale() const = 0;

  size_t num_extra_inputs() const override { return 1; }
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;
};

/// An activation's options and one more.
template <class Base>
struct ScaledOptions : Base {
  /// May a grouped MLP make its output again in backward? GroupedMLP does so either way: it costs
  /// no GEMM and changes no bit.
  bool activation_recompute_in_mlp = false;
  /// Scales are taken for 1, whatever they are; one element will do.
  bool unit_scale = false;

  template <class F>
  void fields(F&& f) {
    Base::fields(f);
    f("activation_recompute_in_mlp", activation_recompute_in_mlp);
    f("unit_scale", unit_scale);
  }
};

using ScaledSwiGLUOptions = ScaledOptions<SwiGLUOptions>;
using ScaledSiTUGLUOptions = ScaledOptions<SiTUGLUOptions>;
using ScaledClampedQGeGLUOptions = ScaledOptions<ClampedSwiGLUOptions>;
using ScaledSReLUOptions = ScaledOptions<ActivationOptions>;

/// Example:
/// ```
/// ScaledSwiGLU activation;
/// OperationFuser fuser({activation.ptr()});
/// Tensor y = fuser(x, {probabilities})[0];
/// ```
class ScaledSwiGLUImpl : public ActivationOf<ScaledSwiGLUImpl, kernels::ActivationKind::SwiGLU,
                                             ScaledSwiGLUOptions, ScaledActivationOperation> {
 public:
  explicit ScaledSwiGLUImpl(Options given = {}) : ActivationOf("ScaledSwiGLU", given) {}
  bool has_unit_scale() const override { return options.unit_scale; }
};
TORCH_MODULE(ScaledSwiGLU);

class ScaledSiTUGLUImpl : public ActivationOf<ScaledSiTUGLUImpl, kernels::ActivationKind::SiTUGLU,
                                              ScaledSiTUGLUOptions, ScaledActivationOperation> {
 public:
  explicit ScaledSiTUGLUImpl(Options given = {}) : ActivationOf("ScaledSiTUGLU", given) {}
  bool has_unit_scale() const override { return options.unit_scale; }
};
TORCH_MODULE(ScaledSiTUGLU);

/// The formula of ClampedSwiGLU.
class ScaledClampedQGeGLUImpl
    : public ActivationOf<ScaledClampedQGeGLUImpl, kernels::ActivationKind::ClampedSwiGLU,
                          ScaledClampedQGeGLUOptions, ScaledActivationOperation> {
 public:
  explicit ScaledClampedQGeGLUImpl(Options given = {})
      : ActivationOf("ScaledClampedQGeGLU", given) {}
  bool has_unit_scale() const override { return options.unit_scale; }
};
TORCH_MODULE(ScaledClampedQGeGLU);

class ScaledSReLUImpl : public ActivationOf<ScaledSReLUImpl, kernels::ActivationKind::SReLU,
                                            ScaledSReLUOptions, ScaledActivationOperation> {
 public:
  explicit ScaledSReLUImpl(Options given = {}) : ActivationOf("ScaledSReLU", given) {}
  bool has_unit_scale() const override { return options.unit_scale; }
};
TORCH_MODULE(ScaledSReLU);

}  // namespace ligature
