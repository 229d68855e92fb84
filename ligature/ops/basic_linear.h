// y = x W^T: the GEMM of a linear layer, without its bias.
#pragma once

#include <functional>

#include "ligature/distributed/gather_value.h"
#include "ligature/distributed/overlap_model.h"
#include "ligature/operation.h"
#include "ligature/ops/tensor_parallel.h"
#include "ligature/options.h"
#include "ligature/prepare.h"
#include "ligature/recipes/recipe.h"

namespace ligature {

/// A weight gradient that is added to a buffer of the user's instead of being returned.
struct MainGrad {
  Tensor buffer;
  bool overwrite = false;
  bool return_placeholder = false;  ///< autograd still wants a gradient, of any value
};

/// Refuses a buffer that the gradient of this weight cannot be added to.
void check_main_grad(const BasicOperation& op, const Tensor& weight, const Tensor& buffer);

/// An input that is gathered piece by piece, each with some rows of every rank.
struct ArrivingInput {
  Value own;  ///< this rank's rows, as a GEMM reads them
  int64_t rank = 0, ranks = 1;
  int64_t rows = 0;  ///< of each rank
  struct Piece {
    int64_t first = 0, rows = 0;  ///< of each rank's
    distributed::PendingValue value;
  };
  std::vector<Piece> pieces;
  at::DimVector sizes;  ///< of the whole input
};

/// Operands are contiguous and in the compute dtype, or quantized.
struct LinearFwdArgs {
  Value x;
  Value w;
  at::ScalarType dtype = at::kFloat;  ///< of the result
  Tensor bias;                        ///< optional
  Tensor add;                         ///< optional: added to the result ...
  bool add_in_place = false;          ///< ... and overwritten by it
  double alpha = 1.0;                 ///< factor of x W^T
  SplitAccumulation split;            ///< as the recipe has it
  Value shard;                        ///< where `x` was gathered: this rank's part, to be saved
  bool saves_input = false;  ///< the input is saved as it came in, and quantized in backward
  std::shared_ptr<ArrivingInput> arriving;  ///< instead of `x`

  /// Of quantized operands.
  kernels::ProductArgs product() const {
    return {dtype, bias, add, alpha, kernels::accumulation(split.forward)};
  }
};

struct LinearBwdArgs {
  Value x;  ///< as saved; undefined when the weight needs no gradient
  Value w;  ///< as saved; undefined when the input needs none
  Value dy;
  Tensor add;  ///< optional: added to the input's gradient
  double alpha = 1.0;
  bool input_requires_grad = false;
  bool weight_requires_grad = false;
  bool bias_requires_grad = false;  ///< of a bias that is added to the output
  at::ScalarType input_dtype = at::kFloat;
  at::ScalarType weight_dtype = at::kFloat;
  at::ScalarType compute_dtype = at::kFloat;
  SplitAccumulation split;
  /// Waits for the input of all ranks, where it is gathered: in the place of `x`.
  std::function<Value()> gathered_x;

  bool is_quantized() const { return dy.is_quantized() || x.is_quantized() || w.is_quantized(); }
};

struct LinearGrads {
  Tensor dx;
  Tensor dw;
  Tensor dbias;  ///< in the compute dtype
};

/// A weight as a GEMM of forward is given it: in the target's format, where there is one; from
/// `cache`, if not null, while `owner`, the parameter that it is or is a part of, stays as it is.
Value weight_operand(const Value& weight, const Target& target, at::ScalarType dtype,
                     WeightCache* cache, const Tensor& owner);

/// The input of a linear as its forward had it, made again in backward: its format, in the
/// orientation that the weight's gradient needs. No target where that computes in high precision.
struct RecomputedInput {
  /// `quantization` may be null. `scale`: that of delayed scaling in forward.
  RecomputedInput(const OpQuantization* quantization, size_t index, const Tensor& scale);
  Target target() const { return {quantizer.get(), usage}; }

  QuantizerPtr quantizer;
  Usage usage{false, true};
};

struct BasicLinearOptions : ParameterOptions {
  BasicLinearOptions() = default;
  BasicLinearOptions(int64_t in_features_, int64_t out_features_)
      : in_features(in_features_), out_features(out_features_) {}

  int64_t in_features = 0;
  int64_t out_features = 0;
  bool accumulate_into_main_grad = false;
  /// Asks for GEMMs that are cut into pieces, each computed while the next one travels.
  std::optional<std::string> userbuffers_comm_name;
  /// The sizes above are those of the whole layer.
  TensorParallelOptions tensor_parallel;

  template <class F>
  void fields(F&& f) {
    f("in_features", in_features);
    f("out_features", out_features);
    f("accumulate_into_main_grad", accumulate_into_main_grad);
    f("userbuffers_comm_name", userbuffers_comm_name);
    tensor_parallel.fields(f);
  }
};

/// Saved from forward to backward.
struct LinearState {
  std::optional<at::ScalarType> dtype;  ///< that it computes in
  std::optional<at::ScalarType> input_dtype;
  std::optional<at::ScalarType> weight_dtype;
  bool calibrating = false;

  template <class F>
  void fields(F&& f) {
    f("dtype", dtype);
    f("input_dtype", input_dtype);
    f("weight_dtype", weight_dtype);
    f("calibrating", calibrating);
  }
};

class BasicLinearImpl : public Operation<BasicLinearImpl> {
 public:
  LIGATURE_BUILTIN(BasicLinearImpl)
  using Options = BasicLinearOptions;
  explicit BasicLinearImpl(Options options);
  BasicLinearImpl(int64_t in_features, int64_t out_features)
      : BasicLinearImpl(Options(in_features, out_features)) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void initialize_parameter(const std::string& name, Tensor& parameter) override;
  void pretty_print(std::ostream& stream) const override;
  bool accepts_kwarg(const std::string& name) const override;
  std::string note() const override;
  bool takes_quantized_parameter(size_t /*index*/) const override { return true; }

  std::vector<QuantizerRole> forward_quantizer_roles() const override;
  std::vector<QuantizerRole> backward_quantizer_roles() const override;
  Usage input_usage(const GradFlags& needs) const override { return {true, needs.param(0)}; }
  Usage grad_output_usage(const GradFlags& needs) const override {
    return {needs.input, needs.param(0)};
  }

  // How it is spread over the ranks of a group.
  TensorParallel parallel() const { return parallel_; }
  bool is_parallel() const { return parallel_ != TensorParallel::None; }
  bool shares_tokens() const { return is_parallel() && options.tensor_parallel.sequence_parallel; }
  /// Is its input one rank's tokens, to be gathered?
  bool gathers_input() const { return parallel_ == TensorParallel::Column && shares_tokens(); }
  /// Does it give one rank's tokens of a sum?
  bool scatters_output() const { return parallel_ == TensorParallel::Row && shares_tokens(); }
  int64_t local_in_features() const;
  int64_t local_out_features() const;
  distributed::GroupPtr group() const { return group_of(options.tensor_parallel, label()); }
  std::optional<Communication> communication() const override;
  void share_amax(OpQuantization& own) const override;
  /// Starts to gather the saved input before backward comes to it, if backward will want it.
  void start_gather_ahead(OperationContext& ctx) const;

  // The pieces, for fusions that cover a linear.
  at::ScalarType compute_dtype(const OpArgs& args) const;
  /// `pieces`: a gathered input may arrive piece by piece.
  LinearFwdArgs forward_args(const Value& input, const OpArgs& args, bool pieces = false) const;
  static Tensor forward(const LinearFwdArgs& args);
  /// What forward made and backward needs: quantized operands, where there are some.
  static ToSave to_save(const LinearFwdArgs& fwd, const OpArgs& args);
  /// Saves `x` for the weight's gradient; an undefined one is to be made again in backward. Where
  /// `kept` has quantized operands, it saves those.
  void save_ctx(OperationContext& ctx, const Value& x, at::ScalarType input_dtype, ToSave& to_save,
                const OpArgs& args) const;
  /// Takes the saved input.
  LinearBwdArgs backward_args(OperationContext& ctx, const Value& grad_output) const;
  /// With the operands given instead of saved; either is used only where it is needed. An undefined
  /// `x` is for the caller to fill in.
  LinearBwdArgs backward_args(const OperationContext& ctx, const Value& grad_output, const Value& x,
                              const Value& w) const;
  /// The weight's gradient; undefined where this thread's filler makes it later.
  Tensor weight_grad_or_later(LinearBwdArgs args, const OperationContext& ctx);
  /// The weight's gradient first: `x` is released before there is an input's gradient.
  LinearGrads backward(LinearBwdArgs args, const OperationContext& ctx);

  /// Where weight gradients go with `accumulate_into_main_grad`.
  void set_main_grad(Tensor buffer, bool overwrite = false) {
    main_grad_ = {buffer, overwrite, false};
  }

  const Tensor& weight() const { return parameter_owner().own_parameters()["weight"]; }

  Options options;
  void check_options(const Options& given) const;
  LIGATURE_OPTIONS_AS_DATA

 private:
  /// The input of all ranks, in low precision as `target` says, and what of it is saved.
  void gather_input(LinearFwdArgs& out, const Value& input, const Target& target,
                    const std::function<Value()>& meanwhile, bool pieces) const;
  /// Gathers `shard`, whose row-wise data are joined.
  void gather_rows(LinearFwdArgs& out, const Value& shard, const std::function<Value()>& meanwhile,
                   bool pieces) const;
  std::vector<ArrivingInput::Piece> start_pieces(const distributed::GroupPtr& ranks,
                                                 const Value& shard, int64_t rows, int64_t pieces,
                                                 int64_t block) const;
  static Tensor forward_arriving(const LinearFwdArgs& args);
  distributed::PendingValue start_gather(const Value& x, at::ScalarType dtype) const;
  std::function<Value()> gathered_input(const OperationContext& ctx, const Value& x, bool quantized,
                                        at::ScalarType dtype) const;
  void infer_parallel(InferResult& result) const;
  /// What the model says of the last gather: pieces, and the share of its time that is hidden.
  std::string overlap_note() const;
  Value gathered_grad_output(const Value& grad_output, const Target& target,
                             at::ScalarType dtype) const;
  /// Sums up over the ranks what one of them has a part of.
  distributed::Transfer start_sum(const Tensor& part, bool scatter) const;
  LinearGrads parallel_backward(LinearBwdArgs args, const OperationContext& ctx);
  Tensor input_grad(const LinearBwdArgs& args, bool quantized) const;
  Tensor weight_grad(const LinearBwdArgs& args, const OperationContext& ctx);
  /// Does one product give the gradients of the weight and of the bias?
  bool joins_bias_grad(const LinearBwdArgs& args) const;
  void calibrate(const Value& input, const Value& weight, const OpArgs& args) const;

  MainGrad main_grad_;
  TensorParallel parallel_ = TensorParallel::None;
  mutable distributed::OverlapModel overlap_;
};
TORCH_MODULE(BasicLinear);

/// How a host language finds the buffer that belongs to a parameter of its own.
using MainGradLookup = std::function<MainGrad(const BasicOperation&, const Tensor& parameter)>;
void set_main_grad_lookup(MainGradLookup lookup);
/// By it; without a buffer where there is none.
MainGrad find_main_grad(const BasicOperation& op, const Tensor& weight);

}  // namespace ligature
