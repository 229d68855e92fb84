// Kernels compute in float (double for double tensors) whatever the dtypes of their tensors: they
// read and write pieces of elements T through these two views, which convert into a small buffer,
// or hand out the tensor's own memory when it already holds T. T is what is computed in, or
// bfloat16 where all tensors are: a loop is so compiled for three types, not for every mix of four.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <new>
#include <type_traits>

#include "ligature/backend/cpu/stream.h"

namespace ligature::cpu {

template <typename T>
class Input {
 public:
  /// An undefined tensor gives an input that is not defined().
  explicit Input(const at::Tensor& t);

  bool defined() const { return data_ != nullptr; }
  /// Is nothing converted?
  bool direct() const { return direct_; }

  /// Elements [offset, offset + n): in place, or converted into `buffer`.
  const T* read(int64_t offset, int64_t n, T* buffer) const {
    return direct_ ? static_cast<const T*>(data_) + offset : convert(offset, n, buffer);
  }

 private:
  const T* convert(int64_t offset, int64_t n, T* buffer) const;

  const void* data_ = nullptr;
  at::ScalarType dtype_ = at::kFloat;
  bool direct_ = false;
};

template <typename T>
class Output {
 public:
  /// `streams`: a large result is written past the caches, and a thread's last write is followed by
  /// stream_end().
  explicit Output(const at::Tensor& t, bool streams = false);
  /// Memory that is no tensor's.
  Output(void* data, at::ScalarType dtype);

  bool defined() const { return data_ != nullptr; }
  /// Are values written past the caches? Then best kStreamPart<T> at a time.
  bool streams() const { return direct_ && !in_place_; }

  /// Where to compute the elements from `offset` on: in place, or `buffer`. Follow with write().
  T* place(int64_t offset, T* buffer) const {
    return in_place_ ? static_cast<T*>(data_) + offset : buffer;
  }

  void write(int64_t offset, int64_t n, const T* values) const {
    if (!in_place_) move(offset, n, values);
  }

 private:
  void move(int64_t offset, int64_t n, const T* values) const;

  void* data_ = nullptr;
  at::ScalarType dtype_ = at::kFloat;
  bool direct_ = false;
  bool in_place_ = false;
};

/// With more, and with less, memory is slower.
template <typename T>
constexpr int64_t kStreamPart = 2048 / static_cast<int64_t>(sizeof(T));

extern template class Input<float>;
extern template class Input<double>;
extern template class Input<at::BFloat16>;
extern template class Output<float>;
extern template class Output<double>;
extern template class Output<at::BFloat16>;

/// n elements, not initialized.
template <typename C>
std::unique_ptr<C[]> make_buffer(int64_t n) {
  return std::unique_ptr<C[]>(new C[n]);
}

/// What vectors of 64 bytes are read from and written to begins at a line of the cache: they would
/// else lie across two.
constexpr int64_t kBufferAlignment = 64;

struct FreeAligned {
  void operator()(void* buffer) const {
    ::operator delete(buffer, std::align_val_t{kBufferAlignment});
  }
};

template <typename C>
using AlignedBuffer = std::unique_ptr<C[], FreeAligned>;

template <typename C>
AlignedBuffer<C> make_aligned_buffer(int64_t n) {
  void* memory = ::operator new(n * sizeof(C), std::align_val_t{kBufferAlignment});
  return AlignedBuffer<C>(static_cast<C*>(memory));
}

/// What elements T are computed in.
template <typename T>
using ComputeType = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// The dtype kernels compute in, and keep statistics in, for a tensor of type `dtype`.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// Calls f(C{}) with the compute type of `dtype`.
template <typename F>
auto dispatch_compute(at::ScalarType dtype, const F& f) {
  return dtype == at::kDouble ? f(double{}) : f(float{});
}

/// Calls f(T{}) with the element type to read and write tensors of these dtypes in.
template <typename F, typename... Others>
auto dispatch_elements(const F& f, at::ScalarType dtype, Others... others) {
  if (dtype == at::kBFloat16 && ((others == dtype) && ...)) return f(at::BFloat16{});
  return dispatch_compute(dtype, f);
}

}  // namespace ligature::cpu
