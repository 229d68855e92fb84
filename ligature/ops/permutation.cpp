#include "ligature/ops/permutation.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <limits>
#include <numeric>
#include <optional>
#include <string>

#include "ligature/kernels/routing.h"
#include "ligature/meta.h"
#include "ligature/prepare.h"

namespace ligature {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::ScalarType wide_dtype(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_rows(const char* op, const Tensor& inp) {
  LIGATURE_CHECK_TYPE(at::isFloatingType(inp.scalar_type()), "[", op,
                      "] inp must have a floating dtype, got ", c10::toString(inp.scalar_type()));
  LIGATURE_CHECK(inp.dim() == 2, "[", op, "] inp must be [rows, columns], got ",
                 sizes_string(inp.sizes()));
}

void check_probs(const char* op, const char* what, const Tensor& probs, at::IntArrayRef wanted) {
  if (!probs.defined()) return;
  LIGATURE_CHECK_TYPE(at::isFloatingType(probs.scalar_type()), "[", op, "] ", what,
                      " must have a floating dtype, got ", c10::toString(probs.scalar_type()));
  LIGATURE_CHECK(probs.sizes() == wanted, "[", op, "] ", what, " must be ", sizes_string(wanted),
                 ", got ", sizes_string(probs.sizes()));
}

void check_integers(const char* op, const char* what, const Tensor& t) {
  LIGATURE_CHECK_TYPE(at::isIntegralType(t.scalar_type(), /*includeBool=*/false), "[", op, "] ",
                      what, " must be integers, got ", c10::toString(t.scalar_type()));
}

void check_device(const char* op, const char* what, const Tensor& t, const Tensor& inp) {
  LIGATURE_CHECK(t.device() == inp.device(), "[", op, "] inp and ", what,
                 " must be on one device, got inp on ", inp.device().str(), " and ", what, " on ",
                 t.device().str());
}

// ---- indices: int64, -1 for none

/// from[index] along dimension 0, zeros where there is none.
Tensor gather_rows(const Tensor& from, const Tensor& index) {
  if (from.size(0) == 0) {
    at::DimVector sizes(from.sizes());
    sizes[0] = index.size(0);
    return at::zeros(sizes, from.options());
  }
  Tensor none = at::lt(index, 0);
  if (from.dim() == 2) none = none.unsqueeze(1);
  return at::index_select(from, 0, index.clamp_min(0)).masked_fill_(none, 0);
}

/// Where in `index` each of `rows` numbers is. None is there twice.
Tensor inverse(const Tensor& index, int64_t rows) {
  Tensor places = at::full({rows + 1}, -1, index.options());
  const Tensor flat = index.reshape({-1});
  const Tensor ordinals = at::arange(flat.size(0), index.options());
  places.scatter_(0, flat.masked_fill(at::lt(flat, 0), rows), ordinals);
  return places.narrow(0, 0, rows);
}

/// How the slots of tokens and rows belong together.
struct Places {
  Tensor row_of;   ///< [tokens, slots]
  Tensor slot_of;  ///< [rows]

  Places(Tensor row_of_, int64_t rows)
      : row_of(std::move(row_of_)), slot_of(inverse(row_of, rows)) {}
  Places(Tensor row_of_, Tensor slot_of_)
      : row_of(std::move(row_of_)), slot_of(std::move(slot_of_)) {}
  Tensor token_of() const {
    return row_of.size(1) > 0 ? at::div(slot_of, row_of.size(1), "floor") : slot_of;
  }
};

/// Of each slot, numbered by expert and in the order of tokens.
Tensor rows_of_mask(const Tensor& mask) {
  const Tensor by_expert = mask.t().contiguous();
  const Tensor counted = at::cumsum(by_expert.view({-1}), 0, at::kLong).view(by_expert.sizes());
  return at::sub(counted, 1).masked_fill(by_expert.logical_not(), -1).t().contiguous();
}

Tensor rows_of_index(const Tensor& experts) {
  // Only whether there is one is known of the experts, so all that may be are.
  constexpr int64_t kAny = std::numeric_limits<int32_t>::max();
  const Tensor flat = at::_to_copy(experts, at::kLong).reshape({-1});
  const Tensor none = at::lt(flat, 0);
  const Tensor order = at::argsort(flat.masked_fill(none, kAny), /*stable=*/true, 0, false);
  return inverse(order, flat.size(0)).masked_fill(none, -1).view(experts.sizes());
}

/// Rows that find no place are dropped.
Tensor cut_off(const Tensor& row_of, int64_t rows) {
  return row_of.masked_fill(at::ge(row_of, rows), -1);
}

/// y[t] = sum over the slots of t of x[row], times weights[t, slot] where there are some.
Tensor sum_rows(const Tensor& x, const Places& places, const Tensor& weights) {
  const int64_t tokens = places.row_of.size(0), slots = places.row_of.size(1);
  if (x.size(0) == tokens * slots) {
    const Tensor map =
        at::stack({places.slot_of.view({tokens, slots}), places.row_of}).to(at::kInt);
    return kernels::combine_rows(x, map, weights);
  }
  // Of a mask, most slots have no row: the rows in the order of tokens, added up in segments.
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  const Tensor& slot_of = places.slot_of;
  const Tensor order =
      at::argsort(slot_of.masked_fill(at::lt(slot_of, 0), kLast), /*stable=*/true, 0, false);
  Tensor sorted = at::_to_copy(at::index_select(x, 0, order), wide_dtype(x));
  if (weights.defined()) {
    const Tensor own = gather_rows(cast(weights, wide_dtype(x)).reshape({-1}),
                                   at::index_select(slot_of, 0, order));
    sorted.mul_(own.unsqueeze(1));
  }
  const Tensor counts = at::sum(at::ge(places.row_of, 0), at::IntArrayRef{1}, false, at::kLong);
  const Tensor y = at::segment_reduce(sorted, "sum", counts, std::nullopt, std::nullopt, 0,
                                      /*unsafe=*/true, 0);
  return cast(y, x.scalar_type());
}

/// A backward has no graph of its own; who asks for one is told.
variable_list once(const variable_list& given, variable_list grads) {
  if (!at::GradMode::is_enabled()) return grads;
  bool any = false;
  for (const Tensor& t : given) any = any || (t.defined() && t.requires_grad());
  if (!any) return grads;
  for (Tensor& grad : grads) {
    if (grad.defined()) grad = grad.detach().set_requires_grad(true);
  }
  torch::autograd::DelayedError refuse(
      "trying to differentiate twice a function that was marked with @once_differentiable",
      static_cast<int64_t>(grads.size()));
  return refuse.apply(std::move(grads));
}

/// Autograd's functions take no undefined tensors.
std::optional<Tensor> if_defined(const Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

struct Permute : torch::autograd::Function<Permute> {
  static variable_list forward(AutogradContext* ctx, const Tensor& inp,
                               const std::optional<Tensor>& probs, const Tensor& row_of,
                               int64_t rows) {
    const Places places(row_of, rows);
    ctx->save_for_backward({places.row_of, places.slot_of});
    ctx->set_materialize_grads(false);
    variable_list out{gather_rows(inp, places.token_of())};
    if (probs) out.push_back(gather_rows(probs->reshape({-1}), places.slot_of));
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
    const variable_list saved = ctx->get_saved_variables();
    variable_list grads(4);
    {
      at::NoGradGuard no_grad;
      const Places places(saved[0], saved[1]);
      if (dys[0].defined() && ctx->needs_input_grad(0)) {
        grads[0] = sum_rows(dys[0], places, {});
      }
      if (dys.size() > 1 && dys[1].defined() && ctx->needs_input_grad(1)) {
        grads[1] = gather_rows(dys[1], places.row_of.reshape({-1})).view(places.row_of.sizes());
      }
    }
    return once(dys, std::move(grads));
  }
};

struct Unpermute : torch::autograd::Function<Unpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& inp,
                        const std::optional<Tensor>& given_weights, const Tensor& row_of) {
    const Tensor weights = given_weights.value_or(Tensor());
    const Places places(row_of, inp.size(0));
    const bool needs_inp = weights.defined() && weights.requires_grad();
    ctx->save_for_backward({places.row_of, places.slot_of, weights, needs_inp ? inp : Tensor()});
    return sum_rows(inp, places, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dys) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &weights = saved[2], &inp = saved[3];
    variable_list grads(3);
    {
      at::NoGradGuard no_grad;
      const Places places(saved[0], saved[1]);
      const Tensor& dy = dys[0];
      const Tensor of_rows = gather_rows(dy, places.token_of());
      if (weights.defined() && ctx->needs_input_grad(1)) {
        const at::ScalarType wide = wide_dtype(dy);
        const Tensor dots =
            at::sum(at::mul(cast(of_rows, wide), cast(inp, wide)), at::IntArrayRef{1})
                .masked_fill_(at::lt(places.slot_of, 0), 0);
        grads[1] = cast(gather_rows(dots, places.row_of.reshape({-1})), weights.scalar_type())
                       .view(weights.sizes());
      }
      if (ctx->needs_input_grad(0)) {
        grads[0] = of_rows;
        if (weights.defined()) {
          const at::ScalarType wide = wide_dtype(dy);
          const Tensor own = gather_rows(cast(weights, wide).reshape({-1}), places.slot_of);
          grads[0] = cast(at::mul(cast(of_rows, wide), own.unsqueeze(1)), dy.scalar_type());
        }
      }
    }
    variable_list given = dys;
    given.insert(given.end(), {weights, inp});
    return once(given, std::move(grads));
  }
};

Tensor with_offsets(const Tensor& row_of, const Tensor& pad_offsets) {
  if (!pad_offsets.defined()) return row_of;
  const Tensor moved = at::add(row_of, at::_to_copy(pad_offsets, at::kLong).unsqueeze(0));
  return moved.masked_fill(at::lt(row_of, 0), -1);
}

Permuted permute(const Tensor& inp, const Tensor& probs, const Tensor& row_of, int64_t rows) {
  const variable_list out = Permute::apply(inp, if_defined(probs), row_of, rows);
  return {out[0], out.size() > 1 ? out[1] : Tensor(), {}};
}

void check_mask(const char* op, const Tensor& inp, const Tensor& routing_map) {
  LIGATURE_CHECK_TYPE(at::isIntegralType(routing_map.scalar_type(), /*includeBool=*/true), "[", op,
                      "] routing_map must be integers or bool, got ",
                      c10::toString(routing_map.scalar_type()));
  LIGATURE_CHECK(routing_map.dim() == 2 && routing_map.size(0) == inp.size(0), "[", op,
                 "] routing_map must be [tokens=", inp.size(0), ", experts or top_k], got ",
                 sizes_string(routing_map.sizes()));
  check_device(op, "routing_map", routing_map, inp);
}

}  // namespace

Permuted moe_permute(const Tensor& inp, const Tensor& probs, const Tensor& routing_map,
                     int64_t num_out_tokens, MapType type) {
  constexpr const char* kName = "moe_permute";
  check_rows(kName, inp);
  check_mask(kName, inp, routing_map);
  check_probs(kName, "probs", probs, routing_map.sizes());
  Tensor row_of;
  int64_t rows = num_out_tokens;
  if (type == MapType::Mask) {
    row_of = rows_of_mask(at::ne(routing_map, 0));
    if (rows < 0) rows = at::sum(at::ge(row_of, 0)).item<int64_t>();
  } else {
    check_integers(kName, "routing_map of indices", routing_map);
    row_of = rows_of_index(routing_map);
    if (rows < 0) rows = routing_map.numel();
  }
  row_of = cut_off(row_of, rows);
  Permuted out = permute(inp, probs, row_of, rows);
  out.row_id_map = row_of.to(at::kInt);
  return out;
}

PaddedPermuted moe_permute_and_pad(const Tensor& inp, const Tensor& probs,
                                   const Tensor& routing_map, const Tensor& tokens_per_expert,
                                   int64_t align_size) {
  constexpr const char* kName = "moe_permute_and_pad_with_probs";
  check_rows(kName, inp);
  check_mask(kName, inp, routing_map);
  check_probs(kName, "probs", probs, routing_map.sizes());
  LIGATURE_CHECK(align_size > 0, "[", kName, "] align_size must be positive, got ", align_size);
  check_integers(kName, "tokens_per_expert", tokens_per_expert);
  LIGATURE_CHECK(tokens_per_expert.dim() == 1 && tokens_per_expert.size(0) == routing_map.size(1),
                 "[", kName, "] tokens_per_expert must be [experts=", routing_map.size(1),
                 "], got ", sizes_string(tokens_per_expert.sizes()));
  const Tensor counts = at::_to_copy(tokens_per_expert, at::kLong);
  const Tensor padded =
      at::mul(at::div(at::add(counts, align_size - 1), align_size, "floor"), align_size);
  const int64_t rows = at::sum(padded).item<int64_t>();
  const Tensor added = at::sub(padded, counts);
  PaddedPermuted out;
  out.pad_offsets = at::sub(at::cumsum(added, 0), added).to(inp.device());
  const Tensor row_of = rows_of_mask(at::ne(routing_map, 0));
  static_cast<Permuted&>(out) =
      permute(inp, probs, cut_off(with_offsets(row_of, out.pad_offsets), rows), rows);
  out.row_id_map = row_of.to(at::kInt);
  out.tokens_per_expert = padded;
  return out;
}

Tensor moe_unpermute(const Tensor& inp, const Tensor& row_id_map, const Tensor& merging_probs,
                     const Tensor& pad_offsets) {
  constexpr const char* kName = "moe_unpermute";
  check_rows(kName, inp);
  check_integers(kName, "row_id_map", row_id_map);
  LIGATURE_CHECK(row_id_map.dim() == 2, "[", kName, "] row_id_map must be moe_permute's, got ",
                 sizes_string(row_id_map.sizes()));
  check_device(kName, "row_id_map", row_id_map, inp);
  check_probs(kName, "merging_probs", merging_probs, row_id_map.sizes());
  if (pad_offsets.defined()) {
    check_integers(kName, "pad_offsets", pad_offsets);
    LIGATURE_CHECK(pad_offsets.dim() == 1 && pad_offsets.size(0) == row_id_map.size(1), "[", kName,
                   "] pad_offsets must be [experts=", row_id_map.size(1), "], got ",
                   sizes_string(pad_offsets.sizes()));
    check_device(kName, "pad_offsets", pad_offsets, inp);
  }
  const Tensor row_of = with_offsets(at::_to_copy(row_id_map, at::kLong), pad_offsets);
  return Unpermute::apply(inp, if_defined(merging_probs), cut_off(row_of, inp.size(0)));
}

std::pair<Tensor, Tensor> moe_sort_chunks_by_index(const Tensor& inp, const Tensor& probs,
                                                   const Tensor& split_sizes,
                                                   const Tensor& sorted_index) {
  constexpr const char* kName = "moe_sort_chunks_by_index";
  check_rows(kName, inp);
  const int64_t rows = inp.size(0);
  check_probs(kName, "probs", probs, {rows});
  check_integers(kName, "split_sizes", split_sizes);
  check_integers(kName, "sorted_index", sorted_index);
  LIGATURE_CHECK(split_sizes.dim() == 1 && split_sizes.size(0) > 0, "[", kName,
                 "] split_sizes must be [chunks], got ", sizes_string(split_sizes.sizes()));
  LIGATURE_CHECK(sorted_index.sizes() == split_sizes.sizes(), "[", kName, "] sorted_index must be ",
                 sizes_string(split_sizes.sizes()), ", got ", sizes_string(sorted_index.sizes()));
  const Tensor sizes = at::_to_copy(split_sizes, at::kLong).to(inp.device());
  const Tensor chunks = at::_to_copy(sorted_index, at::kLong).to(inp.device());
  const Tensor sorted_sizes = at::index_select(sizes, 0, chunks);
  const Tensor ends = at::cumsum(sorted_sizes, 0);
  // From a chunk's place among the sorted ones to where its rows were.
  const Tensor starts = at::sub(at::cumsum(sizes, 0), sizes);
  const Tensor moves = at::sub(at::index_select(starts, 0, chunks), at::sub(ends, sorted_sizes));
  const Tensor ordinals = at::arange(rows, sizes.options());
  const Tensor chunk_of = at::searchsorted(ends, ordinals, /*out_int32=*/false, /*right=*/true);
  const Tensor beyond = at::ge(chunk_of, sizes.size(0));
  const Tensor from =
      at::add(ordinals, at::index_select(moves, 0, chunk_of.clamp_max(sizes.size(0) - 1)))
          .masked_fill(beyond, -1);
  const Tensor row_of = inverse(cut_off(from, rows), rows).unsqueeze(1);
  const Tensor slots = probs.defined() ? probs.unsqueeze(1) : probs;
  Permuted out = permute(inp, slots, row_of, rows);
  return {std::move(out.rows), std::move(out.probs)};
}

Tensor resize_groups(const Tensor& inp, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& wanted) {
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  LIGATURE_CHECK(inp.dim() >= 1 && inp.size(0) == rows, "[resize_groups] inp must have the ", rows,
                 " rows of its groups, got ", sizes_string(inp.sizes()));
  std::vector<Tensor> parts;
  int64_t start = 0;
  for (size_t g = 0; g < sizes.size(); ++g) {
    parts.push_back(inp.narrow(0, start, std::min(sizes[g], wanted[g])));
    start += sizes[g];
    if (wanted[g] <= sizes[g]) continue;
    at::DimVector more(inp.sizes());
    more[0] = wanted[g] - sizes[g];
    parts.push_back(at::zeros(more, inp.options()));
  }
  return parts.empty() ? inp : at::cat(parts);
}

}  // namespace ligature
