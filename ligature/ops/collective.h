// Operations that exchange their input with the other ranks of a group, along its first dimension.
#pragma once

#include <optional>
#include <string>

#include "ligature/distributed/gather_value.h"
#include "ligature/operation.h"
#include "ligature/options.h"

namespace ligature {

struct CollectiveOptions {
  CollectiveOptions() = default;
  explicit CollectiveOptions(std::string process_group_)
      : process_group(std::move(process_group_)) {}

  std::optional<std::string> process_group;  ///< its name; none: torch's default group

  template <class F>
  void fields(F&& f) {
    f("process_group", process_group);
  }
};

using AllGatherOptions = CollectiveOptions;
using ReduceScatterOptions = CollectiveOptions;

struct AllReduceOptions : CollectiveOptions {
  using CollectiveOptions::CollectiveOptions;

  /// Accepted for compatibility, no effect: what follows is computed alike on all ranks, so their
  /// gradients agree.
  bool reduce_in_backward = true;

  template <class F>
  void fields(F&& f) {
    CollectiveOptions::fields(f);
    f("reduce_in_backward", reduce_in_backward);
  }
};

/// Base of the three.
class CollectiveOperation : public BasicOperation {
 public:
  using BasicOperation::BasicOperation;
  virtual const std::optional<std::string>& group_name() const = 0;
  distributed::GroupPtr group() const { return distributed::find_group(group_name()); }

  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave& to_save,
                           const OpArgs& args) override;

 protected:
  /// What all ranks have, in the format of `target` where that travels in fewer bytes.
  Value gather(const Value& shard, const Target& target) const;
  Tensor scatter(const Value& x) const;
  Communication exchanges(bool gathers, bool scatters) const;
};

/// y: the inputs of all ranks, in the order of the ranks. Its gradient is scattered.
///
/// Example:
/// ```
/// AllGather gather(AllGatherOptions("tp"));
/// ```
class AllGatherImpl : public Operation<AllGatherImpl, CollectiveOperation> {
 public:
  LIGATURE_BUILTIN(AllGatherImpl)
  using Options = CollectiveOptions;
  explicit AllGatherImpl(Options given = {}) : Operation("AllGather"), options(std::move(given)) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  std::optional<Communication> communication() const override;
  const std::optional<std::string>& group_name() const override { return options.process_group; }
  void pretty_print(std::ostream& stream) const override;

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(AllGather);

/// y: this rank's part of the sum of all ranks' inputs. Its gradient is gathered.
class ReduceScatterImpl : public Operation<ReduceScatterImpl, CollectiveOperation> {
 public:
  LIGATURE_BUILTIN(ReduceScatterImpl)
  using Options = CollectiveOptions;
  explicit ReduceScatterImpl(Options given = {})
      : Operation("ReduceScatter"), options(std::move(given)) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  std::optional<Communication> communication() const override;
  const std::optional<std::string>& group_name() const override { return options.process_group; }
  void pretty_print(std::ostream& stream) const override;

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(ReduceScatter);

/// y: the sum of all ranks' inputs. Its gradient is that of its output.
class AllReduceImpl : public Operation<AllReduceImpl, CollectiveOperation> {
 public:
  LIGATURE_BUILTIN(AllReduceImpl)
  using Options = AllReduceOptions;
  explicit AllReduceImpl(Options given = {}) : Operation("AllReduce"), options(std::move(given)) {}

  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override;
  OpBackwardResult op_backward(OperationContext& ctx, const Value& grad_output) override;
  std::optional<InferResult> infer(const InferArgs& args) const override;
  std::optional<Communication> communication() const override;
  const std::optional<std::string>& group_name() const override { return options.process_group; }
  void pretty_print(std::ostream& stream) const override;

  Options options;
  static void check_options(const Options&) {}
  LIGATURE_OPTIONS_AS_DATA
};
TORCH_MODULE(AllReduce);

}  // namespace ligature
