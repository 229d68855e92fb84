// A linear layer over the ranks of a group: which collective runs when, and what runs meanwhile.
//
//   column             forward  none                     backward  dx is summed up beside dw
//   column, sequence   forward  x is gathered            backward  x is gathered beside dx, and dx
//                                                                  scattered beside dw
//   row                forward  y is summed up           backward  none
//   row, sequence      forward  y is scattered           backward  dy is gathered
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>

#include "ligature/distributed/filler.h"
#include "ligature/kernels/bias.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/recipes/recipe.h"

namespace ligature {

using distributed::all_gather;
using distributed::Filler;
using distributed::GroupPtr;
using distributed::OverlapModel;
using distributed::PendingValue;
using distributed::rows_of;
using distributed::Transfer;
using distributed::why_not_joined;

namespace {

using Clock = std::chrono::steady_clock;

/// For a tensor that every rank has whole: its amax is the same on all of them. Nothing is
/// exchanged, so this may run while collectives of other steps are under way.
QuantizerPtr of_whole(const Quantizer& quantizer) {
  if (!quantizer.reduce_amax) return quantizer.shared_from_this();
  auto made = quantizer.copy();
  made->reduce_amax = nullptr;
  return made;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

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
                                   const std::function<Value()>& meanwhile, bool pieces) const {
  if (!target) return gather_rows(out, Value(prepare(input, out.dtype)), meanwhile, pieces);
  const Format& format = target.quantizer->format_tag();
  const ValueMeta meta = ValueMeta::of(input);
  const int64_t rows = meta.numel() / meta.sizes.back();
  const Usage rowwise{true, false};
  if (!why_not_joined(format, rowwise, rows).empty()) {
    gather_rows(out, Value(prepare(input, out.dtype)), meanwhile, false);
    out.x = of_whole(*target.quantizer)->quantize(out.x.tensor(), rowwise);
    return;
  }
  const Usage wanted = target.usage_on(input.device());
  const bool both = why_not_joined(format, wanted, rows).empty();
  if (!both && !input.is_quantized()) {
    // Column-wise blocks reach over ranks: they are made in backward, of the values themselves.
    out.saves_input = true;
    gather_rows(out, quantize_to(input, {target.quantizer, rowwise}, out.dtype), meanwhile, pieces);
    return;
  }
  out.shard = quantize_to(input, {target.quantizer, both ? wanted : rowwise}, out.dtype);
  if (!both && out.shard.quantized()->columnwise().defined()) {
    out.shard = out.shard.quantized()->only(true, false);
  }
  gather_rows(out, out.shard, meanwhile, pieces);
}

std::vector<ArrivingInput::Piece> BasicLinearImpl::start_pieces(const GroupPtr& ranks,
                                                                const Value& shard, int64_t rows,
                                                                int64_t pieces,
                                                                int64_t block) const {
  std::vector<ArrivingInput::Piece> out;
  const int64_t step = distributed::piece_rows(rows, pieces, block);
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = std::min(step, rows - first);
    out.push_back(
        {first, count, all_gather(ranks, rows_of(shard, first, count), {true, false}, label())});
  }
  return out;
}

void BasicLinearImpl::gather_rows(LinearFwdArgs& out, const Value& shard,
                                  const std::function<Value()>& meanwhile, bool pieces) const {
  const GroupPtr ranks = group();
  const Usage rowwise{true, false};
  const ValueMeta meta = ValueMeta::of(shard);
  const int64_t rows = meta.numel() / std::max<int64_t>(meta.sizes.back(), 1);
  const OverlapModel::Size size{
      rows, static_cast<double>(meta.numel()),
      2.0 * static_cast<double>(meta.numel() * ranks->size() * local_out_features())};
  OverlapModel::Choice choice;
  if (pieces && rows > 0 && !meta.device.is_meta()) {
    choice = overlap_.choose(ranks, size, meta.device.is_cpu());
  }
  const Format* format = shard.is_quantized() ? &shard.quantized()->format_tag() : nullptr;
  const int64_t block = format != nullptr && format->block_2d ? format->block_size() : 1;
  const bool cut = pieces && ranks->options().overlap && !choice.measure && rows > 0 &&
                   !meta.device.is_meta() && rows % block == 0;
  if (!cut) {
    PendingValue pending = all_gather(ranks, shard, rowwise, label());
    out.w = meanwhile();
    const auto begin = Clock::now();
    out.x = pending.wait();
    if (!choice.measure) return;
    // Once, one after the other: what each takes alone.
    distributed::OverlapTimes alone;
    alone.transfer = seconds_since(begin);
    const auto cutting = Clock::now();
    for (auto& piece : start_pieces(ranks, shard, rows, 4, block)) piece.value.wait();
    alone.cut = seconds_since(cutting);
    const auto computing = Clock::now();
    forward(out);
    alone.gemm = seconds_since(computing);
    overlap_.learn(ranks, size, alone);
    return;
  }
  auto arriving = std::make_shared<ArrivingInput>();
  arriving->own = rows_of(shard, 0, rows);
  arriving->rank = ranks->rank();
  arriving->ranks = ranks->size();
  arriving->rows = rows;
  arriving->sizes = meta.sizes;
  arriving->sizes[0] *= ranks->size();
  arriving->pieces = start_pieces(ranks, shard, rows, choice.pieces, block);
  out.w = meanwhile();
  out.arriving = std::move(arriving);
}

Tensor BasicLinearImpl::forward_arriving(const LinearFwdArgs& args) {
  ArrivingInput& in = *args.arriving;
  Tensor y;
  const auto compute = [&](const Value& x, int64_t first) {
    LinearFwdArgs part = args;
    part.arriving = nullptr;
    part.x = x;
    const int64_t count = x.sizes()[0];
    if (args.add.defined()) {
      part.add = args.add.view({-1, args.add.size(-1)}).narrow(0, first, count);
    }
    part.add_in_place = false;
    const Tensor rows = forward(part);
    if (!y.defined()) {
      at::DimVector sizes = in.sizes;
      sizes.back() = rows.size(-1);
      y = args.add_in_place ? args.add : at::empty(sizes, rows.options());
    }
    y.view({-1, y.size(-1)}).narrow(0, first, count).copy_(rows);
  };
  compute(in.own, in.rank * in.rows);
  for (ArrivingInput::Piece& piece : in.pieces) {
    const Value all = piece.value.wait();
    for (int64_t rank = 0; rank < in.ranks; ++rank) {
      if (rank == in.rank) continue;
      compute(distributed::rows_of(all, rank * piece.rows, piece.rows),
              rank * in.rows + piece.first);
    }
  }
  return y;
}

std::string BasicLinearImpl::overlap_note() const { return overlap_.text(); }

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
    quantizer = of_whole(*ctx.quantization->forward[0]);
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
    const bool fewer = distributed::bytes_per_element(format, usage) <
                       static_cast<double>(c10::elementSize(dtype));
    const bool codes = fewer || grad_output.is_quantized();
    if (codes && why_not_joined(format, usage, meta.numel() / meta.sizes.back()).empty()) {
      return all_gather(ranks, quantize_to(grad_output, target, dtype), usage, label()).wait();
    }
  }
  const Value all = all_gather(ranks, Value(prepare(grad_output, dtype)), {}, label()).wait();
  if (!target) return all;
  const QuantizerPtr whole = of_whole(*target.quantizer);
  return quantize_to(all, {whole.get(), target.usage}, dtype);
}

Transfer BasicLinearImpl::start_sum(const Tensor& part, bool scatter) const {
  const distributed::Purpose purpose{label(), ""};
  return scatter ? distributed::reduce_scatter(group(), part, purpose)
                 : distributed::all_reduce(group(), part, purpose, /*own=*/true);
}

Tensor BasicLinearImpl::weight_grad_or_later(LinearBwdArgs args, const OperationContext& ctx) {
  auto make = [this, &ctx](LinearBwdArgs& own) {
    if (own.gathered_x) own.x = std::exchange(own.gathered_x, nullptr)();
    return weight_grad(own, ctx);
  };
  Filler* filler = Filler::current();
  if (filler == nullptr) return make(args);
  auto own = std::make_shared<LinearBwdArgs>(std::move(args));
  filler->add([this, filler, own, make] { filler->deliver(this, make(*own)); });
  return {};
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
  if (args.weight_requires_grad) grads.dw = weight_grad_or_later(std::move(args), ctx);
  if (sum.started()) grads.dx = distributed::wait_filled(sum)[0];
  if (grads.dx.defined()) grads.dx = cast(grads.dx, input_dtype);
  return grads;
}

}  // namespace ligature
