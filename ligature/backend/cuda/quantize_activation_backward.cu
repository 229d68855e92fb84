// Gradients of activations written in FP8, with the sums of the bias gradient and of the scales'.
// Of a gated activation a block computes two tiles at once, one in each half of dx. As forward:
// some kinds have kernels of their own, one kernel holds them all.
#include "ligature/backend/cuda/device/activation.cuh"
#include "ligature/backend/cuda/device/cast_tiles.cuh"
#include "ligature/backend/cuda/device/tile.cuh"

namespace ligature::cuda {
namespace {

constexpr int kWarps = kTileThreads / 32;

template <typename T, typename F>
struct BackwardRows {
  using Value = T;
  using Arguments = ActivationSource;
  struct Row {};
  struct Columns {};
  static constexpr int kStreams = F::gated ? 3 : 2, kTiles = F::gated ? 2 : 1;
  static constexpr bool kAsync = true, kSums = true;
  static constexpr int kDepth = F::gated ? 3 : 4;
  template <Factors G>
  static constexpr int resident() {
    return F::gated && G != Factors::Tensor ? 2 : 3;
  }
  static __device__ __forceinline__ int64_t units(const QuantizePlan& plan) {
    return F::gated ? plan.columns / 2 : plan.columns;
  }
  static __device__ __forceinline__ int64_t apart(const QuantizePlan& plan) { return units(plan); }
  static __device__ __forceinline__ int64_t stride(const QuantizePlan& plan, int s) {
    return s == 0 ? units(plan) : plan.columns;
  }
  static __device__ __forceinline__ const T* from(const ActivationSource& source,
                                                  const QuantizePlan& plan, int64_t r, int64_t c,
                                                  int s) {
    if (s == 0) return static_cast<const T*>(source.dy) + r * units(plan) + c;
    return static_cast<const T*>(source.x) + r * plan.columns + (s - 1) * units(plan) + c;
  }
  static __device__ __forceinline__ Row row(const ActivationSource&, int64_t) { return {}; }
  static __device__ __forceinline__ Columns columns(const ActivationSource&, int64_t) { return {}; }
  static __device__ __forceinline__ void make(const ActivationSource& source,
                                              const uint4 (&in)[kStreams], Row, const Columns&,
                                              bool summed, uint32_t (&out)[kTiles][4],
                                              float (&sums)[kTiles][kSide]) {
    Gradient g[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      g[j] = F::gradient(value_of<T>(in[0], j), value_of<T>(in[1], j),
                         F::gated ? value_of<T>(in[kStreams - 1], j) : 0.0f, source.params);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[0][i] = pack_2<T>(g[2 * i].da, g[2 * i + 1].da);
      if constexpr (F::gated) out[1][i] = pack_2<T>(g[2 * i].db, g[2 * i + 1].db);
    }
    if (!summed) return;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      sums[0][j] = __fadd_rn(sums[0][j], g[j].da);
      if constexpr (F::gated) sums[1][j] = __fadd_rn(sums[1][j], g[j].db);
    }
  }
  static __device__ __forceinline__ bool wants_sums(const ActivationSource& source) {
    return source.dbias != nullptr;
  }
  static __device__ __forceinline__ void write_sum(const ActivationSource& source,
                                                   const QuantizePlan& plan, TilePlace place, int i,
                                                   float sum) {
    const int64_t column = place.column + i % kTile;
    if (column >= units(plan)) return;
    source.dbias[place.row / kTile * plan.columns + i / kTile * units(plan) + column] = sum;
  }
};

template <typename T, Activation A>
bool launch_rows(const ActivationSource& source, const QuantizePlan& plan, Stream stream) {
  const int64_t units = is_gated(A) ? plan.columns / 2 : plan.columns;
  launch_cast<BackwardRows<T, ActivationFunctor<A>>>(plan, source, units, stream);
  return true;
}

/// Is there a kernel of its own?
template <typename T>
bool launch_own(const ActivationSource& source, const QuantizePlan& plan, Stream stream) {
  const int64_t units = is_gated(source.kind) ? plan.columns / 2 : plan.columns;
  if (source.scales != nullptr || source.dscales != nullptr || !casts_directly(plan, units)) {
    return false;
  }
  switch (source.kind) {
    case Activation::SwiGLU:
      return launch_rows<T, Activation::SwiGLU>(source, plan, stream);
    case Activation::GEGLU:
      return launch_rows<T, Activation::GEGLU>(source, plan, stream);
    case Activation::GELU:
      return launch_rows<T, Activation::GELU>(source, plan, stream);
    default:
      return false;
  }
}

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
  if (launch_own<T>(source, plan, stream)) return;
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
