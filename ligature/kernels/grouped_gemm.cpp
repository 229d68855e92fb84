// Checks, and the GEMMs of groups one after the other, where no backend has them all in one.
#include "ligature/kernels/grouped_gemm.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "ligature/check.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

/// The sizes on the CPU, from a tensor on the CPU.
void read_starts(const std::string& op, Groups& groups, const Tensor& on_cpu) {
  const Tensor sizes = at::_to_copy(on_cpu, at::kLong).contiguous();
  const int64_t* size = sizes.const_data_ptr<int64_t>();
  groups.starts.assign(1, 0);
  for (int64_t g = 0; g < groups.count; ++g) {
    LIGATURE_CHECK(size[g] >= 0, op, " the size of group ", g, " must not be negative, got ",
                   size[g]);
    LIGATURE_CHECK(size[g] <= groups.rows - groups.starts[g], op,
                   " the groups must have at most the input's ", groups.rows,
                   " rows together, got more with group ", g, " of ", size[g]);
    groups.starts.push_back(groups.starts[g] + size[g]);
  }
}

Tensor rows_of(const Tensor& t, const Groups& groups, int64_t g, const Tensor& index) {
  if (!index.defined()) return t.narrow(0, groups.begin(g), groups.size(g));
  return at::index_select(t, 0, index.narrow(0, groups.begin(g), groups.size(g)));
}

void zero_tail(const Tensor& out, const Groups& groups) {
  const int64_t end = groups.end(groups.count - 1);
  if (end < groups.rows) out.narrow(0, end, groups.rows - end).zero_();
}

Tensor new_rows(const Tensor& a, const Groups& groups, int64_t columns) {
  return at::empty({groups.rows, columns}, a.options());
}

/// Puts what the GEMM of one group gives where it belongs.
void put(const Tensor& out, const Tensor& y) {
  if (y.numel() > 0) out.copy_(y);
}

void one_after_the_other(const GroupedGemmDesc& d) {
  for (int64_t g = 0; g < d.groups.count; ++g) grouped_gemm_of(d, g);
  if (d.kind != LinearGemm::WeightGrad) zero_tail(d.outs[0], d.groups);
}

/// Of the kernel that has all groups in one; null where the backend has none.
const char* own_name(const GroupedGemmDesc& d) {
  const Backend& backend = backend_behind(d.a);
  return backend.grouped_gemm_name != nullptr ? backend.grouped_gemm_name(d) : nullptr;
}

const char* name_of(const GroupedGemmDesc& d) {
  const char* own = own_name(d);
  return own != nullptr ? own : "aten";
}

void run(const char* op, const GroupedGemmDesc& d) {
  const bool own = own_name(d) != nullptr;
  if (own && (d.a.is_meta() || backend_for(d.a).grouped_gemm(d))) return;
  const Groups known = on_host("[" + std::string(op) + "]", d.groups);
  if (d.a.is_meta()) return;
  GroupedGemmDesc with{d.kind,      d.a,       known,     d.b,    d.bias,
                       d.row_scale, d.a_index, d.b_index, d.outs, d.accumulate};
  one_after_the_other(with);
}

void check_operands(const char* op, const Tensor& a, const Groups& groups, const Tensor& index) {
  LIGATURE_CHECK(a.dim() == 2, "[", op, "] wanted rows of a matrix, got ", a.dim(), " dimensions");
  LIGATURE_CHECK((index.defined() ? index.size(0) : a.size(0)) == groups.rows, "[", op, "] wanted ",
                 groups.rows, " rows, got ", index.defined() ? index.size(0) : a.size(0));
}

void check_weights(const char* op, const Tensor& a, at::TensorList w, const Groups& groups,
                   int64_t inner) {
  LIGATURE_CHECK(static_cast<int64_t>(w.size()) == groups.count, "[", op, "] wanted ", groups.count,
                 " weights, got ", w.size());
  for (const Tensor& weight : w) {
    LIGATURE_CHECK(weight.dim() == 2 && weight.size(inner) == a.size(1), "[", op,
                   "] wanted weights with dimension ", inner, " of ", a.size(1), ", got ",
                   weight.sizes());
  }
}

}  // namespace

Groups make_groups(const std::string& op, const Tensor& splits, int64_t rows) {
  Groups groups;
  groups.count = splits.numel();
  groups.rows = rows;
  groups.splits = splits;
  if (splits.is_cpu()) read_starts(op, groups, splits);
  return groups;
}

Groups on_host(const std::string& op, Groups groups) {
  if (groups.on_host()) return groups;
  LIGATURE_CHECK_STATE(
      !is_captured(groups.splits), op,
      " has no kernel for all groups here, so the host has to read the split sizes, "
      "which a graph that is being captured cannot: give them on the CPU");
  if (device_behind(groups.splits) != at::kCPU) {
    note_sync(op + " the split sizes on " + groups.splits.device().str());
  }
  if (groups.splits.is_meta()) {
    groups.starts.assign(1, 0);
    groups.starts.resize(groups.count + 1, groups.rows);
  } else {
    read_starts(op, groups, at::_to_copy(groups.splits, at::kCPU));
  }
  return groups;
}

void grouped_gemm_of(const GroupedGemmDesc& d, int64_t g) {
  const Groups& groups = d.groups;
  if (d.kind == LinearGemm::WeightGrad) {
    Tensor out = d.outs[g];
    if (groups.size(g) == 0) {
      if (!d.accumulate) out.zero_();
      return;
    }
    const Tensor a = rows_of(d.a, groups, g, d.a_index), x = rows_of(d.b[0], groups, g, d.b_index);
    linear_weight_grad_into(out, a, x, d.accumulate);
    return;
  }
  if (groups.size(g) == 0) return;
  const Tensor none;
  const Tensor a = rows_of(d.a, groups, g, d.a_index);
  const Tensor out = d.outs[0].narrow(0, groups.begin(g), groups.size(g));
  if (d.kind == LinearGemm::InputGrad) {
    put(out, linear_input_grad(a, d.b[g]));
  } else if (!d.row_scale.defined() || d.bias.empty()) {
    put(out, linear_forward(a, d.b[g], d.bias.empty() ? none : d.bias[g]));
  } else {
    // The sum is rounded once, so it is made in float.
    const at::ScalarType wide = d.a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor scale = at::_to_copy(d.row_scale.narrow(0, groups.begin(g), groups.size(g)), wide);
    Tensor y = linear_forward(at::_to_copy(a, wide), at::_to_copy(d.b[g], wide));
    y.add_(at::mul(scale.unsqueeze(1), at::_to_copy(d.bias[g], wide)));
    put(out, y);
  }
}

Tensor grouped_linear_forward(const Tensor& x, at::TensorList w, const Groups& groups,
                              at::TensorList bias, const Tensor& row_scale, const Tensor& index,
                              const Tensor& out) {
  constexpr const char* kName = "grouped_linear_forward";
  check_operands(kName, x, groups, index);
  check_weights(kName, x, w, groups, 1);
  const Tensor y = out.defined() ? out : new_rows(x, groups, w[0].size(0));
  const GroupedGemmDesc desc{LinearGemm::Forward, x, groups, w, bias, row_scale, index, {}, y};
  KernelScope scope(kName, [&] { return name_of(desc); });
  scope.gemm(groups.rows * x.size(1), w[0].size(0));
  run(kName, desc);
  return y;
}

Tensor grouped_linear_input_grad(const Tensor& dy, at::TensorList w, const Groups& groups,
                                 const Tensor& index, const Tensor& out) {
  constexpr const char* kName = "grouped_linear_input_grad";
  check_operands(kName, dy, groups, index);
  check_weights(kName, dy, w, groups, 0);
  const Tensor dx = out.defined() ? out : new_rows(dy, groups, w[0].size(1));
  const GroupedGemmDesc desc{LinearGemm::InputGrad, dy, groups, w, {}, {}, index, {}, dx};
  KernelScope scope(kName, [&] { return name_of(desc); });
  scope.gemm(groups.rows * dy.size(1), w[0].size(1));
  run(kName, desc);
  return dx;
}

void grouped_linear_weight_grad_into(at::TensorList outs, const Tensor& dy, const Tensor& x,
                                     const Groups& groups, bool accumulate, const Tensor& dy_index,
                                     const Tensor& x_index) {
  constexpr const char* kName = "grouped_linear_weight_grad";
  check_operands(kName, dy, groups, dy_index);
  check_operands(kName, x, groups, x_index);
  const GroupedGemmDesc desc{
      LinearGemm::WeightGrad, dy, groups, x, {}, {}, dy_index, x_index, outs, accumulate};
  KernelScope scope(kName, [&] { return name_of(desc); });
  scope.gemm(groups.rows * dy.size(1), x.size(1));
  run(kName, desc);
}

Tensor grouped_bias_grad(const Tensor& dy, const Groups& groups, const Tensor& row_scale,
                         const Tensor& index) {
  KernelScope scope("grouped_bias_grad", dy);
  check_operands("grouped_bias_grad", dy, groups, index);
  const Tensor db = at::empty({groups.count, dy.size(1)}, dy.options());
  const auto own = backend_behind(dy).grouped_bias_grad;
  if (own != nullptr) return dy.is_meta() ? db : own(dy, groups, row_scale, index);
  const Groups known = on_host("[grouped_bias_grad]", groups);
  if (dy.is_meta()) return db;
  const at::ScalarType wide = dy.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (int64_t g = 0; g < known.count; ++g) {
    const Tensor rows = rows_of(dy, known, g, index);
    if (!row_scale.defined()) {
      db.select(0, g).copy_(bias_backward(rows, rows.size(1)));
      continue;
    }
    const Tensor scale = at::_to_copy(row_scale.narrow(0, known.begin(g), known.size(g)), wide);
    db.select(0, g).copy_(
        at::sum(at::mul(at::_to_copy(rows, wide), scale.unsqueeze(1)), at::IntArrayRef{0}));
  }
  return db;
}

Tensor grouped_scale_grad(const Tensor& dy, at::TensorList bias, const Groups& groups,
                          const Tensor& index) {
  KernelScope scope("grouped_scale_grad", dy);
  check_operands("grouped_scale_grad", dy, groups, index);
  const at::ScalarType wide = dy.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor dscale = at::empty({groups.rows}, dy.options().dtype(wide));
  const auto own = backend_behind(dy).grouped_scale_grad;
  if (own != nullptr) return dy.is_meta() ? dscale : own(dy, bias, groups, index);
  const Groups known = on_host("[grouped_scale_grad]", groups);
  if (dy.is_meta()) return dscale;
  for (int64_t g = 0; g < known.count; ++g) {
    const Tensor rows = at::_to_copy(rows_of(dy, known, g, index), wide);
    dscale.narrow(0, known.begin(g), known.size(g))
        .copy_(at::sum(at::mul(rows, at::_to_copy(bias[g], wide)), at::IntArrayRef{1}));
  }
  zero_tail(dscale, known);
  return dscale;
}

}  // namespace ligature::kernels
