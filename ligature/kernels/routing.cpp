// Checks, and the routing of tokens as ATen calls, where no backend has kernels for it. Sorted and
// gathered, never added to in an order that chance decides; nothing is read by the host.
#include "ligature/kernels/routing.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

const char* name_of(const Backend& backend, bool has) { return has ? backend.name : "aten"; }

/// Of integers, which no backend refuses.
const Backend& backend_of(at::Device device) { return backend_for(device.type(), at::kFloat); }

at::ScalarType wide_type(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor wide(const Tensor& t, const Tensor& like) { return at::_to_copy(t, wide_type(like)); }

/// With one dimension for the tokens.
Tensor checked_map(const char* op, const Tensor& map, at::Device device) {
  LIGATURE_CHECK_TYPE(map.scalar_type() == at::kInt, "[", op,
                      "] the routing map must be int32, got ", c10::toString(map.scalar_type()));
  LIGATURE_CHECK(map.dim() >= 3 && map.size(0) == 2, "[", op,
                 "] the routing map must be [2, tokens, top_k], got ", map.sizes());
  LIGATURE_CHECK(map.device() == device, "[", op, "] the routing map must be on ", device.str(),
                 ", got ", map.device().str());
  return map.dim() == 3 ? map.contiguous() : map.flatten(1, -2).contiguous();
}

int64_t tokens_in(const Tensor& map) { return map.size(1); }
int64_t slots_in(const Tensor& map) { return map.size(1) * map.size(2); }

void check_matrix(const char* op, const char* what, const Tensor& x, int64_t rows) {
  LIGATURE_CHECK_TYPE(at::isFloatingType(x.scalar_type()), "[", op, "] ", what,
                      " must have a floating dtype, got ", c10::toString(x.scalar_type()));
  LIGATURE_CHECK(x.dim() == 2 && x.size(0) == rows, "[", op, "] ", what, " must be [", rows,
                 ", columns], got ", x.sizes());
}

void check_slots(const char* op, const char* what, const Tensor& slots, const Tensor& map) {
  LIGATURE_CHECK(slots.sizes() == map.sizes().slice(1), "[", op, "] ", what,
                 " must be [tokens, top_k] = ", map.sizes().slice(1), ", got ", slots.sizes());
}

Tensor slot_of_row(const Tensor& map) { return map.select(0, 0).reshape({-1}); }
Tensor row_of_slot(const Tensor& map) { return map.select(0, 1).reshape({-1}); }

/// from[index[i]] along dimension 0, zeros where the index is negative.
Tensor rows_at(const Tensor& from, const Tensor& index) {
  if (index.numel() == 0) {
    at::DimVector sizes(from.sizes());
    sizes[0] = 0;
    return at::empty(sizes, from.options());
  }
  Tensor none = at::lt(index, 0);
  if (from.dim() == 2) none = none.unsqueeze(1);
  return at::index_select(from, 0, index.clamp_min(0)).masked_fill_(none, 0);
}

Routing route_by_sorting(const Tensor& experts_of, int64_t experts) {
  const int64_t rows = experts_of.numel();
  const at::TensorOptions longs = experts_of.options().dtype(at::kLong);
  const Tensor given = at::_to_copy(experts_of, at::kLong).reshape({-1});
  const Tensor nowhere = at::bitwise_or(at::lt(given, 0), at::ge(given, experts));
  const auto [sorted, order] =
      at::sort(given.masked_fill(nowhere, experts), /*stable=*/true, /*dim=*/0, false);
  const Tensor ends = at::searchsorted(sorted, at::arange(experts, longs), /*out_int32=*/false,
                                       /*right=*/true);
  const Tensor zero = at::zeros({1}, longs);
  Routing routing;
  routing.splits = at::diff(ends, 1, 0, zero);
  const Tensor ordinals = at::arange(rows, longs);
  Tensor row_of = at::empty({rows}, longs);
  row_of.scatter_(0, order, ordinals);
  routing.map =
      at::empty({2, experts_of.size(0), experts_of.size(1)}, experts_of.options().dtype(at::kInt));
  const Tensor halves = routing.map.view({2, rows});
  halves[0].copy_(order.masked_fill(at::ge(ordinals, ends[experts - 1]), -1));
  halves[1].copy_(row_of.masked_fill(nowhere, -1));
  return routing;
}

Tensor dispatch_by_index(const Tensor& x, const Tensor& map) { return rows_at(x, tokens_of(map)); }

Tensor combine_by_index(const Tensor& x, const Tensor& map, const Tensor& weights) {
  const int64_t tokens = tokens_in(map);
  const Tensor row_of = row_of_slot(map).view({tokens, map.size(2)});
  Tensor y = at::zeros({tokens, x.size(1)}, x.options().dtype(wide_type(x)));
  for (int64_t k = 0; k < map.size(2) && tokens > 0; ++k) {
    Tensor rows = wide(rows_at(x, row_of.select(1, k)), x);
    if (weights.defined()) {
      // A slot that is sent nowhere adds nothing, whatever its weight is.
      const Tensor own = wide(weights.select(1, k), x);
      rows = at::mul(rows, own.masked_fill(at::lt(row_of.select(1, k), 0), 0).unsqueeze(1));
    }
    y.add_(rows);
  }
  return at::_to_copy(y, x.scalar_type());
}

Tensor weights_grad_by_index(const Tensor& dy, const Tensor& x, const Tensor& map) {
  const int64_t tokens = tokens_in(map);
  const Tensor row_of = row_of_slot(map).view({tokens, map.size(2)});
  const Tensor dweights = at::zeros(map.sizes().slice(1), x.options().dtype(wide_type(x)));
  const Tensor wide_dy = wide(dy, x);
  for (int64_t k = 0; k < map.size(2) && tokens > 0; ++k) {
    const Tensor index = row_of.select(1, k);
    const Tensor dots = at::sum(at::mul(wide(rows_at(x, index), x), wide_dy), at::IntArrayRef{1});
    dweights.select(1, k).copy_(dots.masked_fill(at::lt(index, 0), 0));
  }
  return dweights;
}

}  // namespace

Routing route(const Tensor& experts_of, int64_t experts) {
  constexpr const char* kName = "route";
  LIGATURE_CHECK(experts > 0, "[", kName, "] the number of experts must be positive, got ",
                 experts);
  LIGATURE_CHECK_TYPE(at::isIntegralType(experts_of.scalar_type(), /*includeBool=*/false), "[",
                      kName, "] experts must be integers, got ",
                      c10::toString(experts_of.scalar_type()));
  LIGATURE_CHECK(experts_of.dim() == 2 && experts_of.size(1) > 0, "[", kName,
                 "] experts must be [tokens, top_k], got ", experts_of.sizes());
  LIGATURE_CHECK(experts_of.numel() <= std::numeric_limits<int32_t>::max(), "[", kName,
                 "] there can be at most 2^31 - 1 slots, got ", experts_of.numel());
  const Backend& backend = backend_of(experts_of.device());
  KernelScope scope(kName, [&] { return name_of(backend, backend.route != nullptr); });
  if (experts_of.is_meta()) {
    const auto options = experts_of.options();
    return {at::empty({experts}, options.dtype(at::kLong)),
            at::empty({2, experts_of.size(0), experts_of.size(1)}, options.dtype(at::kInt))};
  }
  if (backend.route != nullptr) return backend.route(experts_of.contiguous(), experts);
  return route_by_sorting(experts_of, experts);
}

Tensor tokens_of(const Tensor& given) {
  const Tensor map = checked_map("tokens_of", given, given.device());
  if (map.is_meta()) return at::empty({slots_in(map)}, map.options());
  return at::div(slot_of_row(map), map.size(2), "floor");
}

Tensor dispatch_rows(const Tensor& x, const Tensor& given) {
  constexpr const char* kName = "dispatch_rows";
  const Backend& backend = backend_behind(x);
  KernelScope scope(kName, [&] { return name_of(backend, backend.dispatch_rows != nullptr); });
  const Tensor map = checked_map(kName, given, x.device());
  check_matrix(kName, "x", x, tokens_in(map));
  if (x.is_meta()) return at::empty({slots_in(map), x.size(1)}, x.options());
  if (backend.dispatch_rows != nullptr) {
    return backend.dispatch_rows(x.contiguous(), map);
  }
  return dispatch_by_index(x, map);
}

Tensor combine_rows(const Tensor& x, const Tensor& given, const Tensor& weights) {
  constexpr const char* kName = "combine_rows";
  const Backend& backend = backend_behind(x);
  KernelScope scope(kName, [&] { return name_of(backend, backend.combine_rows != nullptr); });
  const Tensor map = checked_map(kName, given, x.device());
  check_matrix(kName, "x", x, slots_in(map));
  if (weights.defined()) {
    check_slots(kName, "weights", weights, map);
    LIGATURE_CHECK_TYPE(at::isFloatingType(weights.scalar_type()), "[", kName,
                        "] weights must have a floating dtype, got ",
                        c10::toString(weights.scalar_type()));
  }
  if (x.is_meta()) return at::empty({tokens_in(map), x.size(1)}, x.options());
  if (backend.combine_rows != nullptr) {
    return backend.combine_rows(x.contiguous(), map,
                                weights.defined() ? weights.contiguous() : weights);
  }
  return combine_by_index(x, map, weights);
}

Tensor dispatch_slots(const Tensor& slots, const Tensor& given) {
  constexpr const char* kName = "dispatch_slots";
  KernelScope scope(kName, "aten");
  const Tensor map = checked_map(kName, given, slots.device());
  check_slots(kName, "slots", slots, map);
  if (slots.is_meta()) return at::empty({slots_in(map)}, slots.options());
  return rows_at(slots.reshape({-1}), slot_of_row(map));
}

Tensor combine_slots(const Tensor& rows, const Tensor& given) {
  constexpr const char* kName = "combine_slots";
  KernelScope scope(kName, "aten");
  const Tensor map = checked_map(kName, given, rows.device());
  LIGATURE_CHECK(rows.dim() == 1 && rows.size(0) == slots_in(map), "[", kName, "] rows must be [",
                 slots_in(map), "], got ", rows.sizes());
  if (rows.is_meta()) return at::empty(map.sizes().slice(1), rows.options());
  return rows_at(rows, row_of_slot(map)).view(map.sizes().slice(1));
}

Tensor combine_weights_grad(const Tensor& dy, const Tensor& x, const Tensor& given) {
  constexpr const char* kName = "combine_weights_grad";
  const Backend& backend = backend_behind(x);
  KernelScope scope(kName,
                    [&] { return name_of(backend, backend.combine_weights_grad != nullptr); });
  const Tensor map = checked_map(kName, given, x.device());
  check_matrix(kName, "x", x, slots_in(map));
  check_matrix(kName, "dy", dy, tokens_in(map));
  LIGATURE_CHECK(dy.size(1) == x.size(1), "[", kName, "] dy must have x's ", x.size(1),
                 " columns, got ", dy.size(1));
  if (x.is_meta()) return at::empty(map.sizes().slice(1), x.options().dtype(wide_type(x)));
  if (backend.combine_weights_grad != nullptr) {
    return backend.combine_weights_grad(dy.contiguous(), x.contiguous(), map);
  }
  return weights_grad_by_index(dy, x, map);
}

}  // namespace ligature::kernels
