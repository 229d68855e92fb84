// Dropout. Eight neighbouring values are one draw of random words, whatever their type, their
// alignment or the grid: the mask depends on the generator alone.
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/device/philox.cuh"
#include "ligature/backend/cuda/dropout_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 8;  // values of a draw, and of a thread

/// The unit at `at`, of which `count` values are there.
template <typename T>
__device__ __forceinline__ Packed<T, kUnit> read_unit(const T* p, int64_t at, int64_t count,
                                                      bool vectors) {
  if (vectors && count - at >= kUnit) return load_packed<kUnit>(p + at);
  return load_packed_part<kUnit>(p + at, static_cast<int>(count - at < kUnit ? count - at : kUnit));
}

template <typename T>
__device__ __forceinline__ void write_unit(T* p, int64_t at, int64_t count, bool vectors,
                                           const float (&values)[kUnit]) {
  if (vectors && count - at >= kUnit) return store<kUnit>(p + at, values);
  store_part<kUnit>(p + at, static_cast<int>(count - at < kUnit ? count - at : kUnit), values);
}

__device__ __forceinline__ uint2 read_mask(const uint8_t* p, int64_t at, int64_t count,
                                           bool vectors) {
  if (vectors && count - at >= kUnit) return *reinterpret_cast<const uint2*>(p + at);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (at + i < count) words[i / 4] |= uint32_t{p[at + i]} << (i % 4 * 8);
  }
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void write_mask(uint8_t* p, int64_t at, int64_t count, bool vectors,
                                           uint2 mask) {
  if (vectors && count - at >= kUnit) {
    *reinterpret_cast<uint2*>(p + at) = mask;
    return;
  }
  const uint32_t words[2] = {mask.x, mask.y};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (at + i < count) p[at + i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dropout_forward_kernel(const DropoutArgs args, RandomState state, uint32_t dropped, float scale,
                           bool vectors) {
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x, at = unit * kUnit;
  if (at >= args.count) return;
  const Packed<T, kUnit> x = read_unit(static_cast<const T*>(args.x), at, args.count, vectors);
  if (state.seed_at != nullptr) {
    state.seed = static_cast<uint64_t>(*state.seed_at);
    state.offset += static_cast<uint64_t>(*state.offset_at);
  }
  float y[kUnit];
  uint32_t mask[2] = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
    philox(state.offset / 4 + half, static_cast<uint64_t>(unit), state.seed, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // All ones where the value is kept: cheaper than a condition twice.
      const uint32_t kept = words[i] >= dropped ? 0xffffffffu : 0u;
      y[4 * half + i] = __uint_as_float(__float_as_uint(__fmul_rn(x[4 * half + i], scale)) & kept);
      mask[half] |= kept & (1u << (8 * i));
    }
  }
  write_unit(static_cast<T*>(args.y), at, args.count, vectors, y);
  write_mask(args.mask, at, args.count, vectors, make_uint2(mask[0], mask[1]));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dropout_backward_kernel(const DropoutArgs args, float scale, bool vectors) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kUnit;
  if (at >= args.count) return;
  const Packed<T, kUnit> dy = read_unit(static_cast<const T*>(args.x), at, args.count, vectors);
  const uint2 mask = read_mask(args.mask, at, args.count, vectors);
  const uint32_t words[2] = {mask.x, mask.y};
  float dx[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const bool kept = (words[i / 4] >> (i % 4 * 8) & 0xffu) != 0;
    dx[i] = kept ? __fmul_rn(dy[i], scale) : 0.0f;
  }
  write_unit(static_cast<T*>(args.y), at, args.count, vectors, dx);
}

unsigned int blocks_for(const DropoutArgs& args) {
  constexpr int64_t kOfBlock = int64_t{kThreads} * kUnit;
  return static_cast<unsigned int>((args.count + kOfBlock - 1) / kOfBlock);
}

bool aligned(const DropoutArgs& args) {
  const auto divides = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  return divides(args.x, 16) && divides(args.y, 16) && divides(args.mask, 8);
}

float scale_of(const DropoutArgs& args) { return static_cast<float>(1.0 / (1.0 - args.p)); }

}  // namespace

void launch_dropout_forward(const DropoutArgs& args, const RandomState& state, Stream stream) {
  if (args.count == 0) return;
  // A word below p * 2^32 drops its value.
  const double bound = args.p * 4294967296.0 + 0.5;
  const auto dropped = static_cast<uint32_t>(bound < 4294967295.0 ? bound : 4294967295.0);
  with_type(args.type, [&](auto zero) {
    dropout_forward_kernel<decltype(zero)><<<blocks_for(args), kThreads, 0, stream>>>(
        args, state, dropped, scale_of(args), aligned(args));
  });
}

void launch_dropout_backward(const DropoutArgs& args, Stream stream) {
  if (args.count == 0) return;
  with_type(args.type, [&](auto zero) {
    dropout_backward_kernel<decltype(zero)>
        <<<blocks_for(args), kThreads, 0, stream>>>(args, scale_of(args), aligned(args));
  });
}

}  // namespace ligature::cuda
