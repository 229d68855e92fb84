// y_g = x_g W_g^T + b_g for consecutive groups of rows: the linear layers of the experts of a
// mixture, in one operation. How many rows a group has is said by an extra input.
#pragma once

#include <deque>
#include <mutex>

#include "ligature/kernels/grouped_gemm.h"
#include "ligature/ops/basic_linear.h"

namespace ligature {

struct GroupedLinearOptions : ParameterOptions {
  GroupedLinearOptions() = default;
  GroupedLinearOptions(int64_t num_groups_, int64_t in_features_, int64_t out_features_)
      : num_groups(num_groups_), in_features(in_features_), out_features(out_features_) {}

  int64_t num_groups = 0;
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool bias = true;
  bool accumulate_into_main_grad = false;
  bool single_grouped_weight = false;  ///< one parameter "weight" [num_groups, out, in]
  bool single_grouped_bias = false;    ///< one parameter "bias" [num_groups, out]
  bool delay_wgrad_compute = false;    ///< weight gradients are made by backward_dw()
  bool scale_bias = false;             ///< a second extra input: each row's bias times its scale

  template <class F>
  void fields(F&& f) {
    f("num_groups", num_groups);
    f("in_features", in_features);
    f("out_features", out_features);
    f("bias", bias);
    f("accumulate_into_main_grad", accumulate_into_main_grad);
    f("single_grouped_weight", single_grouped_weight);
    f("single_grouped_bias", single_grouped_bias);
    f("delay_wgrad_compute", delay_wgrad_compute);
    f("scale_bias", scale_bias);
  }
};

/// Saved from forward to backward.
struct GroupedLinearState {
  std::optional<at::ScalarType> dtype;  ///< that it computes in
  std::optional<at::ScalarType> input_dtype;
  std::optional<at::ScalarType> weight_dtype;
  std::optional<at::ScalarType> bias_dtype;
  std::optional<int64_t> num_saved_biases;
  bool calibrating = false;
  bool writes_grad_input = false;  ///< into a buffer of the caller's

  template <class F>
  void fields(F&& f) {
    f("dtype", dtype);
    f("input_dtype", input_dtype);
    f("weight_dtype", weight_dtype);
    f("bias_dtype", bias_dtype);
    f("num_saved_biases", num_saved_biases);
    f("calibrating", calibrating);
    f("writes_grad_input", writes_grad_input);
  }
};

/// Names of keyword arguments: where forward writes its result, and backward the input's gradient.
inline constexpr const char* kOutputBuffer = "output";
inline constexpr const char* kGradInputBuffer = "grad_input";

/// What the GEMMs of forward take.
struct GroupedFwdArgs {
  Tensor x;      ///< [rows, in], or what `index` takes rows of, in the compute dtype
  Tensor index;  ///< int32 [rows]; optional
  kernels::Groups groups;
  std::vector<Value> w;      ///< [out, in] each, in the compute dtype or quantized
  std::vector<Tensor> bias;  ///< in the compute dtype; empty for none
  Tensor row_scale;          ///< float [rows], of the bias; optional
  Tensor out;                ///< [rows, out]; optional
  at::ScalarType dtype = at::kFloat;
  OpQuantization* quantization = nullptr;  ///< null in high precision
};

/// What those of backward take.
struct GroupedBwdArgs {
  Tensor dy;        ///< [rows, out], or what `dy_index` takes rows of, in the compute dtype
  Tensor dy_index;  ///< int32 [rows]; optional
  Tensor x;         ///< [rows, in] in the compute dtype, or what `x_index` takes rows of
  Tensor x_index;
  kernels::Groups groups;
  std::vector<Value> w;    ///< as saved; empty where the input needs no gradient
  std::vector<Value> dyq;  ///< dy of each group in low precision; empty in high precision
  Tensor dx;               ///< where the input's gradient goes; optional
  Tensor input_scales;     ///< of delayed scaling: float [groups]
  bool input_requires_grad = false;
  bool weight_requires_grad = false;
  at::ScalarType input_dtype = at::kFloat;
  at::ScalarType weight_dtype = at::kFloat;
  at::ScalarType dtype = at::kFloat;
  OpQuantization* quantization = nullptr;  ///< null in high precision
};

/// Example:
/// ```
/// GroupedLinear experts(GroupedLinearOptions(8, 512, 1024));
/// Tensor y = experts->forward(x, {splits});  // splits: 8 numbers of rows
/// ```
class GroupedLinearImpl : public Operation<GroupedLinearImpl> {
 public:
  LIGATURE_BUILTIN(GroupedLinearImpl)
  using Options = GroupedLinearOptions;
  explicit GroupedLinearImpl(Options options);
  GroupedLinearImpl(int64_t num_groups, int64_t in_features, int64_t out_features)
      : GroupedLinearImpl(Options(num_groups, in_features, out_features)) {}

  size_t num_extra_inputs() const override { return scales_bias() ? 2 : 1; }
  bool extra_input_is_integer(size_t index) const override { return index == 0; }
  Tensor example_extra_input(size_t index, const ValueMeta& input) const override;
  std::string describe_extra_input(size_t index) const override;
  bool extra_input_may_be_elsewhere(size_t index) const override { return index == 0; }
  bool quantizes_input_whole() const override { return false; }
  bool takes_quantized_parameter(size_t index) const override;
  bool accepts_kwarg(const std::string& name) const override {
    return name == kOutputBuffer || name == kGradInputBuffer;
  }
  /// A single parameter's may be one entry per group, and the other way round.
  std::optional<OtherPlace> other_place(const std::string& parameter) const override;
  std::vector<QuantizerRole> forward_quantizer_roles() const override;
  std::vector<QuantizerRole> backward_quantizer_roles() const override;
  void initialize_parameter(const std::string& name, Tensor& parameter) override;
  void pretty_print(std::ostream& stream) const override;
  std::optional<InferResult> infer(const InferArgs& args) const override;

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::string complete_context(OperationContext& ctx, const OpArgs& args) const override;

  /// With `delay_wgrad_compute`: makes the weight gradients of the first backward whose gradients
  /// were not made yet, and adds them to the weights' `grad` or main_grad.
  void backward_dw();
  bool need_backward_dw() const { return options.delay_wgrad_compute; }
  size_t num_delayed() const;

  /// Where the gradient of this weight goes with `accumulate_into_main_grad`.
  void set_main_grad(size_t weight, Tensor buffer, bool overwrite = false);

  // The parts, for fusions that cover it. Parameters are in the order of parameter_names().

  bool scales_bias() const { return options.scale_bias && options.bias; }
  size_t num_weights() const { return options.single_grouped_weight ? 1 : options.num_groups; }
  size_t num_biases() const {
    return !options.bias ? 0 : options.single_grouped_bias ? 1 : options.num_groups;
  }
  size_t first_weight() const;
  size_t first_bias() const;
  bool weights_require_grad(const GradFlags& needs) const;
  bool biases_require_grad(const GradFlags& needs) const;

  at::ScalarType compute_dtype(const OpArgs& args) const;
  kernels::Groups groups_of(const Tensor& splits, int64_t rows, at::Device device) const;
  /// Where the caller wants the result for such an input, as [rows, out], which counts as changed
  /// from here on; undefined where that is left to us. `infer` has checked it.
  Tensor output_buffer(const ValueMeta& input, const OpArgs& args) const;
  /// `x`: of the compute dtype, [rows, in], or what `index` takes rows of.
  GroupedFwdArgs forward_args(const Tensor& x, const Tensor& index, kernels::Groups groups,
                              const OpArgs& args) const;
  static Tensor forward(const GroupedFwdArgs& args);
  /// What forward made and backward needs: the scales of delayed scaling, quantized weights.
  ToSave to_save(const GroupedFwdArgs& fwd, const OpArgs& args) const;
  /// Saves `x` for the weights' gradients; an undefined one is to be made again in backward.
  void save_ctx(OperationContext& ctx, const Value& x, at::ScalarType input_dtype, ToSave& to_save,
                const OpArgs& args) const;
  static const Tensor& saved_splits(const OperationContext& ctx);
  /// The saved input, for the last time: of the compute dtype, [rows, in].
  Tensor release_input(OperationContext& ctx) const;
  /// Without x. `dy`: of the compute dtype, [rows, out], or what `dy_index` takes rows of.
  GroupedBwdArgs backward_args(const OperationContext& ctx, const Tensor& dy,
                               const Tensor& dy_index, kernels::Groups groups) const;
  /// Puts the gradients of the weights where they belong among those of the parameters. Those that
  /// are delayed or added elsewhere are left out.
  void put_weight_grads(const GroupedBwdArgs& args, const OperationContext& ctx,
                        std::vector<Tensor>& grads);
  /// Likewise those of the biases and, among the extra inputs, of their scales.
  void put_bias_grads(const GroupedBwdArgs& args, const OperationContext& ctx,
                      std::vector<Tensor>& grads, std::vector<Tensor>& grad_extra_inputs) const;
  static Tensor input_grad(const GroupedBwdArgs& args);

  Options options;
  void check_options(const Options& given) const;
  LIGATURE_OPTIONS_AS_DATA

 private:
  /// What is saved, then the biases that are, then the weights.
  enum Saved : size_t { kX, kSplits, kRowScale, kInputScales, kNumFixed };

  void add_parameters(const std::string& name, at::DimVector sizes, bool single);
  void check_buffer(const InferArgs& args, const char* name, const ValueMeta& wanted) const;
  /// Those of delayed scaling by which forward quantizes x: float [groups]; undefined without them.
  Tensor input_scales(const OpArgs& args) const;
  void save_state(OperationContext& ctx, at::ScalarType input_dtype, const OpArgs& args) const;
  static at::ArrayRef<Value> saved_weights(const OperationContext& ctx);
  std::vector<MainGrad> main_grads_of(const GroupedBwdArgs& args,
                                      const OperationContext& ctx) const;
  static void put_needed(std::vector<Tensor> made, size_t first, const GradFlags& needs,
                         std::vector<Tensor>& grads);
  Tensor packed_weight_grads(const GroupedBwdArgs& args) const;
  void add_to_main_grads(const std::vector<MainGrad>& mains, const GroupedBwdArgs& args) const;
  void delay(const GroupedBwdArgs& args, const OperationContext& ctx);

  std::vector<MainGrad> main_grads_;
  mutable std::mutex delayed_mutex_;
  std::deque<std::function<void()>> delayed_;
};
TORCH_MODULE(GroupedLinear);

}  // namespace ligature
