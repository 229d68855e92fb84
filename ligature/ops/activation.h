// The activations: one class for all that they do, and one made of each row of
// kernels/activation_kind.h, with a holder as torch's: GELUImpl and GELU. The input of a gated
// activation is [..., 2n]: gates a, then linear units b.
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
ToSave quantized_input(const BasicOperation& op, const Value& x, const OpArgs& args);

/// The trait by which fusions know an activation.
class ActivationOperation : public BasicOperation {
 public:
  using BasicOperation::BasicOperation;

  virtual kernels::ActivationSpec spec() const = 0;
  bool is_gated() const { return kernels::is_gated(spec().kind); }
  /// Is the input kept for backward in FP8?
  virtual bool caches_quantized_input() const { return false; }

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
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
  ToSave to_save(const Value& x, const OpArgs& args) const {
    return caches_quantized_input() ? quantized_input(*this, x, args) : ToSave();
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
/// The dtype that it computes in, where autocast chose it.
void save_dtype(OperationContext& ctx, at::ScalarType dtype);
std::optional<at::ScalarType> saved_dtype(const OperationContext& ctx);

/// Checks the input of an activation and tells its output.
ValueMeta infer_activation(const BasicOperation& op, const kernels::ActivationSpec& spec,
                           const InferArgs& args);
void print_options(std::ostream& stream, const BasicOperation& op);

/// Throws unless a number is finite in float32, in which kernels compute.
void check_finite(const char* op, const char* option, double value);

struct ActivationOptions {
  bool cache_quantized_input = false;

  template <class F>
  void fields(F&& f) {
    f("cache_quantized_input", cache_quantized_input);
  }
  void fill(kernels::ActivationSpec&) const {}
  void check(const char*) const {}
};

/// n = `glu_interleave_size`: blocks of n gates and n linear units alternate. Example:
/// ```
/// SwiGLUOptions options;
/// options.glu_interleave_size = 32;
/// SwiGLU activation(options);
/// ```
struct SwiGLUOptions : ActivationOptions {
  std::optional<int64_t> glu_interleave_size;

  template <class F>
  void fields(F&& f) {
    ActivationOptions::fields(f);
    f("glu_interleave_size", glu_interleave_size);
  }
  void fill(kernels::ActivationSpec& spec) const {
    spec.glu_interleave_size = glu_interleave_size.value_or(0);
  }
  void check(const char* op) const {
    LIGATURE_CHECK(!glu_interleave_size || *glu_interleave_size > 0, "[", op,
                   "] glu_interleave_size must be positive, got ", glu_interleave_size.value_or(0));
  }
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
  void fill(kernels::ActivationSpec& spec) const {
    SwiGLUOptions::fill(spec);
    spec.limit = limit;
    spec.alpha = alpha;
    spec.glu_linear_offset = glu_linear_offset;
  }
  void check(const char* op) const {
    SwiGLUOptions::check(op);
    LIGATURE_CHECK(limit > 0, "[", op, "] limit must be positive, got ", limit);
    check_finite(op, "alpha", alpha);
    check_finite(op, "glu_linear_offset", glu_linear_offset);
  }
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
  void fill(kernels::ActivationSpec& spec) const {
    SwiGLUOptions::fill(spec);
    spec.beta1 = beta1;
    spec.beta2 = beta2;
  }
  void check(const char* op) const {
    SwiGLUOptions::check(op);
    LIGATURE_CHECK(beta1 > 0, "[", op, "] beta1 must be positive, got ", beta1);
    LIGATURE_CHECK(beta2 > 0, "[", op, "] beta2 must be positive, got ", beta2);
    check_finite(op, "beta1", beta1);
    check_finite(op, "beta2", beta2);
  }
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

#define LIGATURE_ACTIVATION(Name, OptionsType, ...)                                                \
  class Name##Impl : public ActivationOf<Name##Impl, kernels::ActivationKind::Name, OptionsType> { \
   public:                                                                                         \
    explicit Name##Impl(Options given = {}) : ActivationOf(#Name, given) {}                        \
  };                                                                                               \
  TORCH_MODULE(Name);
LIGATURE_ACTIVATIONS(LIGATURE_ACTIVATION, LIGATURE_ACTIVATION, LIGATURE_ACTIVATION)
#undef LIGATURE_ACTIVATION

}  // namespace ligature
