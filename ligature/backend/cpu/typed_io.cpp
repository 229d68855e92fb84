// The conversion loops behind Input and Output.
#include "ligature/backend/cpu/typed_io.h"

#include "ligature/backend/cpu/cast.h"
#include "ligature/check.h"

namespace ligature::cpu {
namespace {

template <typename From, typename To>
LIGATURE_SIMD void convert_block(const From* from, To* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Cast<From, To>::apply(from[i]);
}

template <typename F>
void dispatch_dtype(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    case at::kHalf:
      return f(at::Half{});
    default:
      LIGATURE_CHECK(false, "[cpu kernel] wanted a float, double, bfloat16 or half tensor, got ",
                     dtype);
  }
}

}  // namespace

template <typename T>
Input<T>::Input(const at::Tensor& t) {
  if (!t.defined()) return;
  LIGATURE_CHECK(t.is_contiguous(), "[cpu kernel] wanted a contiguous tensor, got shape ",
                 t.sizes(), " with strides ", t.strides());
  data_ = t.const_data_ptr();
  dtype_ = t.scalar_type();
  direct_ = dtype_ == c10::CppTypeToScalarType<T>::value;
}

template <typename T>
const T* Input<T>::convert(int64_t offset, int64_t n, T* buffer) const {
  dispatch_dtype(dtype_, [&](auto zero) {
    using From = decltype(zero);
    convert_block(static_cast<const From*>(data_) + offset, buffer, n);
  });
  return buffer;
}

template <typename T>
Output<T>::Output(const at::Tensor& t, bool streams) {
  if (!t.defined()) return;
  LIGATURE_CHECK(t.is_contiguous(), "[cpu kernel] wanted a contiguous result, got strides ",
                 t.strides());
  data_ = t.mutable_data_ptr();
  dtype_ = t.scalar_type();
  direct_ = dtype_ == c10::CppTypeToScalarType<T>::value;
  in_place_ = direct_ && !(streams && static_cast<int64_t>(t.nbytes()) >= kStreamResultBytes);
}

template <typename T>
Output<T>::Output(void* data, at::ScalarType dtype)
    : data_(data),
      dtype_(dtype),
      direct_(dtype == c10::CppTypeToScalarType<T>::value),
      in_place_(direct_) {}

template <typename T>
void Output<T>::move(int64_t offset, int64_t n, const T* values) const {
  if (direct_) {
    stream_copy(reinterpret_cast<uint8_t*>(static_cast<T*>(data_) + offset),
                reinterpret_cast<const uint8_t*>(values), n * static_cast<int64_t>(sizeof(T)));
    return;
  }
  dispatch_dtype(dtype_, [&](auto zero) {
    using To = decltype(zero);
    convert_block(values, static_cast<To*>(data_) + offset, n);
  });
}

template class Input<float>;
template class Input<double>;
template class Input<at::BFloat16>;
template class Output<float>;
template class Output<double>;
template class Output<at::BFloat16>;

}  // namespace ligature::cpu
