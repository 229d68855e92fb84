// y = extra + x: where a branch joins.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct AddExtraInputOptions {
  AddExtraInputOptions() = default;
  explicit AddExtraInputOptions(bool in_place_) : in_place(in_place_) {}

  /// Add into the memory of the extra input, which becomes the output. A leaf that needs a gradient
  /// is given the sum too, and the gradient of the values before.
  bool in_place = false;

  template <class F>
  void fields(F&& f) {
    f("in_place", in_place);
  }
};

/// Saved from forward to backward.
struct AddExtraInputState {
  std::optional<at::ScalarType> input_dtype;
  std::optional<at::ScalarType> extra_dtype;

  template <class F>
  void fields(F&& f) {
    f("input_dtype", input_dtype);
    f("extra_dtype", extra_dtype);
  }
};

/// Example:
/// ```
/// AddExtraInput residual;
/// OperationFuser fuser({linear.ptr(), residual.ptr()});
/// Tensor y = fuser(x, {skip})[0];
/// ```
class AddExtraInputImpl : public Operation<AddExtraInputImpl> {
 public:
  LIGATURE_BUILTIN(AddExtraInputImpl)
  using Options = AddExtraInputOptions;
  explicit AddExtraInputImpl(Options given = {}) : Operation("AddExtraInput"), options(given) {}

  size_t num_extra_inputs() const override { return 1; }
  bool writes_extra_input(size_t) const override { return options.in_place; }
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  // The pieces, for fusions that cover the addition. Whoever writes into the extra input calls
  // mark_changed.
  Tensor forward(const Tensor& x, const Tensor& extra) const;
  static void mark_changed(const Tensor& t);
  static void save_dtypes(OperationContext& ctx, at::ScalarType input, at::ScalarType extra);
  /// The gradients of the input and of the extra input, where needed.
  static std::pair<Tensor, Tensor> backward(const OperationContext& ctx, const Value& grad_output);

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(AddExtraInput);

}  // namespace ligature
