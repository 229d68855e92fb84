// y = x, and x once more as an extra output: where a branch begins.
#pragma once

#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct MakeExtraOutputOptions {
  MakeExtraOutputOptions() = default;
  explicit MakeExtraOutputOptions(bool in_place_) : in_place(in_place_) {}

  bool in_place = false;  ///< backward may add into the memory of the extra output's gradient

  template <class F>
  void fields(F&& f) {
    f("in_place", in_place);
  }
};

/// Example, a residual connection:
/// ```
/// MakeExtraOutput fork;
/// AddExtraInput join;
/// fork->set_extra_output_channel(0, "residual", /*output_to_caller=*/false);
/// join->set_extra_input_channel(0, "residual");
/// OperationFuser fuser({fork.ptr(), norm.ptr(), linear.ptr(), join.ptr()});
/// ```
class MakeExtraOutputImpl : public Operation<MakeExtraOutputImpl> {
 public:
  LIGATURE_BUILTIN(MakeExtraOutputImpl)
  using Options = MakeExtraOutputOptions;
  explicit MakeExtraOutputImpl(Options given = {}) : Operation("MakeExtraOutput"), options(given) {}

  size_t num_extra_outputs() const override { return 1; }
  bool writes_grad_of_extra_output(size_t) const override { return options.in_place; }
  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;
  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  void pretty_print(std::ostream& stream) const override;

  /// May this gradient of the extra output be written to? `dy` is what is going to be added. The
  /// gradient of a channel belongs to the operations that made it.
  bool may_accumulate_into(const Tensor& grad_extra, const Tensor& dy) const;

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(MakeExtraOutput);

}  // namespace ligature
