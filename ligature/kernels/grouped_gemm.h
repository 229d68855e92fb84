// The GEMMs of a linear layer whose rows lie in groups, each with a weight of its own, as those of
// the experts of a mixture. A group's results have the bits of the GEMM of its rows alone
// (kernels/gemm.h). Rows past the last group belong to none: they are never read, and written as
// zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "ligature/kernels/gemm.h"

namespace ligature::kernels {

/// The rows of a matrix in consecutive groups.
struct Groups {
  int64_t count = 0;
  int64_t rows = 0;  ///< of the matrix, at least as many as the groups have together
  /// As they were given: a size per group, of any integer dtype.
  Tensor splits;
  /// count + 1 of them, the last one the end of the last group. Empty where only a device knows.
  std::vector<int64_t> starts;

  bool on_host() const { return !starts.empty(); }
  int64_t begin(int64_t g) const { return starts[g]; }
  int64_t end(int64_t g) const { return starts[g + 1]; }
  int64_t size(int64_t g) const { return starts[g + 1] - starts[g]; }
};

/// Of a matrix with this many rows. Sizes on the CPU are checked: none is negative, and their sum
/// is at most `rows`. Those on a device are not read by the host. `op` begins an error.
Groups make_groups(const std::string& op, const Tensor& splits, int64_t rows);
/// The same, read from the device if need be, which waits for it (note_sync). Of splits without
/// memory: as if the first group had all rows.
Groups on_host(const std::string& op, Groups groups);

/// One of these GEMMs, as a backend is given it.
struct GroupedGemmDesc {
  LinearGemm kind;
  const Tensor& a;  ///< x of Forward, else dy: [rows, columns], or what `a_index` takes rows of
  const Groups& groups;
  at::TensorList b;          ///< Forward and InputGrad: the weights [out, in]; WeightGrad: only x
  at::TensorList bias = {};  ///< of Forward: [out] each; empty for none
  Tensor row_scale = {};     ///< of Forward: float [rows], by which a row's bias is multiplied
  Tensor a_index = {};       ///< int32 [rows]: row r of the operand is row a_index[r] of `a`
  Tensor b_index = {};       ///< of WeightGrad: likewise of x
  at::TensorList outs = {};  ///< Forward, InputGrad: one [rows, n]; WeightGrad: one [out, in] each
  bool accumulate = false;   ///< of WeightGrad: added to what is in `outs`, float or the operands'
};

/// That of group g alone, into its part of `outs`. The groups are known to the host.
void grouped_gemm_of(const GroupedGemmDesc& desc, int64_t g);

/// y[r] = x[r] w_g^T + b_g for each row r of group g; with `row_scale`, + row_scale[r] * b_g.
/// x: [rows, in]. `index`: as GroupedGemmDesc::a_index. `out`: where y is written, if defined.
Tensor grouped_linear_forward(const Tensor& x, at::TensorList w, const Groups& groups,
                              at::TensorList bias = {}, const Tensor& row_scale = {},
                              const Tensor& index = {}, const Tensor& out = {});
/// dx[r] = dy[r] w_g
Tensor grouped_linear_input_grad(const Tensor& dy, at::TensorList w, const Groups& groups,
                                 const Tensor& index = {}, const Tensor& out = {});
/// dw_g = dy_g^T x_g into outs[g], or added to it. Zeros for an empty group.
void grouped_linear_weight_grad_into(at::TensorList outs, const Tensor& dy, const Tensor& x,
                                     const Groups& groups, bool accumulate,
                                     const Tensor& dy_index = {}, const Tensor& x_index = {});

/// db_g = sum of dy over the rows of group g, each multiplied by its scale where there are some:
/// [count, features] in dy's dtype, accumulated in float in an order that depends on sizes alone.
/// Without scales a group has the bits of bias_backward (kernels/bias.h) of its rows.
Tensor grouped_bias_grad(const Tensor& dy, const Groups& groups, const Tensor& row_scale = {},
                         const Tensor& index = {});
/// dscale[r] = dy[r] . b_g: float [rows].
Tensor grouped_scale_grad(const Tensor& dy, at::TensorList bias, const Groups& groups,
                          const Tensor& index = {});

}  // namespace ligature::kernels
