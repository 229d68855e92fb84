// The gradients of biases and of their scales.
#include "ligature/backend/cpu/grouped_gemm.h"
#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/row_chunks.h"
#include "ligature/backend/cpu/row_sums.h"
#include "ligature/backend/cpu/shared_tasks.h"

namespace ligature::cpu {
namespace {

using at::Tensor;
using kernels::Groups;

constexpr int64_t kColumns = 256;  // of a task of grouped_bias_grad

/// Where row r is: r, or what the index says.
struct RowNumbers {
  explicit RowNumbers(const Tensor& given)
      : tensor(given.defined() ? given.contiguous() : given),
        index(given.defined() ? tensor.const_data_ptr<int32_t>() : nullptr) {}

  int64_t operator()(int64_t row) const { return index != nullptr ? index[row] : row; }

  Tensor tensor;
  const int32_t* index;
};

// In the chunks of bias_backward, so that a group's sums have the bits of its rows' alone.
template <typename T>
void bias_grad_into(const Tensor& db, const Tensor& dy, const Groups& groups,
                    const Tensor& row_scale, const RowNumbers& numbers) {
  using C = ComputeType<T>;
  const int64_t features = dy.size(1);
  const Input<T> input(dy);
  const Input<C> scales(row_scale);
  const Output<C> output(db);
  const int64_t blocks = (features + kColumns - 1) / kColumns;
  const int64_t elements = std::max<int64_t>(1, groups.end(groups.count - 1) * features);
  const int64_t tasks_count = groups.count * blocks;
  SharedTasks tasks(tasks_count, kSumChunkElements * tasks_count / elements);
  tasks.run([&](const auto& next) {
    alignas(kBufferAlignment) C total[kColumns];
    alignas(kBufferAlignment) C sums[kColumns];
    alignas(kBufferAlignment) T buffer[kColumns];
    for (int64_t i = next(); i >= 0; i = next()) {
      const int64_t g = i / blocks, column = i % blocks * kColumns;
      const int64_t n = std::min(kColumns, features - column);
      const RowChunks chunks(groups.size(g), features, kSumChunkElements);
      for (int64_t c = 0; c < chunks.count; ++c) {
        C* const own = c == 0 ? total : sums;
        std::fill_n(own, n, C(0));
        for (int64_t r = chunks.begin(c); r < chunks.begin(c + 1); ++r) {
          const int64_t row = groups.begin(g) + r;
          const T* const values = input.read(numbers(row) * features + column, n, buffer);
          C scale;
          if (scales.defined()) {
            accumulate_scaled(values, *scales.read(row, 1, &scale), own, n);
          } else {
            accumulate(values, own, n);
          }
        }
        if (c > 0) accumulate(sums, total, n);
      }
      C* const place = output.place(g * features + column, total);
      if (place != total) std::copy_n(total, n, place);
      output.write(g * features + column, n, total);
    }
  });
}

template <typename T>
void scale_grad_into(const Tensor& dscale, const Tensor& dy, at::TensorList bias,
                     const Groups& groups, const RowNumbers& numbers) {
  using C = ComputeType<T>;
  const int64_t features = dy.size(1);
  const int64_t last = groups.end(groups.count - 1);
  const Input<T> input(dy);
  C* const out = dscale.mutable_data_ptr<C>();
  const int64_t grain = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, features));
  at::parallel_for(0, last, grain, [&](int64_t begin, int64_t end) {
    const auto bias_buffer = make_aligned_buffer<C>(features);
    const auto buffer = make_aligned_buffer<T>(features);
    int64_t g = std::upper_bound(groups.starts.begin(), groups.starts.end(), begin) -
                groups.starts.begin() - 1;
    for (int64_t row = begin; row < end; ++g) {
      const Tensor own = bias[g].contiguous();
      const C* const b = Input<C>(own).read(0, features, bias_buffer.get());
      for (; row < std::min(end, groups.end(g)); ++row) {
        out[row] =
            dot_rows<C>(input.read(numbers(row) * features, features, buffer.get()), b, features);
      }
    }
  });
  std::fill(out + last, out + groups.rows, C(0));
}

}  // namespace

Tensor grouped_bias_grad(const Tensor& given, const Groups& groups, const Tensor& row_scale,
                         const Tensor& index) {
  const Tensor dy = given.contiguous();
  const Tensor scale = row_scale.defined() ? row_scale.contiguous() : row_scale;
  Tensor db = new_tensor({groups.count, dy.size(1)}, dy.scalar_type());
  if (groups.count == 0) return db;
  const RowNumbers numbers(index);
  dispatch_elements(
      [&](auto zero) { bias_grad_into<decltype(zero)>(db, dy, groups, scale, numbers); },
      dy.scalar_type());
  return db;
}

Tensor grouped_scale_grad(const Tensor& given, at::TensorList bias, const Groups& groups,
                          const Tensor& index) {
  const Tensor dy = given.contiguous();
  Tensor dscale = new_tensor({groups.rows}, compute_dtype(dy.scalar_type()));
  if (groups.count == 0) return dscale.zero_();
  const RowNumbers numbers(index);
  dispatch_elements(
      [&](auto zero) { scale_grad_into<decltype(zero)>(dscale, dy, bias, groups, numbers); },
      dy.scalar_type());
  return dscale;
}

}  // namespace ligature::cpu
