// Casts of a matrix in memory to NVFP4. A block of 16 values is one thread's in both orientations;
// square blocks meet in shared memory. Written for every option rather than for speed:
// quantize_nv_tiles.cu is quicker where it serves.
#include "ligature/backend/cuda/device/draws.cuh"
#include "ligature/backend/cuda/device/float4.cuh"
#include "ligature/backend/cuda/device/plain_source.cuh"

namespace ligature::cuda {

void launch_quantize_nv(const void* x, Type type, const QuantizePlan& plan, Stream stream);
bool launch_quantize_nv_tiles(const void* x, Type type, const QuantizePlan& plan, Stream stream);

namespace {

static_assert(kPart == kNvBlock);

constexpr int kBlocksAcross = kTile / kNvBlock;
constexpr int kErrorBytes = 2 * kTile * kBlocksAcross * static_cast<int>(sizeof(float));

/// What one orientation's pass over a tile knows.
struct NvPass {
  const QuantizeOutput& out;
  int64_t line, at;  // the tile's place in the orientation's matrix
  uint32_t stream;
  bool turned;     // along columns
  bool transform;  // by Hadamard, first
};

/// The values of part p of line i, in float.
template <typename T>
__device__ __forceinline__ void read_values(uint32_t* tile, const NvPass& pass, int i, int p,
                                            float (&v)[kNvBlock]) {
  if (!pass.turned) {
    const Part<T, kPart> part = row_part<T>(tile, i, p);
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j) v[j] = part.value(j);
    return;
  }
  constexpr int kColumns = 4 / sizeof(T);
  Part<T, kPart> parts[kColumns];
  column_parts<T>(tile, i / kColumns, p, parts);
  const bool second = kColumns == 2 && i % 2 != 0;
#pragma unroll
  for (int j = 0; j < kNvBlock; ++j) {
    v[j] = second ? parts[kColumns - 1].value(j) : parts[0].value(j);
  }
  if (pass.transform) hadamard_16(v, false);
}

/// The bits of the largest magnitude; NaN counts as the largest of all, or not.
__device__ __forceinline__ uint32_t values_amax(const float (&v)[kNvBlock], bool keep_nan) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kNvBlock; ++j) {
    const uint32_t bits = __float_as_uint(v[j]) & kMagnitudeBits;
    if (keep_nan || bits <= kInfinityBits) largest = max(largest, bits);
  }
  return largest;
}

struct Candidate {
  uint64_t codes;
  uint32_t scale;
};

template <bool kStochastic>
__device__ __forceinline__ Candidate candidate(const QuantizePlan& plan, const NvPass& pass,
                                               const float (&v)[kNvBlock], uint32_t amax,
                                               float upper, float top, uint64_t index) {
  const BlockFactor f = nv_factor(amax, upper, top);
  if (f.code == 0x7fu) return {0, f.code};
  if constexpr (kStochastic) {
    uint32_t words[kNvWords];
    const Draws draws = draws_of(plan, pass.stream);
    nv_words(index, draws.seed, draws.first, draws.stream, words);
    return {encode_nv(v, f.factor, words), f.code};
  } else {
    return {encode_nv(v, f.factor, nullptr), f.code};
  }
}

__device__ __noinline__ Candidate any_candidate(const QuantizePlan& plan, const NvPass& pass,
                                                const float (&v)[kNvBlock], uint32_t amax,
                                                float upper, float top, uint64_t index) {
  return plan.format.stochastic_rounding ? candidate<true>(plan, pass, v, amax, upper, top, index)
                                         : candidate<false>(plan, pass, v, amax, upper, top, index);
}

__device__ __forceinline__ void store_nv(const NvPass& pass, const Candidate& c, bool writes_scale,
                                         int height, int64_t line, int64_t at) {
  const QuantizeOutput& out = pass.out;
  if (writes_scale) {
    static_cast<uint8_t*>(out.scale)[line / height * out.scale_stride + at / kNvBlock] =
        static_cast<uint8_t>(c.scale);
  }
  uint8_t* to = out.data + line * out.stride + at / 2;
  const int64_t count = out.columns - at;
  if (out.vectors && count >= kNvBlock) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(static_cast<uint32_t>(c.codes), static_cast<uint32_t>(c.codes >> 32));
    return;
  }
  for (int j = 0; 2 * j < count && j < kNvBlock / 2; ++j) {
    to[j] = static_cast<uint8_t>(c.codes >> (8 * j));
  }
}

/// `squares`: of the tile's blocks, in the order of its rows. `errors`: [2][line][part].
template <typename T>
__device__ void write_pass(const QuantizePlan& plan, const NvPass& pass, uint32_t* tile,
                           const uint32_t* squares, float* errors) {
  const Format& format = plan.format;
  const bool choose = format.four_over_six != FourOverSix::None;
  const bool square_error = format.four_over_six == FourOverSix::MeanSquare;
  const int p = threadIdx.x % kLineLanes;
  // With square blocks both errors of a block's 16 rows are known before its codes are written.
  const int passes = choose && format.block_2d ? 2 : 1;
  for (int turn = 0; turn < passes; ++turn) {
    if (turn == 1) __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x / kLineLanes; i < kTile; i += kLines) {
      const int64_t line = pass.line + i, at = pass.at + p * kPart;
      if (line >= pass.out.rows || at >= pass.out.columns) {
        if (turn == 0 && passes == 2) {
          errors[i * kBlocksAcross + p] = 0.0f;
          errors[(kTile + i) * kBlocksAcross + p] = 0.0f;
        }
        continue;
      }
      float v[kNvBlock];
      read_values<T>(tile, pass, i, p, v);
      const uint32_t amax = !format.block_2d
                                ? values_amax(v, true)
                                : squares[pass.turned ? p * kBlocksAcross + i / kNvBlock
                                                      : i / kNvBlock * kBlocksAcross + p];
      const float upper =
          nv_upper(pass.out.amax[format.row_scaled ? line : 0], choose && !format.scales_to_448);
      const uint64_t index = static_cast<uint64_t>(line) * static_cast<uint64_t>(pass.out.columns) +
                             static_cast<uint64_t>(at);
      const int height = format.block_2d ? kNvBlock : 1;
      const bool writes_scale = i % height == 0;
      Candidate best = any_candidate(plan, pass, v, amax, upper, 6.0f, index);
      if (choose) {
        const Candidate other = any_candidate(plan, pass, v, amax, upper, 4.0f, index);
        float first = nv_error(v, best.codes, best.scale, upper, square_error);
        float second = nv_error(v, other.codes, other.scale, upper, square_error);
        if (passes == 2 && turn == 0) {
          errors[i * kBlocksAcross + p] = first;
          errors[(kTile + i) * kBlocksAcross + p] = second;
          continue;
        }
        if (passes == 2) {
          first = second = 0.0f;
          for (int r = i / kNvBlock * kNvBlock; r < (i / kNvBlock + 1) * kNvBlock; ++r) {
            first = __fadd_rn(first, errors[r * kBlocksAcross + p]);
            second = __fadd_rn(second, errors[(kTile + r) * kBlocksAcross + p]);
          }
        }
        if (second < first) best = other;
      }
      store_nv(pass, best, writes_scale, height, line, at);
    }
  }
}

/// Largest magnitudes without NaN, held at the largest float: of the tensor or of every line.
template <typename T>
__device__ void amax_pass(const QuantizePlan& plan, const NvPass& pass, uint32_t* tile,
                          uint32_t* shared) {
  const int p = threadIdx.x % kLineLanes;
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = threadIdx.x / kLineLanes; i < kTile; i += kLines) {
    float v[kNvBlock];
    read_values<T>(tile, pass, i, p, v);
    uint32_t found = min(values_amax(v, false), kLargestBits);
    if (plan.format.row_scaled) {
#pragma unroll
      for (int lane = 1; lane < kLineLanes; lane *= 2) {
        found = max(found, __shfl_xor_sync(0xffffffffu, found, lane));
      }
      if (p == 0 && pass.line + i < pass.out.rows) {
        raise_amax(pass.out.amax + pass.line + i, found);
      }
    }
    largest = max(largest, found);
  }
  if (!plan.format.row_scaled) raise_by_block(largest, shared, pass.out.amax);
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    quantize_tiles_nv(const __grid_constant__ QuantizePlan plan,
                      const __grid_constant__ typename PlainSource<T>::Arguments source) {
  extern __shared__ uint4 dynamic_memory[];
  __shared__ uint32_t squares[kBlocksAcross * kBlocksAcross];
  __shared__ uint32_t shared_amax[2];
  uint32_t* tile = reinterpret_cast<uint32_t*>(dynamic_memory);
  float* errors = reinterpret_cast<float*>(tile + kTileBytes<T> / 4);
  if (threadIdx.x < kBlocksAcross * kBlocksAcross) squares[threadIdx.x] = 0;
  if (threadIdx.x < 2) shared_amax[threadIdx.x] = 0;
  const TilePlace place = tile_place(plan);
  PlainSource<T>::fill(source, plan, place, tile);
  __syncthreads();
  const Format& format = plan.format;
  const NvPass rows{plan.rowwise, place.row, place.column, 0, false, false};
  const NvPass columns{plan.columnwise, place.column, place.row, 1, true, format.hadamard};
  const bool rowwise = plan.rowwise.data != nullptr, columnwise = plan.columnwise.data != nullptr;
  if (plan.find_amax) {
    // Of other values or of lines: else both orientations have the tensor's.
    if (rowwise) amax_pass<T>(plan, rows, tile, shared_amax);
    if (columnwise) amax_pass<T>(plan, columns, tile, shared_amax + 1);
    return;
  }
  if (format.block_2d) {
    const int p = threadIdx.x % kLineLanes;
    for (int i = threadIdx.x / kLineLanes; i < kTile; i += kLines) {
      float v[kNvBlock];
      read_values<T>(tile, rows, i, p, v);
      atomicMax(squares + i / kNvBlock * kBlocksAcross + p, values_amax(v, true));
    }
    __syncthreads();
  }
  if (rowwise) write_pass<T>(plan, rows, tile, squares, errors);
  __syncthreads();
  if (columnwise) write_pass<T>(plan, columns, tile, squares, errors);
}

}  // namespace

void launch_quantize_nv(const void* x, Type type, const QuantizePlan& plan, Stream stream) {
  // Row-wise data is never transformed.
  const bool transforms = plan.format.hadamard && plan.columnwise.data != nullptr;
  if (plan.find_amax && !transforms && !plan.format.row_scaled) {
    float* amax = plan.rowwise.data != nullptr ? plan.rowwise.amax : plan.columnwise.amax;
    return launch_amax(x, type, plan.rows * plan.columns, amax, stream, Infinity::Largest);
  }
  if (launch_quantize_nv_tiles(x, type, plan, stream)) return;
  const bool errors = plan.format.block_2d && plan.format.four_over_six != FourOverSix::None;
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    const bool vectors = allows_vectors<kVector<T>>(x, type, plan.columns);
    launch_tiles(quantize_tiles_nv<T>, plan,
                 typename PlainSource<T>::Arguments{static_cast<const T*>(x), vectors},
                 plan.columns, kTileBytes<T> + (errors ? kErrorBytes : 0), stream);
  });
}

}  // namespace ligature::cuda
