// Each group's GEMM is described as if it were alone, and goes where it would go alone: so its bits
// are the same. Those that are ours are then made together, their rows gathered while they are
// packed.
#include "ligature/backend/cpu/grouped_gemm.h"

#include <optional>
#include <utility>
#include <vector>

#include "ligature/backend/cpu/product.h"
#include "ligature/backend/cpu/products.h"
#include "ligature/check.h"

namespace ligature::cpu {
namespace {

using at::Tensor;
using kernels::GroupedGemmDesc;
using kernels::Groups;
using kernels::LinearGemm;

/// Rows of a matrix, which may be gathered.
class Rows {
 public:
  Rows(const Tensor& t, const Tensor& index, const Groups& groups)
      : tensor_(t.size(1) == 1 || t.stride(1) == 1 ? t : t.contiguous()), matrix(tensor_) {
    if (!index.defined()) return;
    index_ = index.contiguous();
    const int32_t* const row = index_.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < groups.end(groups.count - 1); ++i) {
      LIGATURE_CHECK_INDEX(row[i] >= 0 && row[i] < matrix.rows,
                           "[grouped_gemm] the index must hold rows of ", matrix.rows, ", got ",
                           row[i]);
    }
  }

  /// Those of a group, as the left operand of Forward and InputGrad.
  ProductSide rows_from(int64_t begin) const {
    const bool bfloat16 = matrix.dtype == at::kBFloat16;
    ProductSide side{matrix.data, matrix.row_stride, 1, bfloat16};
    if (index_.defined()) {
      side.index = index_.const_data_ptr<int32_t>() + begin;
    } else {
      side.data = static_cast<char*>(matrix.data) + begin * matrix.row_stride * (bfloat16 ? 2 : 4);
    }
    return side;
  }

  /// The same where sums are over rows.
  ProductSide columns_from(int64_t begin) const {
    ProductSide side = rows_from(begin);
    std::swap(side.row_stride, side.k_stride);
    side.gathers_k = side.index != nullptr;
    return side;
  }

 private:
  Tensor tensor_, index_;

 public:
  const Matrix matrix;
};

ProductMatrix place_of(const Matrix& m, int64_t row = 0) {
  const bool bfloat16 = m.dtype == at::kBFloat16;
  if (m.data == nullptr) return {nullptr, 0, bfloat16};
  return {static_cast<char*>(m.data) + row * m.row_stride * (bfloat16 ? 2 : 4), m.row_stride,
          bfloat16};
}

bool is_result(const Matrix& out, int64_t rows, int64_t columns, at::ScalarType dtype) {
  return out.valid && out.rows == rows && out.columns == columns && out.column_stride == 1 &&
         (out.dtype == dtype || out.dtype == at::kFloat);
}

/// Weights, biases and `outs` live in here while products point at them.
class Batch {
 public:
  explicit Batch(const GroupedGemmDesc& d)
      : d_(d), dtype_(d.a.scalar_type()), a_(d.a, d.a_index, d.groups) {}

  bool run() {
    if (d_.kind == LinearGemm::WeightGrad) {
      if (!weight_grads()) return false;
    } else if (!rows()) {
      return false;
    }
    multiply(products_);
    return true;
  }

 private:
  bool rows() {
    const Groups& groups = d_.groups;
    const bool forward = d_.kind == LinearGemm::Forward;
    const Matrix out = Matrix::of_result(d_.outs[0]);
    const int64_t n = d_.b[0].size(forward ? 0 : 1);
    if (!a_.matrix.valid || !is_result(out, groups.rows, n, dtype_)) return false;
    const float* scale = nullptr;
    if (d_.row_scale.defined() && !d_.bias.empty()) {
      copies_.push_back(d_.row_scale.to(at::kFloat).contiguous());
      scale = copies_.back().const_data_ptr<float>();
    }
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t m = groups.size(g), k = a_.matrix.columns, begin = groups.begin(g);
      if (m == 0) continue;
      Matrix b = laid_out(d_.b[g]), bias;
      if (!forward) b = b.transposed();
      if (!d_.bias.empty()) bias = laid_out(d_.bias[g]);
      if (!b.valid || b.dtype != dtype_ || !bias.valid ||
          (bias.defined() && bias.dtype != dtype_)) {
        return false;
      }
      if (!gains_by_multiply(dtype_, m, n, k)) {
        kernels::grouped_gemm_of(d_, g);
        continue;
      }
      ProductTerms terms{place_of(out, begin), {}, place_of(bias), 1.0f};
      if (scale != nullptr) terms.row_scale = scale + begin;
      products_.push_back({a_.rows_from(begin), side_of(b), terms, m, n, k});
    }
    return true;
  }

  bool weight_grads() {
    const Groups& groups = d_.groups;
    x_.emplace(d_.b[0], d_.b_index, groups);
    if (!a_.matrix.valid || !x_->matrix.valid || x_->matrix.dtype != dtype_) return false;
    const int64_t m = a_.matrix.columns, n = x_->matrix.columns;
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t k = groups.size(g), begin = groups.begin(g);
      const Matrix out = Matrix::of_result(d_.outs[g]);
      if (k == 0 || !gains_by_multiply(dtype_, m, n, k) || !is_result(out, m, n, dtype_)) {
        kernels::grouped_gemm_of(d_, g);
        continue;
      }
      ProductTerms terms{place_of(out), {}, {}, 1.0f};
      if (d_.accumulate) terms.add = terms.out;
      products_.push_back({a_.columns_from(begin), x_->columns_from(begin), terms, m, n, k});
    }
    return true;
  }

  Matrix laid_out(const Tensor& t) {
    if (!needs_copy(t)) return Matrix(t);
    copies_.push_back(t.contiguous());
    return Matrix(copies_.back());
  }

  const GroupedGemmDesc& d_;
  at::ScalarType dtype_;
  Rows a_;
  std::optional<Rows> x_;
  std::vector<Tensor> copies_;
  std::vector<TileProduct> products_;
};

/// Sizes of the weights alone: groups differ in rows.
bool takes(const GroupedGemmDesc& d) {
  const Tensor& b = d.b[0];
  const bool grad = d.kind == LinearGemm::WeightGrad;
  const int64_t n = grad ? b.size(1) : b.size(d.kind == LinearGemm::Forward ? 0 : 1);
  return d.groups.count > 0 && d.a.layout() == at::kStrided && !d.a.is_neg() && !d.a.is_conj() &&
         gains_by_multiply(d.a.scalar_type(), grad ? d.a.size(1) : kTileRows, n,
                           grad ? kTileRows : d.a.size(1));
}

}  // namespace

bool grouped_gemm(const GroupedGemmDesc& d) {
  if (!d.groups.on_host() || !takes(d) || !Batch(d).run()) return false;
  if (d.kind == LinearGemm::WeightGrad) return true;
  const int64_t end = d.groups.end(d.groups.count - 1);
  if (end < d.groups.rows) d.outs[0].narrow(0, end, d.groups.rows - end).zero_();
  return true;
}

const char* grouped_gemm_name(const GroupedGemmDesc& d) { return takes(d) ? "cpu" : nullptr; }

}  // namespace ligature::cpu
