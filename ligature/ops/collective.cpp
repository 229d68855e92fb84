#include "ligature/ops/collective.h"

#include "ligature/ops/checks.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(AllGather);
LIGATURE_REGISTER_OPERATION(ReduceScatter);
LIGATURE_REGISTER_OPERATION(AllReduce);

namespace {

using distributed::GroupPtr;
using distributed::Purpose;

/// With amax shared over the group: the ranks then quantize with one scale.
QuantizerPtr shared_over(const GroupPtr& group, const Quantizer& quantizer, const std::string& op) {
  const Format& format = quantizer.format_tag();
  const bool has_amax = format.scaling == Scaling::Current || format.scaling == Scaling::NV;
  if (!has_amax || format.row_scaled || quantizer.reduce_amax) return quantizer.shared_from_this();
  auto shared = quantizer.copy();
  shared->reduce_amax = [group, op](Tensor& amax) {
    distributed::all_reduce_max(group, amax, {op, "amax"});
  };
  return shared;
}

void print(std::ostream& stream, const char* name, const std::optional<std::string>& group) {
  stream << "ligature::" << name << "(";
  if (group) stream << "process_group=" << *group;
  stream << ")";
}

InferResult gathered(const BasicOperation& op, const InferArgs& args, const GroupPtr& group) {
  check_floating(op, args.input);
  LIGATURE_CHECK(!args.input.sizes.empty(), "[", op.label(),
                 "] input must have one or more dimensions, got []");
  InferResult result{args.input, {}};
  result.output.sizes[0] *= group->size();
  return result;
}

}  // namespace

void CollectiveOperation::op_forward_save_ctx(OperationContext&, const Value&, ToSave&,
                                              const OpArgs&) {}

Communication CollectiveOperation::exchanges(bool gathers, bool scatters) const {
  return {group_name(), group()->size(), gathers, scatters};
}

Value CollectiveOperation::gather(const Value& shard, const Target& target) const {
  const GroupPtr ranks = group();
  if (ranks->alone()) return shard;
  const ValueMeta meta = ValueMeta::of(shard);
  const int64_t rows = meta.sizes.back() == 0 ? 0 : meta.numel() / meta.sizes.back();
  if (shard.is_quantized()) {
    const QuantizedTensor& q = *shard.quantized();
    const Usage has{q.rowwise().defined(), q.columnwise().defined()};
    for (const Usage usage : {has, Usage{has.rowwise, false}}) {
      if (!usage.rowwise && !usage.columnwise) continue;
      if (distributed::why_not_joined(q.format_tag(), usage, rows).empty()) {
        return distributed::all_gather(ranks, shard, usage, label()).wait();
      }
    }
  } else if (target.from(meta.dtype)) {
    const Format& format = target.quantizer->format_tag();
    const Usage usage = target.usage_on(meta.device);
    const bool fewer = distributed::bytes_per_element(format, usage) <
                       static_cast<double>(c10::elementSize(meta.dtype));
    if (fewer && distributed::why_not_joined(format, usage, rows).empty()) {
      const QuantizerPtr shared = shared_over(ranks, *target.quantizer, label());
      return distributed::all_gather(ranks, shared->quantize(prepare(shard), usage), usage, label())
          .wait();
    }
  }
  return distributed::all_gather(ranks, Value(prepare(shard)), {}, label()).wait();
}

Tensor CollectiveOperation::scatter(const Value& x) const {
  return distributed::reduce_scatter(group(), prepare(x), Purpose{label(), ""}).wait_one();
}

// ---- AllGather

OpForwardResult AllGatherImpl::op_forward_compute(const Value& input, const OpArgs& args) {
  return {gather(input, args.output_target()), {}};
}

OpBackwardResult AllGatherImpl::op_backward(OperationContext&, const Value& grad_output) {
  if (group()->alone()) return {grad_output, {}};
  return {scatter(grad_output), {}};
}

std::optional<InferResult> AllGatherImpl::infer(const InferArgs& args) const {
  return gathered(*this, args, group());
}

std::optional<Communication> AllGatherImpl::communication() const { return exchanges(true, false); }

void AllGatherImpl::pretty_print(std::ostream& stream) const {
  print(stream, "AllGather", options.process_group);
}

// ---- ReduceScatter

OpForwardResult ReduceScatterImpl::op_forward_compute(const Value& input, const OpArgs&) {
  if (group()->alone()) return {input, {}};
  return {scatter(input), {}};
}

OpBackwardResult ReduceScatterImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  return {gather(grad_output, ctx.grad_input_target()), {}};
}

std::optional<InferResult> ReduceScatterImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  const GroupPtr ranks = group();
  distributed::check_divides(label(), "input", args.input.sizes, *ranks);
  InferResult result{args.input, {}};
  result.output.sizes[0] /= ranks->size();
  return result;
}

std::optional<Communication> ReduceScatterImpl::communication() const {
  return exchanges(false, true);
}

void ReduceScatterImpl::pretty_print(std::ostream& stream) const {
  print(stream, "ReduceScatter", options.process_group);
}

// ---- AllReduce

OpForwardResult AllReduceImpl::op_forward_compute(const Value& input, const OpArgs&) {
  const GroupPtr ranks = group();
  if (ranks->alone()) return {input, {}};
  return {distributed::all_reduce(ranks, prepare(input), Purpose{label(), ""}).wait_one(), {}};
}

OpBackwardResult AllReduceImpl::op_backward(OperationContext&, const Value& grad_output) {
  return {grad_output, {}};
}

std::optional<InferResult> AllReduceImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  return InferResult{args.input, {}};
}

std::optional<Communication> AllReduceImpl::communication() const {
  return exchanges(false, false);
}

void AllReduceImpl::pretty_print(std::ostream& stream) const {
  print(stream, "AllReduce", options.process_group);
}

}  // namespace ligature
