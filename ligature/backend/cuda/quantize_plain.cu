// Casts of a matrix in memory to FP8, and the largest magnitude of one. Row-wise data alone needs
// no tiles where its scales do not lie in columns: every thread casts 8 values where they are.
#include "ligature/backend/cuda/device/cast_tiles.cuh"
#include "ligature/backend/cuda/device/plain_source.cuh"

namespace ligature::cuda {

void launch_quantize_nv(const void* x, Type type, const QuantizePlan& plan, Stream stream);

namespace {

constexpr int kFlatThreads = 256;
constexpr int kFlatPart = 8;
constexpr int kFlatUnroll = 4;

template <typename T>
__device__ __forceinline__ Part<T, kFlatPart> load_part_8(const T* x) {
  Part<T, kFlatPart> part;
#pragma unroll
  for (int i = 0; i < Part<T, kFlatPart>::kWords / 4; ++i) {
    const uint4 v = reinterpret_cast<const uint4*>(x)[i];
    part.words[4 * i] = v.x;
    part.words[4 * i + 1] = v.y;
    part.words[4 * i + 2] = v.z;
    part.words[4 * i + 3] = v.w;
  }
  return part;
}

template <typename T>
struct PlainRows {
  using Value = T;
  using Arguments = const T*;
  struct Row {};
  struct Columns {};
  static constexpr int kStreams = 1, kTiles = 1, kDepth = 8;
  static constexpr bool kAsync = false, kSums = false;
  template <Factors F>
  static constexpr int resident() {
    return 4;
  }
  static __device__ __forceinline__ int64_t apart(const QuantizePlan&) { return 0; }
  static __device__ __forceinline__ int64_t units(const QuantizePlan& plan) { return plan.columns; }
  static __device__ __forceinline__ int64_t stride(const QuantizePlan& plan, int) {
    return plan.columns;
  }
  static __device__ __forceinline__ const T* from(Arguments x, const QuantizePlan& plan, int64_t r,
                                                  int64_t c, int) {
    return x + r * plan.columns + c;
  }
  static __device__ __forceinline__ Row row(Arguments, int64_t) { return {}; }
  static __device__ __forceinline__ Columns columns(Arguments, int64_t) { return {}; }
  static __device__ __forceinline__ void make(Arguments, const uint4 (&in)[1], Row, const Columns&,
                                              bool, uint32_t (&out)[1][4], float (&)[1][kSide]) {
    out[0][0] = in[0].x;
    out[0][1] = in[0].y;
    out[0][2] = in[0].z;
    out[0][3] = in[0].w;
  }
};

/// Values that no part of 8 covers, by one thread each; `most`: the largest that counts.
template <typename T>
__device__ __forceinline__ uint32_t single_amax(T x, uint32_t most = kInfinityBits) {
  const uint32_t bits = __float_as_uint(to_float(x)) & kMagnitudeBits;
  return bits > most ? 0 : bits;
}

/// Of a part with an infinity, without it: rare, so value by value.
template <typename T>
__device__ __noinline__ uint32_t finite_amax(const T* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kFlatPart; ++i) largest = max(largest, single_amax(x[i], kLargestBits));
  return largest;
}

template <typename T>
__device__ __forceinline__ uint8_t single_code(T x, float factor, Element element) {
  Part<T, 4> part = {};
  if constexpr (sizeof(T) == 4) {
    part.words[0] = __float_as_uint(x);
  } else {
    part.words[0] = *reinterpret_cast<const uint16_t*>(&x);
  }
  uint32_t codes[1];
  encode_part(part, factor, element, true, codes);
  return static_cast<uint8_t>(codes[0]);
}

// Without factors of blocks, or for MX: the blocks of a row are as good as in one long row, since
// rows are whole blocks.
template <typename T>
__global__ void __launch_bounds__(kFlatThreads)
    quantize_flat(const __grid_constant__ QuantizePlan plan, const T* x, int64_t n) {
  __shared__ uint32_t shared_amax;
  if (threadIdx.x == 0) shared_amax = 0;
  __syncthreads();
  const Format& format = plan.format;
  const int64_t parts = n / kFlatPart;
  // From the end on, as last_first().
  const int64_t first =
      static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * (kFlatThreads * kFlatUnroll) + threadIdx.x;
  Part<T, kFlatPart> part[kFlatUnroll];
#pragma unroll
  for (int u = 0; u < kFlatUnroll; ++u) {
    const int64_t at = first + u * kFlatThreads;
    part[u] = at < parts ? load_part_8(x + at * kFlatPart) : Part<T, kFlatPart>{};
  }
  const float tensor = tensor_factor(plan);
  uint32_t amax = 0;
#pragma unroll
  for (int u = 0; u < kFlatUnroll; ++u) {
    const int64_t at = first + u * kFlatThreads;
    bool special;
    uint32_t largest = part_amax(part[u], special);
    amax = max(amax, largest);
    float factor = tensor;
    if (format.scaling == Scaling::MX) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      factor = fp8_factor(format, largest, plan.rowwise.scale,
                          at < parts && (at & 3) == 0 ? at >> 2 : -1);
    }
    uint32_t codes[2];
    encode_part(part[u], factor, format.element, special, codes);
    if (at < parts) {
      reinterpret_cast<uint2*>(plan.rowwise.data)[at] = make_uint2(codes[0], codes[1]);
    }
  }
  if (blockIdx.x == 0) {
    const int64_t rest = parts * kFlatPart + threadIdx.x;
    if (rest < n) {
      amax = max(amax, single_amax(x[rest]));
      plan.rowwise.data[rest] = single_code(x[rest], tensor, format.element);
    }
    if (threadIdx.x == 0) write_tensor_scale(plan, tensor);
  }
  if (format.scaling == Scaling::Delayed && plan.amax != nullptr) {
    raise_by_block(amax, &shared_amax, plan.amax);
  }
}

template <typename T>
__global__ void __launch_bounds__(kFlatThreads)
    amax_kernel(const T* x, int64_t n, bool vectors, Infinity infinity, float* amax) {
  __shared__ uint32_t shared_amax;
  if (threadIdx.x == 0) shared_amax = 0;
  __syncthreads();
  const int64_t parts = vectors ? n / kFlatPart : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFlatThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kFlatThreads + threadIdx.x;
  uint32_t largest = 0;
  for (int64_t at = thread; at < parts; at += step * kFlatUnroll) {
    Part<T, kFlatPart> part[kFlatUnroll];
#pragma unroll
    for (int u = 0; u < kFlatUnroll; ++u) {
      const int64_t here = at + u * step;
      part[u] = here < parts ? load_part_8(x + here * kFlatPart) : Part<T, kFlatPart>{};
    }
#pragma unroll
    for (int u = 0; u < kFlatUnroll; ++u) {
      bool special;
      uint32_t of_part = part_amax(part[u], special);
      if (infinity == Infinity::Nothing && of_part == kInfinityBits) {
        of_part = finite_amax(x + (at + u * step) * kFlatPart);
      }
      largest = max(largest, of_part);
    }
  }
  const uint32_t counted = infinity == Infinity::Nothing ? kLargestBits : kInfinityBits;
  for (int64_t i = parts * kFlatPart + thread; i < n; i += step) {
    largest = max(largest, single_amax(x[i], counted));
  }
  const uint32_t most = infinity == Infinity::Infinite ? kInfinityBits : kLargestBits;
  raise_by_block(min(largest, most), &shared_amax, amax);
}

// Codes without their sign are in the order of their values, NaN at the end.
__device__ __forceinline__ uint32_t largest_codes(uint32_t codes, uint32_t last) {
  const uint32_t magnitudes = codes & 0x7f7f7f7fu;
  return magnitudes & ~__vcmpgtu4(magnitudes, last * 0x01010101u);
}

__global__ void __launch_bounds__(kFlatThreads)
    code_amax_kernel(const uint8_t* codes, int64_t n, bool vectors, Element element,
                     const float* scale, float* amax) {
  __shared__ uint32_t shared_amax;
  if (threadIdx.x == 0) shared_amax = 0;
  __syncthreads();
  const uint32_t last = element == Element::E4M3 ? 0x7e : 0x7c;
  const int64_t parts = vectors ? n / 16 : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFlatThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kFlatThreads + threadIdx.x;
  uint32_t largest = 0;  // in each byte
  for (int64_t at = thread; at < parts; at += step) {
    const uint4 part = reinterpret_cast<const uint4*>(codes)[at];
    largest = __vmaxu4(largest, largest_codes(part.x, last));
    largest = __vmaxu4(largest, largest_codes(part.y, last));
    largest = __vmaxu4(largest, largest_codes(part.z, last));
    largest = __vmaxu4(largest, largest_codes(part.w, last));
  }
  for (int64_t i = parts * 16 + thread; i < n; i += step) {
    largest = __vmaxu4(largest, largest_codes(codes[i], last));
  }
  largest = __vmaxu4(largest, largest >> 16);
  largest = max(largest & 0xffu, largest >> 8 & 0xffu);
  const float value = __fmul_rn(decode_fp8_pair(largest, element).x, *scale);
  raise_by_block(__float_as_uint(value), &shared_amax, amax);
}

bool is_aligned(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

bool is_flat(const void* x, const QuantizePlan& plan) {
  const Format& format = plan.format;
  if (plan.columnwise.data != nullptr || format.scaling == Scaling::Block || format.block_2d ||
      !is_aligned(x, 16) || !is_aligned(plan.rowwise.data, 8)) {
    return false;
  }
  return format.scaling != Scaling::MX || plan.columns % 32 == 0;
}

template <typename T>
void quantize_fp8(const T* x, Type type, const QuantizePlan& plan, Stream stream) {
  if (!is_flat(x, plan)) {
    if constexpr (sizeof(T) == 2) {
      if (is_aligned(x, 16) && casts_directly(plan, plan.columns)) {
        return launch_cast<PlainRows<T>>(plan, x, plan.columns, stream);
      }
    }
    const bool vectors = allows_vectors<kVector<T>>(x, type, plan.columns);
    launch_tiles(quantize_tiles_fp8<PlainSource<T>>, plan,
                 typename PlainSource<T>::Arguments{x, vectors}, plan.columns, kTileBytes<T>,
                 stream);
    return;
  }
  const int64_t n = plan.rows * plan.columns;
  constexpr int64_t kBlockValues = kFlatThreads * kFlatUnroll * kFlatPart;
  const int64_t blocks = (n + kBlockValues - 1) / kBlockValues;
  quantize_flat<T>
      <<<static_cast<unsigned>(blocks > 0 ? blocks : 1), kFlatThreads, 0, stream>>>(plan, x, n);
}

}  // namespace

void launch_quantize(const void* x, Type type, const QuantizePlan& plan, Stream stream) {
  if (plan.format.scaling == Scaling::NV) return launch_quantize_nv(x, type, plan, stream);
  if (plan.find_amax) {
    return launch_amax(x, type, plan.rows * plan.columns, plan.amax, stream,
                       plan.fit_to > 0 ? Infinity::Nothing : Infinity::Infinite);
  }
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    quantize_fp8(static_cast<const T*>(x), type, plan, stream);
  });
}

void launch_amax(const void* x, Type type, int64_t n, float* amax, Stream stream,
                 Infinity infinity) {
  constexpr int64_t kMost = 132 * 8;
  constexpr int64_t kBlockValues = kFlatThreads * kFlatUnroll * kFlatPart;
  const int64_t blocks = (n + kBlockValues - 1) / kBlockValues;
  if (blocks == 0) return;
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    amax_kernel<T>
        <<<static_cast<unsigned>(blocks < kMost ? blocks : kMost), kFlatThreads, 0, stream>>>(
            static_cast<const T*>(x), n, is_aligned(x, 16), infinity, amax);
  });
}

void launch_code_amax(const uint8_t* codes, int64_t n, Element element, const float* scale,
                      float* amax, Stream stream) {
  constexpr int64_t kMost = 132 * 8;
  const int64_t blocks = (n + kFlatThreads * 16 - 1) / (kFlatThreads * 16);
  if (blocks == 0) return;
  code_amax_kernel<<<static_cast<unsigned>(blocks < kMost ? blocks : kMost), kFlatThreads, 0,
                     stream>>>(codes, n, is_aligned(codes, 16), element, scale, amax);
}

}  // namespace ligature::cuda
