// The activations: one class for all that they do, and a thin one for each that says which it is.
#pragma once

#include "ligature/kernels/activation.h"
#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct ActivationGrads {
  Value dx;
  Tensor dscales;
  Tensor dbias;
};

/// The input of an activation in FP8, to be kept for backward.
Kept quantized_input(const BasicOperation& op, const Value& x, const OpArgs& args);

/// The trait by which fusions know an activation.
class ActivationOperation : public BasicOperation {
 public:
  using BasicOperation::BasicOperation;

  virtual kernels::ActivationSpec spec() const = 0;
  bool is_gated() const { return kernels::is_gated(spec().kind); }
  /// Is the input kept for backward in FP8?
  virtual bool caches_quantized_input() const { return false; }

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, Kept& kept,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  // The pieces, for fusions that cover an activation.
  static at::ScalarType compute_dtype(const Value& input, const OpArgs& args) {
    return under_autocast(input.dtype(), args.autocast_dtype);
  }
  /// What to keep instead of the input x: nothing, or x in FP8.
  Kept kept(const Value& x, const OpArgs& args) const {
    return caches_quantized_input() ? quantized_input(*this, x, args) : Kept();
  }
  /// `dbias`: the gradient of a bias added to the input. `target`: the format of dx.
  ActivationGrads backward(OperationContext& ctx, const Value& grad_output, bool need_dbias,
                           const Target& target) const;
};

/// act(x) times the row's factor where `scales` is defined, in the format of `target` if it has
/// one.
Value activation_forward_to(const Tensor& x, const kernels::ActivationSpec& spec,
                            const Tensor& scales, const Target& target);
/// `over_x`: dx may be written over x.
ActivationGrads activation_backward_to(const Tensor& dy, const Tensor& x,
                                       const kernels::ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, const Target& target,
                                       bool over_x = false);
/// With the input that was saved first, for the last time, and the options as they were saved.
ActivationGrads activation_backward(OperationContext& ctx, const Value& grad_output,
                                    const kernels::ActivationSpec& spec, const Tensor& scales,
                                    bool need_dscales, bool need_dbias, const Target& target);

/// What options say of an activation, kept for backward: they may be changed in between.
void save_spec(OperationContext& ctx, const kernels::ActivationSpec& spec);
kernels::ActivationSpec saved_spec(const OperationContext& ctx, kernels::ActivationSpec spec);

/// Checks the input of an activation and tells its output.
ValueMeta infer_activation(const BasicOperation& op, const kernels::ActivationSpec& spec,
                           const InferArgs& args);
void print_options(std::ostream& stream, const BasicOperation& op);

struct ActivationOptions {
  bool cache_quantized_input = false;

  template <class F>
  void fields(F&& f) {
    f("cache_quantized_input", cache_quantized_input);
  }
  void check(const char*) const {}
  void fill(kernels::ActivationSpec&) const {}
};

/// n = `glu_interleave_size`: blocks of n gates and n linear units alternate.
struct SwiGLUOptions : ActivationOptions {
  std::optional<int64_t> glu_interleave_size;

  template <class F>
  void fields(F&& f) {
    ActivationOptions::fields(f);
    f("glu_interleave_size", glu_interleave_size);
  }
  void check(const char* op) const;
  void fill(kernels::ActivationSpec& spec) const;
};

struct ClampedSwiGLUOptions : SwiGLUOptions {
  double limit = 7.0;
  double alpha = 1.702;
  double glu_linear_offset = 1.0;

  template <class F>
  void fields(F&& f) {
    f("limit", limit);
    f("alpha", alpha);
    f("glu_linear_offset", glu_linear_offset);
    SwiGLUOptions::fields(f);
  }
  void check(const char* op) const;
  void fill(kernels::ActivationSpec& spec) const;
};

struct SiTUGLUOptions : SwiGLUOptions {
  double beta1 = 4.0;
  double beta2 = 25.0;

  template <class F>
  void fields(F&& f) {
    f("beta1", beta1);
    f("beta2", beta2);
    SwiGLUOptions::fields(f);
  }
  void check(const char* op) const;
  void fill(kernels::ActivationSpec& spec) const;
};

/// A kind of activation with its options, as an operation of the family `Base`.
template <class Self, kernels::ActivationKind kKind, class OptionsType = ActivationOptions,
          class Base = ActivationOperation>
class ActivationOf : public Operation<Self, Base> {
 public:
  LIGATURE_BUILTIN(Self)
  using Options = OptionsType;

  kernels::ActivationSpec spec() const override {
    kernels::ActivationSpec spec{kKind};
    options.fill(spec);
    return spec;
  }
  bool caches_quantized_input() const override { return options.cache_quantized_input; }

  Options options;
  void check_options(const Options& given) const { given.check(this->name().c_str()); }
  using Operation<Self, Base>::label;
  LIGATURE_OPTIONS_AS_DATA

 protected:
  explicit ActivationOf(std::string name, Options options_)
      : Operation<Self, Base>(std::move(name)), options(std::move(options_)) {
    check_options(options);
  }
};

/// tanh form.
class GELUImpl : public ActivationOf<GELUImpl, kernels::ActivationKind::GELU> {
 public:
  explicit GELUImpl(Options given = {}) : ActivationOf("GELU", given) {}
};
TORCH_MODULE(GELU);

/// sigmoid(a) * b. The input of a gated activation is [..., 2n]: gates a, then linear units b.
class GLUImpl : public ActivationOf<GLUImpl, kernels::ActivationKind::GLU> {
 public:
  explicit GLUImpl(Options given = {}) : ActivationOf("GLU", given) {}
};
TORCH_MODULE(GLU);

/// gelu(a) * b
class GEGLUImpl : public ActivationOf<GEGLUImpl, kernels::ActivationKind::GEGLU> {
 public:
  explicit GEGLUImpl(Options given = {}) : ActivationOf("GEGLU", given) {}
};
TORCH_MODULE(GEGLU);

/// x * sigmoid(1.702 x)
class QGELUImpl : public ActivationOf<QGELUImpl, kernels::ActivationKind::QGELU> {
 public:
  explicit QGELUImpl(Options given = {}) : ActivationOf("QGELU", given) {}
};
TORCH_MODULE(QGELU);

/// qgelu(a) * b
class QGEGLUImpl : public ActivationOf<QGEGLUImpl, kernels::ActivationKind::QGEGLU> {
 public:
  explicit QGEGLUImpl(Options given = {}) : ActivationOf("QGEGLU", given) {}
};
TORCH_MODULE(QGEGLU);

/// max(x, 0)
class ReLUImpl : public ActivationOf<ReLUImpl, kernels::ActivationKind::ReLU> {
 public:
  explicit ReLUImpl(Options given = {}) : ActivationOf("ReLU", given) {}
};
TORCH_MODULE(ReLU);

/// relu(a) * b
class ReGLUImpl : public ActivationOf<ReGLUImpl, kernels::ActivationKind::ReGLU> {
 public:
  explicit ReGLUImpl(Options given = {}) : ActivationOf("ReGLU", given) {}
};
TORCH_MODULE(ReGLU);

/// relu(x)^2
class SReLUImpl : public ActivationOf<SReLUImpl, kernels::ActivationKind::SReLU> {
 public:
  explicit SReLUImpl(Options given = {}) : ActivationOf("SReLU", given) {}
};
TORCH_MODULE(SReLU);

/// relu(a)^2 * b
class SReGLUImpl : public ActivationOf<SReGLUImpl, kernels::ActivationKind::SReGLU> {
 public:
  explicit SReGLUImpl(Options given = {}) : ActivationOf("SReGLU", given) {}
};
TORCH_MODULE(SReGLU);

/// x * sigmoid(x)
class SiLUImpl : public ActivationOf<SiLUImpl, kernels::ActivationKind::SiLU> {
 public:
  explicit SiLUImpl(Options given = {}) : ActivationOf("SiLU", given) {}
};
TORCH_MODULE(SiLU);

/// silu(a) * b. Example:
/// ```
/// SwiGLUOptions options;
/// options.glu_interleave_size = 32;
/// SwiGLU activation(options);
/// ```
class SwiGLUImpl : public ActivationOf<SwiGLUImpl, kernels::ActivationKind::SwiGLU, SwiGLUOptions> {
 public:
  explicit SwiGLUImpl(Options given = {}) : ActivationOf("SwiGLU", given) {}
};
TORCH_MODULE(SwiGLU);

/// a = min(a, limit), b = clamp(b, ±limit) + glu_linear_offset, a * sigmoid(alpha * a) * b
class ClampedSwiGLUImpl
    : public ActivationOf<ClampedSwiGLUImpl, kernels::ActivationKind::ClampedSwiGLU,
                          ClampedSwiGLUOptions> {
 public:
  explicit ClampedSwiGLUImpl(Options given = {}) : ActivationOf("ClampedSwiGLU", given) {}
};
TORCH_MODULE(ClampedSwiGLU);

/// beta1 * tanh(a / beta1) * sigmoid(a) * beta2 * tanh(b / beta2)
class SiTUGLUImpl
    : public ActivationOf<SiTUGLUImpl, kernels::ActivationKind::SiTUGLU, SiTUGLUOptions> {
 public:
  explicit SiTUGLUImpl(Options given = {}) : ActivationOf("SiTUGLU", given) {}
};
TORCH_MODULE(SiTUGLU);

}  // namespace ligature
