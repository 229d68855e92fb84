// A counting sort, and rows gathered by what it gives: each result is written once, by one thread.
#include "ligature/backend/cpu/routing.h"

#include <ATen/ops/_to_copy.h>

#include <cstring>

#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/row_chunks.h"
#include "ligature/backend/cpu/row_sums.h"
#include "ligature/check.h"

namespace ligature::cpu {
namespace {

using at::Tensor;
using kernels::Routing;

/// Both halves of a routing map.
struct RoutingMap {
  RoutingMap(const char* op, const Tensor& map)
      : tokens(map.size(1)),
        top_k(map.size(2)),
        slot_of_row(map.const_data_ptr<int32_t>()),
        row_of_slot(slot_of_row + slots()) {
    for (int64_t i = 0; i < 2 * slots(); ++i) {
      LIGATURE_CHECK_INDEX(slot_of_row[i] < slots(), "[", op,
                           "] the routing map must hold numbers below ", slots(), ", got ",
                           slot_of_row[i]);
    }
  }

  int64_t slots() const { return tokens * top_k; }

  int64_t tokens, top_k;
  const int32_t* slot_of_row;
  const int32_t* row_of_slot;
};

/// How many rows repay handing them to another thread.
int64_t grain_of(int64_t columns) {
  return std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, columns));
}

template <typename T>
void combine_into(const Tensor& y, const Tensor& x, const RoutingMap& map, const Tensor& weights) {
  using C = ComputeType<T>;
  const int64_t columns = x.size(1);
  const Input<T> rows(x);
  const Input<C> scales(weights);
  const Output<C> output(y);
  at::parallel_for(0, map.tokens, grain_of(columns * map.top_k), [&](int64_t begin, int64_t end) {
    const auto buffer = make_aligned_buffer<T>(columns);
    const auto sum_buffer = make_aligned_buffer<C>(columns);
    for (int64_t t = begin; t < end; ++t) {
      C* const sums = output.place(t * columns, sum_buffer.get());
      std::fill_n(sums, columns, C(0));
      for (int64_t slot = t * map.top_k; slot < (t + 1) * map.top_k; ++slot) {
        const int64_t row = map.row_of_slot[slot];
        if (row < 0) continue;
        const T* const values = rows.read(row * columns, columns, buffer.get());
        C own;
        if (scales.defined()) {
          accumulate_scaled(values, *scales.read(slot, 1, &own), sums, columns);
        } else {
          accumulate(values, sums, columns);
        }
      }
      output.write(t * columns, columns, sums);
    }
  });
}

template <typename T>
void weights_grad_into(const Tensor& dweights, const Tensor& dy, const Tensor& x,
                       const RoutingMap& map) {
  using C = ComputeType<T>;
  const int64_t columns = x.size(1);
  const Input<T> grads(dy), rows(x);
  C* const out = dweights.mutable_data_ptr<C>();
  at::parallel_for(0, map.tokens, grain_of(columns * map.top_k), [&](int64_t begin, int64_t end) {
    const auto dy_buffer = make_aligned_buffer<T>(columns);
    const auto buffer = make_aligned_buffer<T>(columns);
    for (int64_t t = begin; t < end; ++t) {
      const T* const grad = grads.read(t * columns, columns, dy_buffer.get());
      for (int64_t slot = t * map.top_k; slot < (t + 1) * map.top_k; ++slot) {
        const int64_t row = map.row_of_slot[slot];
        out[slot] =
            row < 0 ? C(0)
                    : dot_rows<C>(grad, rows.read(row * columns, columns, buffer.get()), columns);
      }
    }
  });
}

}  // namespace

Routing route(const Tensor& experts_of, int64_t experts) {
  const Tensor given = at::_to_copy(experts_of, at::kLong);
  const int64_t* const expert = given.const_data_ptr<int64_t>();
  const int64_t slots = given.numel();
  const auto is_sent = [&](int64_t slot) { return expert[slot] >= 0 && expert[slot] < experts; };
  Routing routing{new_tensor({experts}, at::kLong),
                  new_tensor({2, given.size(0), given.size(1)}, at::kInt)};
  int64_t* const splits = routing.splits.mutable_data_ptr<int64_t>();
  int32_t* const slot_of_row = routing.map.mutable_data_ptr<int32_t>();
  int32_t* const row_of_slot = slot_of_row + slots;
  std::fill_n(splits, experts, 0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (is_sent(slot)) ++splits[expert[slot]];
  }
  std::vector<int64_t> next(experts);
  int64_t rows = 0;
  for (int64_t e = 0; e < experts; ++e) {
    next[e] = rows;
    rows += splits[e];
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t row = is_sent(slot) ? next[expert[slot]]++ : -1;
    row_of_slot[slot] = static_cast<int32_t>(row);
    if (row >= 0) slot_of_row[row] = static_cast<int32_t>(slot);
  }
  std::fill(slot_of_row + rows, slot_of_row + slots, -1);
  return routing;
}

Tensor dispatch_rows(const Tensor& x, const Tensor& given) {
  const RoutingMap map("dispatch_rows", given);
  const int64_t columns = x.size(1);
  Tensor y = new_tensor({map.slots(), columns}, x.scalar_type());
  const size_t bytes = columns * x.element_size();
  if (bytes == 0) return y;
  const char* const from = static_cast<const char*>(x.const_data_ptr());
  char* const to = static_cast<char*>(y.mutable_data_ptr());
  at::parallel_for(0, map.slots(), grain_of(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t slot = map.slot_of_row[row];
      if (slot < 0) {
        std::memset(to + row * bytes, 0, bytes);
      } else {
        std::memcpy(to + row * bytes, from + slot / map.top_k * bytes, bytes);
      }
    }
  });
  return y;
}

Tensor combine_rows(const Tensor& x, const Tensor& given, const Tensor& weights) {
  const RoutingMap map("combine_rows", given);
  Tensor y = new_tensor({map.tokens, x.size(1)}, x.scalar_type());
  dispatch_elements([&](auto zero) { combine_into<decltype(zero)>(y, x, map, weights); },
                    x.scalar_type());
  return y;
}

Tensor combine_weights_grad(const Tensor& dy, const Tensor& x, const Tensor& given) {
  const RoutingMap map("combine_weights_grad", given);
  Tensor dweights = new_tensor({map.tokens, map.top_k}, compute_dtype(x.scalar_type()));
  dispatch_elements([&](auto zero) { weights_grad_into<decltype(zero)>(dweights, dy, x, map); },
                    x.scalar_type(), dy.scalar_type());
  return dweights;
}

}  // namespace ligature::cpu
