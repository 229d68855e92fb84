// The base classes of everything that can be fused.
//
// An operation is a description: it holds options, and as a module it owns parameters, but what it
// computes with comes in as arguments. So one operation can run in many threads, under other
// parameters, and inside any fusion that covers it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ligature/base/bound.h"
#include "ligature/context.h"
#include "ligature/meta.h"
#include "ligature/op_quantization.h"

namespace ligature {

class FusibleOperation;
class BasicOperation;
using OpPtr = std::shared_ptr<FusibleOperation>;
using OpList = std::vector<OpPtr>;
using BasicOpPtr = std::shared_ptr<BasicOperation>;

/// Keyword arguments of one basic operation in one call.
struct OpKwargs {
  PlainState values;
  std::vector<std::string> names;  ///< all names given, also of values that only `bound` holds
  std::vector<std::pair<std::string, Tensor>> tensors;  ///< those that are tensors
  BoundPtr bound;                                       ///< a binding's own form of them

  /// The tensor of this name; undefined if there is none.
  Tensor tensor(const std::string& name) const {
    for (const auto& [own, value] : tensors) {
      if (own == name) return value;
    }
    return {};
  }
};

/// What one basic operation is given in forward.
struct OpArgs {
  at::ArrayRef<Tensor> params;
  at::ArrayRef<Tensor> extra_inputs;
  GradFlags requires_grad;
  bool training = true;
  const OpKwargs* kwargs = nullptr;
  const Quantizer* prev_op_grad_output_quantizer = nullptr;
  const Quantizer* next_op_input_quantizer = nullptr;
  Usage next_op_input_usage;
  /// Its own quantizers; null when it computes in high precision.
  OpQuantization* quantization = nullptr;
  bool calibrating = false;  ///< compute in high precision, but note what quantizers would see
  bool keep_weights = true;  ///< in low precision, for calls with the same weights
  std::optional<at::ScalarType> autocast_dtype;

  /// The format in which the next operation takes this one's output.
  Target output_target() const { return {next_op_input_quantizer, next_op_input_usage}; }
};

/// What a forward computed and did not take from its arguments: fresh tensors and plain state.
struct ToSave {
  std::vector<Value> tensors;
  PlainState state;
  BoundPtr bound;  ///< a binding's own form of the state
};

struct OpForwardResult {
  Value output;
  ToSave to_save;
};

struct OpBackwardResult {
  Value grad_input;
  std::vector<Tensor> grad_params;
};

/// Lists have one entry per basic operation.
struct FuserForwardResult {
  Value output;
  std::vector<std::vector<Tensor>> extra_outputs;
  std::vector<ToSave> to_save;
};

struct FuserBackwardResult {
  Value grad_input;
  std::vector<std::vector<Tensor>> grad_params;
  std::vector<std::vector<Tensor>> grad_extra_inputs;
};

/// Where a checkpoint in another layout has a parameter.
struct OtherPlace {
  std::vector<std::string> entries;  ///< it is a stack of these, or a row of the only one
  std::optional<int64_t> row;
  int64_t rows = 0;  ///< of that one
};

using CtxList = at::ArrayRef<OperationContext*>;
using ArgsList = at::ArrayRef<OpArgs>;
using GradList = at::ArrayRef<std::vector<Tensor>>;

/// How an operation exchanges data with other ranks.
struct Communication {
  std::optional<std::string> group;  ///< the group's name; none: torch's default group
  int64_t ranks = 1;
  bool gathers = false;   ///< it takes one rank's tokens and gives those of all ranks
  bool scatters = false;  ///< it takes the tokens of all ranks and gives those of one
};

class FusibleOperation : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  virtual bool is_fused_op() const = 0;
  /// The basic operations it stands for, in order; a basic operation stands for itself.
  virtual std::vector<BasicOpPtr> basic_ops() = 0;
  /// The name in messages and plans.
  virtual std::string label() const { return name(); }

  virtual void pre_first_fuser_forward() {}
  virtual void pre_fuser_forward(bool /*requires_grad*/) {}
  virtual QuantizerPtr get_input_quantizer() { return nullptr; }
  virtual QuantizerPtr get_grad_output_quantizer() { return nullptr; }

  /// Split form, pure: changes nothing, keeps nothing, returns no alias of an argument as kept.
  virtual FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args);
  virtual void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                                      ArgsList args);
  /// Classic form. By default it is the two halves of the split form.
  virtual FuserForwardResult fuser_forward(CtxList ctxs, const Value& input, ArgsList args);
  virtual FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                             GradList grad_extra_outputs);

  /// Does this class compute with the host language, so that its shapes are unknown beforehand and
  /// its steps run with the caller's dispatch state?
  virtual bool is_python_op() const { return false; }
  /// Are all its kernels Ligature's own or ATen's? Launches may then be held while it runs. Only a
  /// class itself can say so, not one that is derived from it: LIGATURE_BUILTIN.
  virtual bool is_builtin() const { return false; }
  /// May its backward release saved tensors (OperationContext::release_saved)? A fused operation
  /// must not look at a context again after it called a backward of the operation it belongs to.
  virtual bool releases_saved() const { return !is_fused_op(); }
  /// May it cover the producer and the consumer of a channel? It then runs that channel itself: it
  /// is given an undefined tensor for the consumer's extra input, and may return one for the
  /// producer's extra output unless that is public or has a consumer outside.
  virtual bool handles_internal_channels() const { return true; }

  /// The object that stands for this operation in a language binding.
  BoundPtr bound;

  const torch::OrderedDict<std::string, Tensor>& own_parameters() const { return parameters_; }

  /// Writes its parameters and the state of delayed scaling as plain tensors; a quantized parameter
  /// as its parts.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Takes them from an archive in any format, or in none. What cannot be read leaves it as it was.
  void load(torch::serialize::InputArchive& archive) override;
  /// Where a checkpoint that has no entry of this parameter may have it.
  virtual std::optional<OtherPlace> other_place(const std::string& /*parameter*/) const {
    return std::nullopt;
  }
  /// The basic operation whose recipe state is kept below this module's name; null for none.
  virtual BasicOperation* recipe_state_owner() { return nullptr; }
  /// As torch's. A quantized parameter becomes a plain one for a dtype that low precision cannot
  /// stand for, as float64.
  using torch::nn::Module::to;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;

 protected:
  /// Gives `to` copies of the parameters and of the recipe state of `from`, for clone().
  static void copy_parameters(const FusibleOperation& from, FusibleOperation& to,
                              const std::optional<torch::Device>& device);

 private:
  void dequantize_for(torch::Dtype dtype);
};

/// The smallest operation: parameters, options, a forward and a backward.
class BasicOperation : public FusibleOperation {
 public:
  using FusibleOperation::FusibleOperation;

  bool is_fused_op() const final { return false; }
  std::vector<BasicOpPtr> basic_ops() override;
  std::string label() const override { return label_.empty() ? name() : label_; }
  void set_label(std::string label) { label_ = std::move(label); }

  virtual size_t num_extra_inputs() const { return 0; }
  virtual size_t num_extra_outputs() const { return 0; }
  /// Does it overwrite this extra input?
  virtual bool writes_extra_input(size_t /*index*/) const { return false; }
  /// Is this extra input sizes or indices: integers, which have no gradient?
  virtual bool extra_input_is_integer(size_t /*index*/) const { return false; }
  /// What explain() says that this extra input is; empty for nothing.
  virtual std::string describe_extra_input(size_t /*index*/) const { return ""; }
  /// A value for such an extra input, to check the operation with an input like this.
  virtual Tensor example_extra_input(size_t /*index*/, const ValueMeta& /*input*/) const {
    return {};
  }
  /// May this extra input be on another device than the input?
  virtual bool extra_input_may_be_elsewhere(size_t /*index*/) const { return false; }
  /// Does it compute with this parameter in low precision too? Others are given plain values.
  virtual bool takes_quantized_parameter(size_t /*index*/) const { return false; }
  /// May its backward overwrite the gradient of this extra output?
  virtual bool writes_grad_of_extra_output(size_t /*index*/) const { return false; }

  virtual OpForwardResult op_forward_compute(const Value& input, const OpArgs& args);
  virtual void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                                   const OpArgs& args);
  virtual Value op_forward(OperationContext& ctx, const Value& input, const OpArgs& args);
  virtual OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output);

  /// Makes a context that a user's forward-only fusion filled into one that op_backward reads:
  /// where it holds what the operation of te.ops saves, the rest is added. Returns what is expected
  /// and was not there; empty when nothing is missing.
  virtual std::string complete_context(OperationContext& /*ctx*/, const OpArgs& /*args*/) const {
    return {};
  }

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserForwardResult fuser_forward(CtxList ctxs, const Value& input, ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;

  /// Checks the arguments and tells the shapes of the results without computing them. An operation
  /// that cannot tell returns nothing; it then has to check for itself.
  virtual std::optional<InferResult> infer(const InferArgs& /*args*/) const { return std::nullopt; }

  // Low precision: what a recipe is asked for. The first of forward is the quantizer of the input,
  // the first of backward that of the output's gradient.
  virtual std::vector<QuantizerRole> forward_quantizer_roles() const { return {}; }
  virtual std::vector<QuantizerRole> backward_quantizer_roles() const { return {}; }
  /// Quantizers of what the ranks of a group have parts of share amax, whoever quantizes with them.
  virtual void share_amax(OpQuantization& /*own*/) const {}
  /// Which orientations of its input, and of its output's gradient, it computes with.
  virtual Usage input_usage(const GradFlags& needs) const { return {true, needs.op}; }
  virtual Usage grad_output_usage(const GradFlags& needs) const {
    return {needs.input, needs.params.any()};
  }
  /// Its quantizers for a recipe, made on first use, which is from now on the one used last. There
  /// is one state of delayed scaling for all recipes of that kind. Recipes that were not used for
  /// long are forgotten; that state is not.
  OpQuantizationPtr quantization(const RecipePtr& recipe, at::Device device);
  /// The same for a recipe that is only looked at: which one was used last stays as it is.
  OpQuantizationPtr find_quantization(const RecipePtr& recipe, at::Device device);
  /// Is this of the recipe used last, and follows its state this recipe?
  bool computes_with(const OpQuantization& own, const RecipePtr& recipe) const {
    return last_used_.load(std::memory_order_relaxed) == &own && own.follows(recipe);
  }
  /// Those of the recipe used last; null before any.
  OpQuantizationPtr quantization() const;
  /// Of every recipe that it still remembers, the last used one at the end.
  std::vector<OpQuantizationPtr> quantizations() const;
  /// What delayed scaling remembers, one entry per quantizer, null where there is nothing yet.
  struct DelayedStates {
    std::vector<DelayedScalePtr> forward, backward;
  };
  DelayedStates delayed_states() const;
  /// Begins anew with a recipe: factors of 1, no history.
  void reset_recipe_state(const RecipePtr& recipe, at::Device device);
  BasicOperation* recipe_state_owner() override { return this; }
  /// Does its first quantizer quantize the whole input, and so the gradient of its output? The
  /// operation beside it may then do it.
  virtual bool quantizes_input_whole() const { return true; }
  /// None where it computes alone.
  virtual std::optional<Communication> communication() const { return std::nullopt; }
  /// Does it behave differently in training and in evaluation?
  virtual bool uses_training() const { return false; }
  virtual bool accepts_kwarg(const std::string& /*name*/) const { return false; }

  // Options as data: names and values, for pictures, copies and language bindings.
  virtual PlainState options_state() const { return {}; }
  virtual void set_option(const std::string& name, const PlainValue& value);

  /// Gives a fresh parameter its initial values.
  virtual void initialize_parameter(const std::string& name, Tensor& parameter);

  // Channels: an extra output joined by name to later extra inputs of the same fuser. Without a
  // name the binding is taken away, and the extra input or output is the caller's again.
  void set_extra_input_channel(int64_t index, std::optional<std::string> channel);
  void set_extra_output_channel(int64_t index, std::optional<std::string> channel,
                                bool output_to_caller = true);
  const std::string& extra_input_channel(size_t index) const;
  const std::string& extra_output_channel(size_t index) const;
  bool extra_output_to_caller(size_t index) const;
  /// Takes over name and channels of another operation, but not that they are fixed.
  void copy_bindings(const BasicOperation& other) {
    label_ = other.label_;
    input_channels_ = other.input_channels_;
    output_channels_ = other.output_channels_;
  }
  /// A fuser read the bindings; from here on they are fixed.
  void lock_channels() { channels_locked_ = true; }

  /// The module whose parameters it computes with: itself, or the composite that made it.
  const FusibleOperation& parameter_owner() const { return owner_ ? *owner_ : *this; }
  void set_parameter_owner(const FusibleOperation* owner) { owner_ = owner; }
  virtual std::vector<std::string> parameter_names() const;
  /// Does it compute without its parameters too, where the composite it is a part of has none?
  virtual bool parameters_are_optional() const { return false; }
  /// Those of the composite, or its own. One that is optional and not there is left out.
  void collect_parameters(std::vector<Tensor>& out) const;
  /// What explain() says about it besides the plan; empty for nothing.
  virtual std::string note() const { return ""; }

 protected:
  /// Registers a parameter of this shape, initialized.
  Tensor& add_parameter(const std::string& name, at::IntArrayRef sizes,
                        const at::TensorOptions& options);

 private:
  void check_channel(const char* what, int64_t index, size_t count,
                     const std::optional<std::string>& channel) const;

  struct OutputChannel {
    std::string name;
    bool to_caller = true;
  };
  std::string label_;
  const FusibleOperation* owner_ = nullptr;
  std::vector<std::string> input_channels_;
  std::vector<OutputChannel> output_channels_;
  bool channels_locked_ = false;
  OpQuantizationPtr find_known(const RecipePtr& recipe) const;
  void share_state(OpQuantization& made);
  static uint64_t next_serial();
  const uint64_t serial_ = next_serial();  // processes that make the same model count alike
  mutable std::mutex quantization_mutex_;
  std::vector<OpQuantizationPtr> quantizations_;  // the last used one at the end
  DelayedStates delayed_states_;
  std::atomic<const OpQuantization*> last_used_{nullptr};
};

/// Replaces one or more basic operations in forward, in backward or in both. Holds no parameters
/// and no state.
class FusedOperation : public FusibleOperation {
 public:
  FusedOperation(std::string name, const OpList& ops);

  bool is_fused_op() const final { return true; }
  std::vector<BasicOpPtr> basic_ops() override { return basic_ops_; }
  void pre_first_fuser_forward() override;
  void pre_fuser_forward(bool requires_grad) override;
  QuantizerPtr get_input_quantizer() override;
  QuantizerPtr get_grad_output_quantizer() override;

 protected:
  template <class Op>
  Op& basic_op(size_t i) const {
    LIGATURE_CHECK(i < basic_ops_.size(), "[", label(), "] has ", basic_ops_.size(),
                   " basic operations, so there is none with index ", i);
    auto* op = basic_ops_[i]->as<Op>();
    LIGATURE_CHECK_TYPE(op != nullptr, "[", label(), "] its basic operation ", i, " is a ",
                        basic_ops_[i]->name(), ", not of the class asked for");
    return *op;
  }
  size_t num_basic_ops() const { return basic_ops_.size(); }

 private:
  std::vector<BasicOpPtr> basic_ops_;
};

/// Base of a concrete basic operation written in C++. It refuses, when compiled, a class with half
/// of the split form or with both forms, and gives it `clone()`. `Self` has an `Options` type, a
/// member `options` and a constructor from it. `Base` is what a family of operations has in common.
template <class Self, class Base = BasicOperation>
class Operation : public Base {
 public:
  template <class... Args>
  explicit Operation(std::string name, Args&&... args)
      : Base(std::move(name), std::forward<Args>(args)...) {
    check_forms();
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const Self& self = static_cast<const Self&>(*this);
    auto copy = std::make_shared<Self>(self.options);
    this->copy_parameters(*this, *copy, device);
    copy->copy_bindings(self);
    copy->train(this->is_training());
    return copy;
  }

 private:
  static constexpr void check_forms() {
    constexpr bool compute = !std::is_same_v<decltype(&Self::op_forward_compute),
                                             decltype(&BasicOperation::op_forward_compute)>;
    constexpr bool save = !std::is_same_v<decltype(&Self::op_forward_save_ctx),
                                          decltype(&BasicOperation::op_forward_save_ctx)>;
    constexpr bool classic =
        !std::is_same_v<decltype(&Self::op_forward), decltype(&BasicOperation::op_forward)>;
    constexpr bool fuser_compute =
        !std::is_same_v<decltype(&Self::fuser_forward_compute),
                        decltype(&BasicOperation::fuser_forward_compute)>;
    constexpr bool fuser_save = !std::is_same_v<decltype(&Self::fuser_forward_save_ctx),
                                                decltype(&BasicOperation::fuser_forward_save_ctx)>;
    constexpr bool fuser_classic =
        !std::is_same_v<decltype(&Self::fuser_forward), decltype(&BasicOperation::fuser_forward)>;
    static_assert(compute == save,
                  "an operation in the split form defines op_forward_compute and "
                  "op_forward_save_ctx, not one of them");
    static_assert(fuser_compute == fuser_save,
                  "an operation in the split form defines fuser_forward_compute and "
                  "fuser_forward_save_ctx, not one of them");
    static_assert(
        !(compute && classic) && !(fuser_compute && fuser_classic),
        "an operation defines its forward in the split form or in the classic form, not in "
        "both");
    static_assert(compute || classic || fuser_compute || fuser_classic,
                  "an operation defines a forward: op_forward_compute and op_forward_save_ctx, or "
                  "op_forward");
  }
};

/// In a class of an operation that calls no kernels but Ligature's own and ATen's.
#define LIGATURE_BUILTIN(Class) \
  bool is_builtin() const override { return typeid(*this) == typeid(Class); }

/// Names of operations, for messages: "LayerNorm, BasicLinear, Bias".
std::string describe(const OpList& ops);
std::string describe(const std::vector<BasicOpPtr>& ops);

// Operations by name, so that a binding can make them from plain options.
using OpFactory = std::function<BasicOpPtr(const PlainState& options)>;
bool register_operation(std::string name, OpFactory factory);
BasicOpPtr make_operation(const std::string& name, const PlainState& options);
std::vector<std::string> operation_names();

}  // namespace ligature
