// LayerNorm and RMSNorm written in FP8: their statistics are given, so that a tile of any rows and
// columns can be computed by itself.
#include "ligature/backend/cuda/device/norm.cuh"
#include "ligature/backend/cuda/device/tile.cuh"

namespace ligature::cuda {
namespace {

template <typename T>
struct NormTiles {
  using Value = T;
  using Arguments = NormSource;
  static constexpr int kTiles = 1;
  static constexpr int kResident = 4;

  static __device__ __forceinline__ int64_t apart(const QuantizePlan&) { return 0; }

  static __device__ __forceinline__ void fill(const NormSource& source, const QuantizePlan& plan,
                                              TilePlace place, uint32_t* tile) {
    constexpr int N = kVector<T>, kAcross = kTile / N, kRows = kTileThreads / kAcross, kBatch = 4;
    const int column = threadIdx.x % kAcross * N;
    const int64_t c = place.column + column;
    const bool inside = c < plan.columns;
    float gamma[N], beta[N];
#pragma unroll
    for (int i = 0; i < N; ++i) beta[i] = 0.0f;
    if (inside) {
      load_any<N>(source.w, source.w_type, c, N, true, gamma);
#pragma unroll
      for (int i = 0; i < N; ++i) gamma[i] = gamma_of(gamma[i], source.zero_centered_gamma);
      if (source.b != nullptr) load_any<N>(source.b, source.b_type, c, N, true, beta);
    }
#pragma unroll 1
    for (int first = threadIdx.x / kAcross; first < kTile; first += kRows * kBatch) {
      Part<T, N> x[kBatch];
      Statistics s[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int64_t r = place.row + first + k * kRows;
        if (!inside || r >= plan.rows) continue;
        x[k] = load_words(static_cast<const T*>(source.x) + r * plan.columns + c);
        s[k] = {source.mean != nullptr ? source.mean[r] : 0.0f, source.rstd[r]};
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int row = first + k * kRows;
        Packed<T, N> y;
        if (inside && place.row + row < plan.rows) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            y.values[i] = from_float<T>(normalized(x[k].value(i), s[k], gamma[i], beta[i]));
          }
        } else {
#pragma unroll
          for (int i = 0; i < N; ++i) y.values[i] = from_float<T>(0.0f);
        }
        *reinterpret_cast<Packed<T, N>*>(tile_vector<T>(tile, row, column)) = y;
      }
    }
  }
};

template <typename T>
void launch(const NormSource& source, const QuantizePlan& plan, Stream stream) {
  launch_tiles(quantize_tiles_fp8<NormTiles<T>>, plan, source, plan.columns, kTileBytes<T>, stream);
}

}  // namespace

void launch_quantize_norm(const NormSource& source, Type type, const QuantizePlan& plan,
                          Stream stream) {
  type == Type::BFloat16 ? launch<__nv_bfloat16>(source, plan, stream)
                         : launch<__half>(source, plan, stream);
}

}  // namespace ligature::cuda
