// Activations written in FP8. Those that models have most have kernels of their own, without scales
// of rows; one kernel holds them all, and chooses once per tile.
#include "ligature/backend/cuda/device/activation.cuh"
#include "ligature/backend/cuda/device/cast_tiles.cuh"
#include "ligature/backend/cuda/device/tile.cuh"

namespace ligature::cuda {
namespace {

template <typename T, typename F>
struct ForwardRows {
  using Value = T;
  using Arguments = ActivationSource;
  struct Row {};
  struct Columns {};
  static constexpr int kStreams = F::gated ? 2 : 1, kTiles = 1, kDepth = F::gated ? 4 : 8;
  static constexpr bool kAsync = true, kSums = false;
  template <Factors>
  static constexpr int resident() {
    return 3;
  }
  static __device__ __forceinline__ int64_t apart(const QuantizePlan&) { return 0; }
  static __device__ __forceinline__ int64_t units(const QuantizePlan& plan) { return plan.columns; }
  static __device__ __forceinline__ int64_t stride(const QuantizePlan& plan, int) {
    return kStreams * plan.columns;
  }
  static __device__ __forceinline__ const T* from(const ActivationSource& source,
                                                  const QuantizePlan& plan, int64_t r, int64_t c,
                                                  int s) {
    return static_cast<const T*>(source.x) + (kStreams * r + s) * plan.columns + c;
  }
  static __device__ __forceinline__ Row row(const ActivationSource&, int64_t) { return {}; }
  static __device__ __forceinline__ Columns columns(const ActivationSource&, int64_t) { return {}; }
  static __device__ __forceinline__ void make(const ActivationSource& source,
                                              const uint4 (&in)[kStreams], Row, const Columns&,
                                              bool, uint32_t (&out)[1][4], float (&)[1][kSide]) {
    const auto value = [&](int i) {
      return F::value(value_of<T>(in[0], i), F::gated ? value_of<T>(in[kStreams - 1], i) : 0.0f,
                      source.params);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) out[0][i] = pack_2<T>(value(2 * i), value(2 * i + 1));
  }
};

template <typename T, Activation A>
bool launch_rows(const ActivationSource& source, const QuantizePlan& plan, Stream stream) {
  launch_cast<ForwardRows<T, ActivationFunctor<A>>>(plan, source, plan.columns, stream);
  return true;
}

/// Is there a kernel of its own?
template <typename T>
bool launch_own(const ActivationSource& source, const QuantizePlan& plan, Stream stream) {
  if (source.scales != nullptr || !casts_directly(plan, plan.columns)) return false;
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

template <typename T>
struct ForwardTiles {
  using Value = T;
  using Arguments = ActivationSource;
  static constexpr int kTiles = 1;
  static constexpr int kResident = 4;

  static __device__ __forceinline__ int64_t apart(const QuantizePlan&) { return 0; }

  template <typename F>
  static __device__ __forceinline__ void fill_with(const ActivationSource& source,
                                                   const QuantizePlan& plan, TilePlace place,
                                                   uint32_t* tile) {
    constexpr int N = kVector<T>, kAcross = kTile / N, kRows = kTileThreads / kAcross;
    constexpr int kBatch = F::gated ? 2 : 4;
    const int column = threadIdx.x % kAcross * N;
    const int64_t c = place.column + column;
    const int64_t stride = plan.columns * (F::gated ? 2 : 1);
    const T* x = static_cast<const T*>(source.x) + c;
#pragma unroll 1
    for (int first = threadIdx.x / kAcross; first < kTile; first += kRows * kBatch) {
      Part<T, N> a[kBatch], b[kBatch];
      float scale[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int64_t r = place.row + first + k * kRows;
        if (c >= plan.columns || r >= plan.rows) continue;
        a[k] = load_words(x + r * stride);
        if constexpr (F::gated) b[k] = load_words(x + r * stride + plan.columns);
        scale[k] = row_scale(source, r);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int row = first + k * kRows;
        const bool inside = c < plan.columns && place.row + row < plan.rows;
        Packed<T, N> y;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float value = 0.0f;
          if (inside) {
            value = F::value(a[k].value(i), F::gated ? b[k].value(i) : 0.0f, source.params);
            if (source.scales != nullptr) value = __fmul_rn(value, scale[k]);
          }
          y.values[i] = from_float<T>(value);
        }
        *reinterpret_cast<Packed<T, N>*>(tile_vector<T>(tile, row, column)) = y;
      }
    }
  }

  static __device__ __forceinline__ void fill(const ActivationSource& source,
                                              const QuantizePlan& plan, TilePlace place,
                                              uint32_t* tile) {
    with_activation(source.kind,
                    [&](auto f) { fill_with<decltype(f)>(source, plan, place, tile); });
  }
};

template <typename T>
void launch(const ActivationSource& source, const QuantizePlan& plan, Stream stream) {
  if (launch_own<T>(source, plan, stream)) return;
  launch_tiles(quantize_tiles_fp8<ForwardTiles<T>>, plan, source, plan.columns, kTileBytes<T>,
               stream);
}

}  // namespace

void launch_quantize_activation(const ActivationSource& source, Type type, const QuantizePlan& plan,
                                Stream stream) {
  type == Type::BFloat16 ? launch<__nv_bfloat16>(source, plan, stream)
                         : launch<__half>(source, plan, stream);
}

}  // namespace ligature::cuda
