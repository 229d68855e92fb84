// Kernels compute in C = float (double for double tensors) whatever the dtypes of their tensors:
// they read and write pieces through these two views, which convert into a small buffer, or hand
// out the tensor's own memory when it already holds C. A loop is so compiled for two types, not for
// every mix of four.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace ligature::cpu {

template <typename C>
class Input {
 public:
  /// An undefined tensor gives an input that is not defined().
  explicit Input(const at::Tensor& t);

  bool defined() const { return data_ != nullptr; }

  /// Elements [offset, offset + n): in place, or converted into `buffer`.
  const C* read(int64_t offset, int64_t n, C* buffer) const {
    return direct_ ? static_cast<const C*>(data_) + offset : convert(offset, n, buffer);
  }

 private:
  const C* convert(int64_t offset, int64_t n, C* buffer) const;

  const void* data_ = nullptr;
  at::ScalarType dtype_ = at::kFloat;
  bool direct_ = false;
};

template <typename C>
class Output {
 public:
  explicit Output(const at::Tensor& t);
  /// Memory that is no tensor's.
  Output(void* data, at::ScalarType dtype);

  bool defined() const { return data_ != nullptr; }

  /// Where to compute the elements from `offset` on: in place, or `buffer`. Follow with write().
  C* place(int64_t offset, C* buffer) const {
    return direct_ ? static_cast<C*>(data_) + offset : buffer;
  }

  void write(int64_t offset, int64_t n, const C* values) const {
    if (!direct_) convert(offset, n, values);
  }

 private:
  void convert(int64_t offset, int64_t n, const C* values) const;

  void* data_ = nullptr;
  at::ScalarType dtype_ = at::kFloat;
  bool direct_ = false;
};

extern template class Input<float>;
extern template class Input<double>;
extern template class Output<float>;
extern template class Output<double>;

/// n elements, not initialized.
template <typename C>
std::unique_ptr<C[]> make_buffer(int64_t n) {
  return std::unique_ptr<C[]>(new C[n]);
}

/// The dtype kernels compute in, and keep statistics in, for a tensor of type `dtype`.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// Calls f(C{}) with the compute type of `dtype`.
template <typename F>
auto dispatch_compute(at::ScalarType dtype, const F& f) {
  return dtype == at::kDouble ? f(double{}) : f(float{});
}

}  // namespace ligature::cpu
