// A linear layer over the ranks of a group: which collective runs when, and what runs meanwhile.
//
//   column             forward  none                     backward  dx is summed up beside dw
//   column, sequence   forward  x is gathered            backward  x is gathered beside dx, and dx
//                                                                  scattered beside dw
//   row                forward  y is summed up           backward  none
//   row, sequence      forward  y is scattered           backward  dy is gathered
#include "ligature/distributed/filler.h"
#include "ligature/kernels/bias.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/recipes/recipe.h"

namespace ligature {

using distributed::all_gather;
using distributed::Filler;
using distributed::GroupPtr;
using distributed::PendingValue;
using distributed::Transfer;
using distributed::why_not_joined;

int64_t BasicLinearImpl::local_in_features() const {
  const bool row = parallel_ == TensorParallel::Row;
  return row ? options.in_features / options.tensor_parallel.ranks() : options.in_features;
}

int64_t BasicLinearImpl::local_out_features() const {
  const bool column = parallel_ == TensorParallel::Column;
  return column ? options.out_features / options.tensor_parallel.ranks() : options.out_features;
}

std::optional<Communication> BasicLinearImpl::communication() const {
  if (!is_parallel()) return std::nullopt;
  const bool column = parallel_ == TensorParallel::Column;
  return Communication{options.tensor_parallel.group, options.tensor_parallel.ranks(),
                       shares_tokens() && column, shares_tokens() && !column};
}

void BasicLinearImpl::infer_parallel(InferResult& result) const {
  if (!shares_tokens()) return;
  const int64_t ranks = options.tensor_parallel.ranks();
  auto& sizes = result.output.sizes;
  LIGATURE_CHECK(sizes.size() > 1, "[", label(),
                 "] sequence_parallel spreads the first dimension of its input, so that must have "
                 "two or more, got ",
                 sizes_string(sizes));
  if (gathers_input()) {
    sizes[0] *= ranks;
    return;
  }
  LIGATURE_CHECK(sizes[0] % ranks == 0, "[", label(), "] the first dimension of its output ",
                 sizes_string(sizes), " must be one that ", ranks, " ranks can share evenly");
  sizes[0] /= ranks;
}

void BasicLinearImpl::share_amax(OpQuantization& own) const {
  if (!shares_tokens()) return;
  auto& quantizers = gathers_input() ? own.forward : own.backward;
  if (quantizers.empty() || quantizers[0] == nullptr || !quantizers[0]->is_native()) return;
  const Format& format = quantizers[0]->format_tag();
  const bool has_amax = format.scaling == Scaling::Current || format.scaling == Scaling::NV;
  if (!has_amax || format.row_scaled || quantizers[0]->reduce_amax) return;
  quantizers[0] = quantizers[0]->copy();
  quantizers[0]->reduce_amax = [given = options.tensor_parallel, op = label()](Tensor& amax) {
    distributed::all_reduce_max(group_of(given, op), amax, {op, "amax"});
  };
}

void BasicLinearImpl::gather_input(LinearFwdArgs& out, const Value& input, const Target& target,
                                   const std::function<Value()>& meanwhile) const {
  const GroupPtr ranks = group();
  const auto in_high_precision = [&] {
    return all_gather(ranks, Value(prepare(input, out.dtype)), {}, label());
  };
  if (!target) {
    PendingValue pending = in_high_precision();
    out.w = meanwhile();
    out.x = pending.wait();
    return;
  }
  const Format& format = target.quantizer->format_tag();
  const ValueMeta meta = ValueMeta::of(input);
  const int64_t rows = meta.numel() / meta.sizes.back();
  const Usage rowwise{true, false};
  if (!why_not_joined(format, rowwise, rows).empty()) {
    PendingValue pending = in_high_precision();
    out.w = meanwhile();
    out.x = target.quantizer->quantize(pending.wait().tensor(), rowwise);
    return;
  }
  const Usage wanted = target.usage_on(input.device());
  const bool both = why_not_joined(format, wanted, rows).empty();
  out.shard = quantize_to(input, {target.quantizer, both ? wanted : rowwise}, out.dtype);
  if (!both && out.shard.quantized()->columnwise().defined()) {
    out.shard = out.shard.quantized()->only(true, false);
  }
  PendingValue pending = all_gather(ranks, out.shard, rowwise, label());
  out.w = meanwhile();
  out.x = pending.wait();
}

PendingValue BasicLinearImpl::start_gather(const Value& x, at::ScalarType dtype) const {
  const GroupPtr ranks = group();
  if (x.is_quantized()) {
    const QuantizedTensor& q = *x.quantized();
    // A product over the tokens reads column-wise data, or the other where that can stand in.
    for (const bool columnwise : {true, false}) {
      const Usage usage{!columnwise, columnwise};
      if (!(columnwise ? q.columnwise() : q.rowwise()).defined()) continue;
      if (why_not_joined(q.format_tag(), usage, q.rows()).empty()) {
        return all_gather(ranks, x, usage, label());
      }
    }
  }
  return all_gather(ranks, Value(prepare(x, dtype)), {}, label());
}

std::function<Value()> BasicLinearImpl::gathered_input(const OperationContext& ctx, const Value& x,
                                                       bool quantized, at::ScalarType dtype) const {
  PendingValue pending;
  if (Filler* filler = Filler::current()) pending = filler->take_ahead(this);
  if (!pending.started()) pending = start_gather(x, dtype);
  QuantizerPtr quantizer;
  if (quantized && ctx.quantization->forward_quantizer(0) != nullptr) {
    quantizer = ctx.quantization->forward[0];
  }
  return [pending = std::make_shared<PendingValue>(std::move(pending)), quantizer, dtype]() {
    const Value all = pending->wait();
    if (quantizer == nullptr || !quantizer->is_native()) return Value(prepare(all, dtype));
    return quantize_to(all, {quantizer.get(), {false, true}}, dtype);
  };
}

void BasicLinearImpl::start_gather_ahead(OperationContext& ctx) const {
  Filler* filler = Filler::current();
  if (filler == nullptr || !gathers_input() || !ctx.requires_grad.param(0)) return;
  const Value x = ctx.num_saved() > 0 ? ctx.saved_value(0) : Value();
  if (!x.defined()) return;
  const auto dtype = ctx.state.as<LinearState>().dtype.value_or(x.dtype());
  filler->start_ahead(this, start_gather(x, dtype));
}

Value BasicLinearImpl::gathered_grad_output(const Value& grad_output, const Target& target,
                                            at::ScalarType dtype) const {
  const GroupPtr ranks = group();
  if (target) {
    const ValueMeta meta = ValueMeta::of(grad_output);
    const Usage usage = target.usage_on(grad_output.device());
    const Format& format = target.quantizer->format_tag();
    if (why_not_joined(format, usage, meta.numel() / meta.sizes.back()).empty()) {
      return all_gather(ranks, quantize_to(grad_output, target, dtype), usage, label()).wait();
    }
  }
  const Value all = all_gather(ranks, Value(prepare(grad_output, dtype)), {}, label()).wait();
  return target ? quantize_to(all, target, dtype) : all;
}

Transfer BasicLinearImpl::start_sum(const Tensor& part, bool scatter) const {
  const distributed::Purpose purpose{label(), ""};
  return scatter ? distributed::reduce_scatter(group(), part, purpose)
                 : distributed::all_reduce(group(), part, purpose, /*own=*/true);
}

LinearGrads BasicLinearImpl::parallel_backward(LinearBwdArgs args, const OperationContext& ctx) {
  LinearGrads grads;
  Transfer sum;
  const bool quantized = args.is_quantized();
  if (args.input_requires_grad) {
    grads.dx = input_grad(args, quantized);
    if (parallel_ == TensorParallel::Column) sum = start_sum(grads.dx, shares_tokens());
    args.w = {};
  }
  if (args.bias_requires_grad) {
    grads.dbias = kernels::bias_backward(args.dy.dequantized(), local_out_features());
  }
  const at::ScalarType input_dtype = args.input_dtype;
  if (args.weight_requires_grad) {
    auto make = [this, &ctx](LinearBwdArgs& own) {
      if (own.gathered_x) own.x = std::exchange(own.gathered_x, nullptr)();
      return weight_grad(own, ctx);
    };
    if (Filler* filler = Filler::current()) {
      auto own = std::make_shared<LinearBwdArgs>(std::move(args));
      filler->add([this, filler, own, make] { filler->deliver(this, make(*own)); });
    } else {
      grads.dw = make(args);
    }
  }
  if (sum.started()) grads.dx = distributed::wait_filled(sum)[0];
  if (grads.dx.defined()) grads.dx = cast(grads.dx, input_dtype);
  return grads;
}

}  // namespace ligature
