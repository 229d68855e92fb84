// Gradients of activations written in FP8, with the sums of the bias gradient and of the scales'.
// Of a gated activation a block computes two tiles at once, one in each half of dx.
#include "ligature/backend/cuda/device/activation.cuh"
#include "ligature/backend/cuda/device/tile.cuh"

namespace ligature::cuda {
namespace {

constexpr int kWarps = kTileThreads / 32;

__device__ __forceinline__ float row_scale(const ActivationSource& source, int64_t row) {
  float scale[1] = {1.0f};
  if (source.scales != nullptr) load_any<1>(source.scales, source.scales_type, row, 1, true, scale);
  return scale[0];
}

template <typename T, bool kGated>
struct BackwardTiles {
  using Value = T;
  using Arguments = ActivationSource;
  static constexpr int kTiles = kGated ? 2 : 1;
  static constexpr int kResident = kGated ? 3 : 4;
  static constexpr int kSums = kTile * kTiles;  // columns summed up by a block
  static constexpr int kBytes = kTileBytes<T> * kTiles + kWarps * kSums * 4;

  static __device__ __forceinline__ int64_t apart(const QuantizePlan& plan) {
    return plan.columns / 2;
  }

  template <typename F>
  static __device__ __forceinline__ void fill_with(const ActivationSource& source,
                                                   const QuantizePlan& plan, TilePlace place,
                                                   uint32_t* tile) {
    constexpr int N = kVector<T>, kAcross = kTile / N, kRows = kTileThreads / kAcross;
    static_assert(kAcross == 16, "two rows are a warp's");
    constexpr int kBatch = 2;
    const int column = threadIdx.x % kAcross * N;
    const int64_t c = place.column + column;
    const int64_t units = kGated ? plan.columns / 2 : plan.columns;
    const bool dbias = source.dbias != nullptr && !plan.find_amax;
    const bool dscales = source.dscales != nullptr && !plan.find_amax;
    const T* x = static_cast<const T*>(source.x) + c;
    float sums[kTiles][N] = {};
#pragma unroll 1
    for (int first = threadIdx.x / kAcross; first < kTile; first += kRows * kBatch) {
      Part<T, N> dy[kBatch], a[kBatch], b[kBatch];
      float scale[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int64_t r = place.row + first + k * kRows;
        if (c >= units || r >= plan.rows) continue;
        dy[k] = load_words(static_cast<const T*>(source.dy) + r * units + c);
        a[k] = load_words(x + r * plan.columns);
        if constexpr (kGated) b[k] = load_words(x + r * plan.columns + units);
        scale[k] = row_scale(source, r);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int row = first + k * kRows;
        const int64_t r = place.row + row;
        const bool inside = c < units && r < plan.rows;
        Packed<T, N> da, db;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          Gradient g = {0.0f, 0.0f, 0.0f};
          if (inside) {
            const float given = dy[k].value(i);
            const float scaled = source.scales != nullptr ? __fmul_rn(given, scale[k]) : given;
            g = F::gradient(scaled, a[k].value(i), kGated ? b[k].value(i) : 0.0f, source.params);
            dot = __fmaf_rn(given, g.y, dot);
            sums[0][i] = __fadd_rn(sums[0][i], g.da);
            if constexpr (kGated) sums[1][i] = __fadd_rn(sums[1][i], g.db);
          }
          da.values[i] = from_float<T>(g.da);
          if constexpr (kGated) db.values[i] = from_float<T>(g.db);
        }
        *reinterpret_cast<Packed<T, N>*>(tile_vector<T>(tile, row, column)) = da;
        if constexpr (kGated) {
          *reinterpret_cast<Packed<T, N>*>(tile_vector<T>(tile + kTileBytes<T> / 4, row, column)) =
              db;
        }
        if (!dscales) continue;
#pragma unroll
        for (int lane = kAcross / 2; lane > 0; lane /= 2) {
          dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffu, dot, lane));
        }
        if (threadIdx.x % kAcross == 0 && r < plan.rows) {
          source.dscales[r * plan.tiles_across + place.column / kTile] = dot;
        }
      }
    }
    if (dbias) add_columns(source, plan, place, tile, column, sums);
  }

  /// Of a warp's two rows by a shuffle, of the warps in shared memory, in order.
  static __device__ __forceinline__ void add_columns(const ActivationSource& source,
                                                     const QuantizePlan& plan, TilePlace place,
                                                     uint32_t* tile, int column,
                                                     float (&sums)[kTiles][kVector<T>]) {
    float* shared = reinterpret_cast<float*>(tile + kTiles * (kTileBytes<T> / 4));
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const float other = __shfl_down_sync(0xffffffffu, sums[t][i], 16);
        if (threadIdx.x % 32 < 16) {
          shared[warp * kSums + t * kTile + column + i] = __fadd_rn(sums[t][i], other);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x >= kSums) return;
    float sum = shared[threadIdx.x];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = __fadd_rn(sum, shared[w * kSums + threadIdx.x]);
    const int t = static_cast<int>(threadIdx.x) / kTile;
    const int64_t at = place.column + static_cast<int>(threadIdx.x) % kTile;
    if (at < (kGated ? plan.columns / 2 : plan.columns)) {
      source.dbias[place.row / kTile * plan.columns + t * apart(plan) + at] = sum;
    }
  }

  static __device__ __forceinline__ void fill(const ActivationSource& source,
                                              const QuantizePlan& plan, TilePlace place,
                                              uint32_t* tile) {
    with_activation(source.kind, [&](auto f) {
      using F = decltype(f);
      if constexpr (F::gated == kGated) fill_with<F>(source, plan, place, tile);
    });
  }
};

template <typename T>
void launch(const ActivationSource& source, const QuantizePlan& plan, Stream stream) {
  if (is_gated(source.kind)) {
    launch_tiles(quantize_tiles_fp8<BackwardTiles<T, true>>, plan, source, plan.columns / 2,
                 BackwardTiles<T, true>::kBytes, stream);
  } else {
    launch_tiles(quantize_tiles_fp8<BackwardTiles<T, false>>, plan, source, plan.columns,
                 BackwardTiles<T, false>::kBytes, stream);
  }
}

}  // namespace

void launch_quantize_activation_backward(const ActivationSource& source, Type type,
                                         const QuantizePlan& plan, Stream stream) {
  type == Type::BFloat16 ? launch<__nv_bfloat16>(source, plan, stream)
                         : launch<__half>(source, plan, stream);
}

}  // namespace ligature::cuda
