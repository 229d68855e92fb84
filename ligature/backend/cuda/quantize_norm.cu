// LayerNorm and RMSNorm written in FP8: their statistics are given, so that a tile of any rows and
// columns can be computed by itself.
#include "ligature/backend/cuda/device/cast_tiles.cuh"
#include "ligature/backend/cuda/device/norm.cuh"
#include "ligature/backend/cuda/device/row_access.cuh"
#include "ligature/backend/cuda/device/tile.cuh"

namespace ligature::cuda {
namespace {

template <typename T>
struct NormRows {
  using Value = T;
  using Arguments = NormSource;
  using Row = Statistics;
  struct Columns {
    float gamma[kSide], beta[kSide];
  };
  static constexpr int kStreams = 1, kTiles = 1, kDepth = 8;
  static constexpr bool kAsync = true, kSums = false;
  template <Factors F>
  static constexpr int resident() {
    return 3;
  }
  static __device__ __forceinline__ int64_t apart(const QuantizePlan&) { return 0; }
  static __device__ __forceinline__ int64_t units(const QuantizePlan& plan) { return plan.columns; }
  static __device__ __forceinline__ int64_t stride(const QuantizePlan& plan, int) {
    return plan.columns;
  }
  static __device__ __forceinline__ const T* from(const NormSource& source,
                                                  const QuantizePlan& plan, int64_t r, int64_t c,
                                                  int) {
    return static_cast<const T*>(source.x) + r * plan.columns + c;
  }
  static __device__ __forceinline__ Row row(const NormSource& source, int64_t r) {
    return {source.mean != nullptr ? __ldg(source.mean + r) : 0.0f, __ldg(source.rstd + r)};
  }
  static __device__ __forceinline__ Columns columns(const NormSource& source, int64_t c) {
    Columns k;
    read_parameter<T>(source.w, source.w_type, c, 1.0f, k.gamma);
    read_parameter<T>(source.b, source.b_type, c, 0.0f, k.beta);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      k.gamma[i] = gamma_of(k.gamma[i], source.zero_centered_gamma);
    }
    return k;
  }
  static __device__ __forceinline__ void make(const NormSource&, const uint4 (&in)[1], Row s,
                                              const Columns& k, bool, uint32_t (&out)[1][4],
                                              float (&)[1][kSide]) {
    const auto value = [&](int i) {
      return normalized(value_of<T>(in[0], i), s, k.gamma[i], k.beta[i]);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) out[0][i] = pack_2<T>(value(2 * i), value(2 * i + 1));
  }
};

template <typename T>
void launch(const NormSource& source, const QuantizePlan& plan, Stream stream) {
  launch_cast<NormRows<T>>(plan, source, plan.columns, stream);
}

}  // namespace

void launch_quantize_norm(const NormSource& source, Type type, const QuantizePlan& plan,
                          Stream stream) {
  type == Type::BFloat16 ? launch<__nv_bfloat16>(source, plan, stream)
                         : launch<__half>(source, plan, stream);
}

}  // namespace ligature::cuda
