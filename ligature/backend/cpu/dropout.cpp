// Dropout of the CPU backend: torch draws its masks on one thread, one number after the other. Here
// an element's random word is a function of the seed and of where the element is.
#include "ligature/backend/cpu/dropout.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "ligature/backend/cpu/new_tensor.h"
#include "ligature/backend/cpu/philox.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

// A counter gives the words of four elements, a quarter of a block apart.
constexpr int64_t kBlock = 256;
constexpr int64_t kQuarter = kBlock / 4;
constexpr int64_t kGrain = kChunkElements / 4 / kBlock;

uint64_t draw_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

LIGATURE_SIMD void draw_words(uint64_t seed, uint64_t block, uint32_t* words) {
  const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  const uint32_t low = static_cast<uint32_t>(block), high = static_cast<uint32_t>(block >> 32);
#pragma GCC ivdep
  for (int64_t i = 0; i < kQuarter; ++i) {
    const auto four = philox({low, high, static_cast<uint32_t>(i), 0}, key0, key1);
    words[i] = four[0];
    words[kQuarter + i] = four[1];
    words[2 * kQuarter + i] = four[2];
    words[3 * kQuarter + i] = four[3];
  }
}

template <typename C, typename T>
LIGATURE_SIMD void drop(const T* x, const uint32_t* words, uint32_t bound, C scale, T* y,
                        uint8_t* mask, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const bool keep = words[i] >= bound;
    mask[i] = keep;
    y[i] = Cast<C, T>::apply(select(keep, Cast<T, C>::apply(x[i]) * scale, C(0)));
  }
}

template <typename C, typename T>
LIGATURE_SIMD void drop_again(const T* dy, const uint8_t* mask, C scale, T* dx, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = Cast<C, T>::apply(select(mask[i] != 0, Cast<T, C>::apply(dy[i]) * scale, C(0)));
  }
}

// Calls f(block, at, n) for each block, in parallel.
template <typename F>
void parallel_blocks(int64_t count, const F& f) {
  at::parallel_for(0, (count + kBlock - 1) / kBlock, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      f(block, block * kBlock, std::min(kBlock, count - block * kBlock));
    }
  });
}

}  // namespace

DropoutForward dropout_forward(const Tensor& x_, double p) {
  const Tensor x = x_.contiguous();
  DropoutForward result{new_like(x), new_tensor(x.sizes(), at::kBool)};
  const uint64_t seed = draw_seed();
  const double words_below = p * 4294967296.0;
  const auto bound = static_cast<uint32_t>(std::min(words_below, 4294967295.0));
  auto* const mask = static_cast<uint8_t*>(result.mask.data_ptr());
  dispatch_elements(
      [&](auto zero) {
        using T = decltype(zero);
        const auto scale = static_cast<ComputeType<T>>(1.0 / (1.0 - p));
        const Input<T> input(x);
        const Output<T> output(result.y);
        parallel_blocks(x.numel(), [&](int64_t block, int64_t at, int64_t n) {
          alignas(kBufferAlignment) uint32_t words[kBlock];
          alignas(kBufferAlignment) T x_buffer[kBlock];
          alignas(kBufferAlignment) T y_buffer[kBlock];
          draw_words(seed, block, words);
          T* y = output.place(at, y_buffer);
          drop(input.read(at, n, x_buffer), words, bound, scale, y, mask + at, n);
          output.write(at, n, y);
        });
      },
      x.scalar_type());
  return result;
}

Tensor dropout_backward(const Tensor& dy_, const Tensor& mask_, double p) {
  const Tensor dy = dy_.contiguous(), mask = mask_.contiguous();
  Tensor dx = new_like(dy);
  const auto* const kept = static_cast<const uint8_t*>(mask.const_data_ptr());
  dispatch_elements(
      [&](auto zero) {
        using T = decltype(zero);
        const auto scale = static_cast<ComputeType<T>>(1.0 / (1.0 - p));
        const Input<T> input(dy);
        const Output<T> output(dx);
        parallel_blocks(dy.numel(), [&](int64_t, int64_t at, int64_t n) {
          alignas(kBufferAlignment) T dy_buffer[kBlock];
          alignas(kBufferAlignment) T dx_buffer[kBlock];
          T* result = output.place(at, dx_buffer);
          drop_again(input.read(at, n, dy_buffer), kept + at, scale, result, n);
          output.write(at, n, result);
        });
      },
      dy.scalar_type());
  return dx;
}

}  // namespace ligature::cpu
