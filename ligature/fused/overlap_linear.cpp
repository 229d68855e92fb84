#include "ligature/fused/overlap_linear.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>

#include "ligature/fused/common.h"
#include "ligature/kernels/bias.h"

namespace ligature {
namespace {

using Clock = std::chrono::steady_clock;
using distributed::GroupPtr;
using distributed::OverlapModel;
using distributed::PendingValue;
using distributed::rows_of;
using distributed::Transfer;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int64_t row_count(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
}

at::DimVector with_first(at::IntArrayRef sizes, int64_t times, int64_t over, int64_t last) {
  at::DimVector out(sizes);
  out[0] = out[0] * times / over;
  out.back() = last;
  return out;
}

int64_t block_rows(const Value& x) {
  if (!x.is_quantized()) return 1;
  const Format& format = x.quantized()->format_tag();
  return format.block_2d ? format.block_size() : 1;
}

}  // namespace

OverlapLinear::OverlapLinear(const char* name, const OpList& ops)
    : FusedOperation(name, ops), linear_(basic_op<BasicLinearImpl>(0)) {
  bias_ = num_basic_ops() > 1 ? basic_ops()[1]->as<BiasImpl>() : nullptr;
  scatter_ = basic_ops().back()->as<ReduceScatterImpl>();
}

GroupPtr OverlapLinear::group() const {
  return scatter_ != nullptr ? scatter_->group() : linear_.group();
}

std::string OverlapLinear::scatter_label() const {
  return scatter_ != nullptr ? scatter_->label() : linear_.label();
}

OverlapModel::Choice OverlapLinear::choose(const Value& x, int64_t rows, int64_t in, int64_t out) {
  if (x.device().is_meta()) return {};
  const GroupPtr ranks = group();
  const double all = static_cast<double>(rows * ranks->size());
  const OverlapModel::Size size{rows, all * static_cast<double>(out),
                                2.0 * all * static_cast<double>(in * out)};
  // Sums of more than two come out in another order when they are cut otherwise.
  const auto options = ranks->options();
  const bool same_bits = ranks->size() == 2 || options.reduction == distributed::Reduction::Ordered;
  if (!same_bits && options.pieces == 0) return {};
  return model_.choose(ranks, size, x.device().is_cpu());
}

// ---- forward

FuserForwardResult OverlapForwardLinear::fuser_forward_compute(const Value& input, ArgsList args) {
  const LinearFwdArgs fwd =
      linear_bias_args(linear_, bias_, input, args[0], bias_ != nullptr ? &args[1] : nullptr,
                       /*pieces=*/true);
  FuserForwardResult result = fused_forward_result({}, num_basic_ops());
  result.to_save[0] = BasicLinearImpl::to_save(fwd, args[0]);
  result.output = scatters() ? scatter(fwd) : BasicLinearImpl::forward(fwd);
  return result;
}

Tensor OverlapForwardLinear::scatter(const LinearFwdArgs& fwd) {
  const GroupPtr ranks = group();
  const distributed::Purpose purpose{scatter_label(), ""};
  const at::IntArrayRef sizes = fwd.x.sizes();
  const int64_t count = ranks->size(), out_features = linear_.local_out_features();
  distributed::check_divides(scatter_label(), "input", sizes, *ranks);
  const int64_t rows = row_count(sizes) / count;
  const OverlapModel::Choice choice = choose(fwd.x, rows, sizes.back(), out_features);
  const int64_t block = block_rows(fwd.x);
  if (choice.pieces == 1 || rows % block != 0) {
    const auto computing = Clock::now();
    const Tensor y = BasicLinearImpl::forward(fwd);
    const double gemm = seconds_since(computing);
    const auto begin = Clock::now();
    Tensor part = distributed::reduce_scatter(ranks, y, purpose).wait_one();
    if (choice.measure) {
      const double all = static_cast<double>(rows * count * out_features);
      const double transfer = seconds_since(begin);
      model_.learn(ranks, {rows, all, 2.0 * all * static_cast<double>(sizes.back())},
                   {transfer, transfer, gemm});
    }
    return part;
  }
  struct Piece {
    int64_t first, rows;
    Transfer sum;
  };
  std::vector<Piece> pieces;
  const int64_t step = distributed::piece_rows(rows, choice.pieces, block);
  at::TensorOptions like;
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t own = std::min(step, rows - first);
    Tensor together;
    for (int64_t rank = 0; rank < count; ++rank) {
      LinearFwdArgs part = fwd;
      part.x = rows_of(fwd.x, rank * rows + first, own);
      const Tensor y = BasicLinearImpl::forward(part);
      if (!together.defined()) together = at::empty({count * own, y.size(-1)}, y.options());
      together.narrow(0, rank * own, own).copy_(y);
    }
    like = together.options();
    pieces.push_back({first, own, distributed::reduce_scatter(ranks, together, purpose)});
  }
  Tensor result = at::empty(with_first(sizes, 1, count, out_features), like);
  const Tensor flat = result.view({rows, out_features});
  for (Piece& piece : pieces) flat.narrow(0, piece.first, piece.rows).copy_(piece.sum.wait_one());
  return result;
}

void OverlapForwardLinear::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                                  FuserForwardResult& result, ArgsList args) {
  save_basic_op(linear_, *ctxs[0], input, std::move(result.to_save[0]), args[0]);
  if (bias_ != nullptr) save_basic_op(*bias_, *ctxs[1], {}, {}, args[1]);
}

// ---- backward

// Own rows first, then those of the others as they arrive; `dy` is given all of them.
Tensor OverlapBackwardLinear::input_grad_in_pieces(const LinearBwdArgs& args, const Tensor& own,
                                                   int64_t pieces, Tensor& dy) {
  const GroupPtr ranks = group();
  const int64_t rows = row_count(own.sizes()), count = ranks->size();
  const Tensor flat = own.view({rows, own.size(-1)});
  struct Piece {
    int64_t first, rows;
    PendingValue value;
  };
  std::vector<Piece> arriving;
  const int64_t step = distributed::piece_rows(rows, pieces, 1);
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t own_rows = std::min(step, rows - first);
    arriving.push_back({first, own_rows,
                        distributed::all_gather(ranks, Value(flat.narrow(0, first, own_rows)), {},
                                                scatter_->label())});
  }
  dy = at::empty(with_first(own.sizes(), count, 1, own.size(-1)), own.options());
  const Tensor all_dy = dy.view({rows * count, own.size(-1)});
  Tensor dx;
  const auto compute = [&](const Tensor& part, int64_t first) {
    const int64_t n = part.size(0);
    all_dy.narrow(0, first, n).copy_(part);
    if (!args.input_requires_grad) return;
    const Tensor rows_dx = kernels::linear_input_grad(part, args.w.tensor(), {}, args.alpha);
    if (!dx.defined()) {
      dx = at::empty(with_first(own.sizes(), count, 1, rows_dx.size(-1)), rows_dx.options());
    }
    dx.view({rows * count, dx.size(-1)}).narrow(0, first, n).copy_(rows_dx);
  };
  compute(flat, ranks->rank() * rows);
  for (Piece& piece : arriving) {
    const Tensor all = piece.value.wait().tensor();
    for (int64_t rank = 0; rank < count; ++rank) {
      if (rank == ranks->rank()) continue;
      compute(all.narrow(0, rank * piece.rows, piece.rows), rank * rows + piece.first);
    }
  }
  return dx;
}

FuserBackwardResult OverlapBackwardLinear::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                          GradList) {
  FuserBackwardResult out = fused_backward_result(num_basic_ops());
  OperationContext& ctx = *ctxs[0];
  const LinearState state = ctx.state.as<LinearState>();
  const at::ScalarType dtype = state.dtype.value_or(grad_output.dtype());
  const int64_t rows = row_count(grad_output.sizes());
  const bool plain = ctx.quantization == nullptr && !grad_output.is_quantized() &&
                     grad_output.dtype() == dtype && ctx.requires_grad.op;
  OverlapModel::Choice choice;
  if (plain && rows > 0) {
    choice = choose(grad_output, rows, linear_.local_in_features(), linear_.local_out_features());
  }
  const bool overlap = group()->options().overlap && !choice.measure;
  if (plain && rows > 0 && overlap && !grad_output.device().is_meta()) {
    LinearBwdArgs args = linear_.backward_args(ctx, grad_output);
    Tensor dy;
    const Tensor dx = input_grad_in_pieces(args, prepare(grad_output), choice.pieces, dy);
    if (args.input_requires_grad) out.grad_input = cast(dx, args.input_dtype);
    if (bias_ != nullptr) {
      out.grad_params[1] = bias_->op_backward(*ctxs[1], dy).grad_params;
    }
    args.dy = dy;
    args.w = {};
    if (args.weight_requires_grad) {
      out.grad_params[0] = {linear_.weight_grad_or_later(std::move(args), ctx)};
    }
    return out;
  }
  const auto begin = Clock::now();
  OpBackwardResult gathered = scatter_->op_backward(*ctxs.back(), grad_output);
  const double transfer = seconds_since(begin);
  Value dy = std::move(gathered.grad_input);
  if (bias_ != nullptr) {
    OpBackwardResult made = bias_->op_backward(*ctxs[1], dy);
    out.grad_params[1] = std::move(made.grad_params);
  }
  const auto computing = Clock::now();
  OpBackwardResult made = linear_.op_backward(ctx, dy);
  if (choice.measure) {
    const double all = static_cast<double>(rows * group()->size() * linear_.local_out_features());
    // The GEMM of the input's gradient; that of the weight's is as large.
    const double share = ctx.requires_grad.param(0) ? 0.5 : 1.0;
    model_.learn(group(), {rows, all, 2.0 * all * static_cast<double>(linear_.local_in_features())},
                 {transfer, transfer, seconds_since(computing) * share});
  }
  out.grad_params[0] = std::move(made.grad_params);
  out.grad_input = std::move(made.grad_input);
  return out;
}

// ---- rules

namespace {

bool wants(const BasicLinearImpl& linear) {
  return linear.options.userbuffers_comm_name.has_value();
}

std::string why_not_forward(const Match& match, const PlanOptions&) {
  const auto& linear = static_cast<const BasicLinearImpl&>(*match.ops.front());
  if (!match.elements[2].empty()) {
    if (linear.is_parallel()) return "its linear exchanges data itself";
    const auto& scatter = static_cast<const ReduceScatterImpl&>(*match.ops.back());
    return scatter.group()->alone() ? "its group has one rank" : "";
  }
  if (!linear.gathers_input()) return "its input does not have to be gathered";
  return wants(linear) ? "" : "it has no userbuffers_options; its input arrives in pieces anyway";
}

std::string why_not_backward(const Match& match, const PlanOptions&) {
  const auto& linear = static_cast<const BasicLinearImpl&>(*match.ops.front());
  if (linear.is_parallel()) return "its linear exchanges data itself";
  const auto& scatter = static_cast<const ReduceScatterImpl&>(*match.ops.back());
  return scatter.group()->alone() ? "its group has one rank" : "";
}

/// A linear that other ranks have to do with; with a ReduceScatter behind it any.
PatternElement linear_with_ranks() {
  return {"BasicLinear over ranks",
          [](at::ArrayRef<OpPtr> ops) -> size_t {
            const auto* linear = dynamic_cast<const BasicLinearImpl*>(ops.front().get());
            if (linear == nullptr) return 0;
            if (linear->gathers_input()) return 1;
            for (const OpPtr& op : ops.slice(1)) {
              if (dynamic_cast<const ReduceScatterImpl*>(op.get()) != nullptr) return 1;
              if (dynamic_cast<const BiasImpl*>(op.get()) == nullptr) return 0;
            }
            return 0;
          },
          false};
}

template <class Op>
OpPtr make(const Match& match) {
  return std::make_shared<Op>(match.ops);
}

}  // namespace

FusionRule overlap_forward_linear_rule() {
  FusionRule rule{"OverlapForwardLinear",
                  {linear_with_ranks(), optional(of<BiasImpl>("Bias")),
                   optional(of<ReduceScatterImpl>("ReduceScatter"))},
                  why_not_forward,
                  make<OverlapForwardLinear>};
  rule.needs_ranks = true;
  return rule;
}

FusionRule overlap_forward_row_linear_rule() {
  FusionRule rule{"OverlapForwardLinear by rows",
                  {{"BasicLinear over ranks by rows",
                    [](at::ArrayRef<OpPtr> ops) -> size_t {
                      const auto* linear = dynamic_cast<const BasicLinearImpl*>(ops.front().get());
                      return linear != nullptr && linear->scatters_output() ? 1 : 0;
                    },
                    false}},
                  nullptr,
                  make<OverlapForwardLinear>};
  rule.needs_ranks = true;
  return rule;
}

FusionRule overlap_backward_linear_rule() {
  FusionRule rule{
      "OverlapBackwardLinear",
      {linear_with_ranks(), optional(of<BiasImpl>("Bias")), of<ReduceScatterImpl>("ReduceScatter")},
      why_not_backward,
      make<OverlapBackwardLinear>};
  rule.needs_ranks = true;
  return rule;
}

}  // namespace ligature
