// A fuser as two functions over flat lists of tensors, for compilers and for whatever else records
// calls or looks at them. They run the same plan as an eager call. What a call depends on besides
// tensors is a constant, kept here under a number; its fuser, too, is known by number.
#pragma once

#include <mutex>

#include "ligature/compile/layout.h"
#include "ligature/fuser/fuser.h"

namespace ligature::compile {

/// All that a traced call depends on besides the sizes of its tensors.
struct TracedCall {
  std::vector<size_t> param_offsets;  ///< as in Call
  std::vector<ValueMeta> params;
  std::vector<bool> training;
  std::vector<OpKwargs> kwargs;
  ValueMeta input;  ///< its dtype and device count, and how many dimensions it has
  std::vector<ValueMeta> extra_inputs;
  /// Of the input, the parameters and the extra inputs; nothing needs one where there are none.
  std::vector<bool> requires_grad;
  std::optional<at::ScalarType> autocast_dtype;
  AutocastState autocast;     ///< whose recipe is computed with
  bool own_autocast = false;  ///< it was entered inside the graph: the thread knows nothing of it
};

/// A traced call with its plan.
class FlatCall {
 public:
  FlatCall(const std::shared_ptr<OperationFuser>& fuser, TracedCall traced);

  /// Equal for equal calls of fusers with the same operations, in every process.
  int64_t id() const { return id_; }
  const TracedCall& traced() const { return traced_; }
  const Plan& plan() const { return *plan_; }
  const std::shared_ptr<const Plan>& plan_ptr() const { return plan_; }
  /// Does all it does lie in its arguments and results? Then a compiler's CUDA graphs may hold it:
  /// no recipe with state outside, no weights that are kept, no code that is not ours.
  bool is_closed() const { return closed_; }
  /// The quantizers of delayed scaling that forward may meet, in a fixed order.
  const std::vector<DelayedScalePtr>& delayed() const { return delayed_; }

  /// Results as the layout says; with delayed scaling, then one flat tensor of largest values.
  std::vector<Tensor> forward(Arguments arguments, const std::vector<Tensor>& scales,
                              int64_t structure);
  /// `grads`: of the outputs, undefined ones are zero. `kept`: as the layout says. `sizes`: of the
  /// input and of the extra inputs. Gives the gradients that exist, in the order of
  /// `requires_grad`. Delayed scaling notes its largest values as in an eager backward.
  std::vector<Tensor> backward(std::vector<Tensor> grads, const std::vector<Tensor>& kept,
                               at::IntArrayRef sizes, int64_t structure);

  /// The layout for inputs of these sizes, found without computing.
  std::shared_ptr<const Layout> layout(at::IntArrayRef sizes);
  /// Which outputs gradients flow through.
  std::vector<bool> differentiable() const;
  /// Which gradients there will be, where these outputs have one.
  std::vector<bool> gradients(at::IntArrayRef sizes, const std::vector<bool>& given);
  /// A layout of this structure, whatever the sizes; the same parts of it count for all of them.
  std::shared_ptr<const Layout> layout_of(int64_t structure);
  /// Multiplications and additions of the GEMMs of a forward, and of a backward.
  int64_t forward_flops(at::IntArrayRef sizes);
  int64_t backward_flops(at::IntArrayRef sizes, const std::vector<bool>& given);

 private:
  struct SavedLayout {
    std::vector<int64_t> sizes;
    std::shared_ptr<const Layout> layout;
  };

  void check_thread() const;
  /// Of the input, the parameters and the extra inputs, counted through.
  const ValueMeta& meta_of(size_t i) const;
  /// Of a tensor that backward is given, for inputs of these sizes.
  ValueMeta kept_meta(const Layout& layout, const Source& source, at::IntArrayRef sizes) const;
  Call make_call(const Arguments& arguments) const;
  std::shared_ptr<const Layout> run(const Arguments& arguments, std::vector<Tensor>& results,
                                    std::shared_ptr<const Layout> known, bool dry) const;
  std::vector<Tensor> run_back(const Layout& layout, std::vector<Tensor> grads,
                               const std::vector<Tensor>& kept) const;
  std::vector<Tensor> run_back_dry(at::IntArrayRef sizes, const std::vector<bool>& given);
  std::shared_ptr<const Layout> find(at::IntArrayRef sizes);
  void keep(at::IntArrayRef sizes, std::shared_ptr<const Layout> layout);
  Arguments without_memory(at::IntArrayRef sizes) const;
  std::string key() const;

  TracedCall traced_;
  std::shared_ptr<const Plan> plan_;
  GradPlan grads_;
  std::vector<DelayedScalePtr> delayed_;
  bool closed_ = false;
  int64_t id_ = 0;
  std::mutex mutex_;
  AmaxReduction reduce_amax_;         // of the last forward, for backward
  std::vector<SavedLayout> layouts_;  // the newest at the end
};

/// Gives the fuser a number: the same one every time.
int64_t register_fuser(const std::shared_ptr<OperationFuser>& fuser);
/// Gives the call a number among the fuser's.
int64_t trace_call(int64_t fuser, TracedCall traced);
/// The quantizers of delayed scaling that operations have for a recipe in forward, in order.
std::vector<DelayedScalePtr> forward_delayed(const std::vector<OpQuantizationPtr>& quantizations);
/// A tensor that keeps the fuser, for whoever holds its memory: so graphs outlive their model. They
/// hand it from call to call; nobody looks into it.
Tensor owner_of(int64_t fuser, at::Device device);
bool is_known(int64_t fuser);
/// Its basic operations. Throws where it is gone.
std::vector<BasicOpPtr> operations_of(int64_t fuser);
/// Throws where the fuser is gone or knows no such call. One that was not used for long is planned
/// anew.
std::shared_ptr<FlatCall> find_call(int64_t fuser, int64_t call);
/// The plans of the fuser's calls.
std::vector<std::shared_ptr<const Plan>> traced_plans(const OperationFuser& fuser);

}  // namespace ligature::compile
