// The norms backward for rows of whole vectors. A group of warps walks over rows; those it comes to
// next are on their way into shared memory, where each thread reads what it copied itself, so that
// the memory stays busy while the sums over a row are waited for. dw and db stay in registers, and
// the sums' order depends on the device alone.
#include <array>
#include <atomic>

#include "ligature/backend/cuda/device/async_copy.cuh"
#include "ligature/backend/cuda/device/norm.cuh"
#include "ligature/backend/cuda/device/reduce.cuh"
#include "ligature/backend/cuda/device/row_access.cuh"
#include "ligature/backend/cuda/norm_backward_staged.h"

namespace ligature::cuda {
namespace {

constexpr int kStages = 3;  // rows under way; 2 where shared memory is short

template <typename T>
__device__ __forceinline__ Packed<T, kVector<T>> read_shared(uint32_t from) {
  Packed<T, kVector<T>> packed;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packed.words[0]), "=r"(packed.words[1]), "=r"(packed.words[2]),
                 "=r"(packed.words[3])
               : "r"(from)
               : "memory");
  return packed;
}

/// The sums of all groups for the first group, added in pairs. `meeting`: half as much memory as
/// the block's sums fill. All threads of the block take part.
template <int Threads, int Groups, int Pieces, int N>
__device__ __forceinline__ void add_groups(float (&sums)[Pieces][N], float* meeting, int group) {
  const int thread = static_cast<int>(threadIdx.x) % Threads;
#pragma unroll
  for (int half = Groups / 2; half > 0; half /= 2) {
    float* place = meeting + group % half * (Threads * Pieces * N) + thread;
    __syncthreads();
    if (group >= half && group < 2 * half) {
#pragma unroll
      for (int i = 0; i < Pieces * N; ++i) place[i * Threads] = sums[i / N][i % N];
    }
    __syncthreads();
    if (group < half) {
#pragma unroll
      for (int i = 0; i < Pieces * N; ++i) {
        sums[i / N][i % N] = __fadd_rn(sums[i / N][i % N], place[i * Threads]);
      }
    }
  }
}

/// A group of `Warps` warps with `Pieces` vectors per thread works on a row; `Groups` of them make
/// a block. Of each row x, dy and, where there is one, add are staged.
template <typename T, bool Centered, int Warps, int Pieces, int Groups, int Blocks>
__global__ void __launch_bounds__(Warps * Groups * kWarp, Blocks)
    norm_backward_staged_kernel(const NormBackwardArgs args, const int stages, const float share) {
  constexpr int N = kVector<T>;
  constexpr int threads = Warps * kWarp, step = threads * N;
  constexpr int kPiece = threads * 16, kPart = Pieces * kPiece;  // bytes
  extern __shared__ uint4 memory[];
  __shared__ typename BlockSum<Warps, 2, Groups>::Shared shared;
  BlockSum<Warps, 2, Groups> group_sum(shared);
  const int group = static_cast<int>(threadIdx.x) / threads;
  const int lane = static_cast<int>(threadIdx.x) % threads, first = lane * N;
  const int columns = static_cast<int>(args.columns);
  const bool adds = args.add != nullptr;
  const int stage_bytes = (adds ? 3 : 2) * kPart;
  const uint32_t begin = shared_address(memory) + group * stages * stage_bytes + lane * 16;
  const uint32_t end = begin + stages * stage_bytes;

  float gamma[Pieces][N] = {}, dw[Pieces][N] = {}, db[Pieces][N] = {};
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    if (first + p * step < columns) {
      read_parameter<T>(args.w, args.w_type, first + p * step, 1.0f, gamma[p]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        gamma[p][i] = gamma_of(gamma[p][i], args.zero_centered && args.w != nullptr);
      }
    } else {  // what lies beyond the row stays zero
      for (uint32_t at = begin + p * kPiece; at < end; at += kPart) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
    }
  }

  const int rows = static_cast<int>(args.rows), stride = static_cast<int>(gridDim.x) * Groups;
  int row = static_cast<int>(blockIdx.x) * Groups + group;
  const auto place_in = [&](int which) { return int64_t{which} * columns + first; };
  const auto fetch = [&](int which, uint32_t to) {
    if (which < rows) {
      const int64_t from = place_in(which);
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        if (first + p * step >= columns) continue;
        const int64_t at = from + p * step;
        copy_async(to + p * kPiece, static_cast<const T*>(args.x) + at);
        copy_async(to + kPart + p * kPiece, static_cast<const T*>(args.dy) + at);
        if (adds) copy_async(to + 2 * kPart + p * kPiece, static_cast<const T*>(args.add) + at);
      }
    }
    end_batch();
  };
  const auto statistics = [&](int which) -> Statistics {
    if (which >= rows) return {};
    return {Centered ? args.mean[which] : 0.0f, args.rstd[which]};
  };

  for (int s = 0; s < stages; ++s) {
    fetch(row + s * stride, begin + s * stage_bytes);
  }
  Statistics next = statistics(row);
  uint32_t stage = begin;
  for (; row < rows; row += stride) {
    const Statistics s = next;
    next = statistics(row + stride);
    if (stages == kStages) {
      await_batches<kStages - 1>();
    } else {
      await_batches<1>();
    }
    Packed<T, N> x[Pieces], dy[Pieces];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      x[p] = read_shared<T>(stage + p * kPiece);
      dy[p] = read_shared<T>(stage + kPart + p * kPiece);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float d = dy[p][i], g = d * gamma[p][i];
        const float away = __fsub_rn(x[p][i], s.mean);
        dw[p][i] += d * (away * s.rstd);
        sums[0] += g * away;
        if constexpr (Centered) {
          db[p][i] += d;
          sums[1] += g;
        }
      }
    }
    if (args.dx != nullptr) {
      if constexpr (Centered) {
        group_sum(sums);
      } else {
        float along[1] = {sums[0]};
        group_sum(along);
        sums[0] = along[0];
      }
      // rstd * (g - offset - xhat * along), the factors of all values first.
      const float along = -sums[0] * s.rstd * share * s.rstd * s.rstd;
      const float offset = Centered ? -sums[1] * share * s.rstd : 0.0f;
      const int64_t place = place_in(row);
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
        if (first + p * step >= columns) continue;
        forget(x[p]);
        forget(dy[p]);
        Packed<T, N> add = {};
        if (adds) add = read_shared<T>(stage + 2 * kPart + p * kPiece);
        float dx[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float away = __fsub_rn(x[p][i], s.mean);
          dx[i] = fmaf(dy[p][i] * gamma[p][i], s.rstd, fmaf(away, along, offset)) + add[i];
        }
        if constexpr (std::is_same_v<T, float>) {
          store_any<N>(args.dx, args.dx_type, place + p * step, N, true, dx);
        } else {
          store<N>(static_cast<T*>(args.dx) + place + p * step, dx);
        }
      }
    }
    fetch(row + stages * stride, stage);
    stage += stage_bytes;
    if (stage == end) stage = begin;
  }
  await_batches<0>();
  if (Groups > 1 && args.dx != nullptr && row - group < rows) group_sum.pass();

  if (args.dw_partials == nullptr && args.db_partials == nullptr) return;
  if constexpr (Groups > 1) {
    float* meeting = reinterpret_cast<float*>(memory);
    add_groups<threads, Groups>(dw, meeting, group);
    if constexpr (Centered) add_groups<threads, Groups>(db, meeting, group);
    if (group != 0) return;
  }
  const int64_t own = int64_t{blockIdx.x} * columns;
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    const int at = first + p * step;
    if (at >= columns) continue;
    if (args.dw_partials != nullptr) store<N>(args.dw_partials + own + at, dw[p]);
    if (args.db_partials != nullptr) store<N>(args.db_partials + own + at, db[p]);
  }
}

/// What this device lets a block have; asked once.
int shared_limit(int device) {
  static std::array<std::atomic<int>, 128> limits{};
  std::atomic<int>& limit = limits.at(static_cast<size_t>(device));
  int found = limit.load(std::memory_order_relaxed);
  if (found == 0) {
    cudaDeviceGetAttribute(&found, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    limit.store(found, std::memory_order_relaxed);
  }
  return found;
}

/// Lets a kernel have that much on this device; told once.
template <auto Kernel>
void allow_shared(int device, int bytes) {
  static std::array<std::atomic<bool>, 128> told{};
  std::atomic<bool>& known = told.at(static_cast<size_t>(device));
  if (known.load(std::memory_order_relaxed)) return;
  cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  known.store(true, std::memory_order_relaxed);
}

template <typename T, bool Centered, int Warps, int Pieces, int Groups, int Blocks>
void launch_shape(const NormBackwardArgs& args, int64_t blocks, Stream stream) {
  constexpr auto kernel = norm_backward_staged_kernel<T, Centered, Warps, Pieces, Groups, Blocks>;
  constexpr int kPart = Groups * Warps * kWarp * Pieces * 16;
  constexpr int kStatic = 1024;  // at most, beside the stages
  int device = 0;
  cudaGetDevice(&device);
  const int stages = 3 * kStages * kPart + kStatic <= shared_limit(device) ? kStages : 2;
  allow_shared<kernel>(device, 3 * stages * kPart);
  kernel<<<static_cast<unsigned int>(blocks), Groups * Warps * kWarp,
           stages * kPart*(args.add != nullptr ? 3 : 2), stream>>>(
      args, stages, args.averaged ? 1.0f / static_cast<float>(args.columns) : 1.0f);
}

/// Calls f<Warps, Pieces, Groups, Blocks>() for rows of so many vectors; not at all where they are
/// too many.
template <typename F>
void with_shape(int64_t vectors, const F& f) {
  if (vectors <= 1 * kWarp) return f.template operator()<1, 1, 16, 2>();
  if (vectors <= 2 * kWarp) return f.template operator()<2, 1, 8, 2>();
  if (vectors <= 4 * kWarp) return f.template operator()<4, 1, 4, 2>();
  if (vectors <= 8 * kWarp) return f.template operator()<8, 1, 2, 2>();
  if (vectors <= 16 * kWarp) return f.template operator()<16, 1, 2, 1>();
  if (vectors <= 32 * kWarp) return f.template operator()<16, 2, 1, 1>();
}

}  // namespace

StagedShape staged_shape(int64_t columns, Type x_type) {
  StagedShape shape{0, 0};
  with_shape(columns * size_of(x_type) / 16,
             [&]<int, int, int Groups, int Blocks>() { shape = {Groups, Blocks}; });
  return shape;
}

void launch_norm_backward_staged(const NormBackwardArgs& args, int64_t blocks, Stream stream) {
  with_type(args.x_type, [&](auto zero) {
    using T = decltype(zero);
    with_shape(args.columns / kVector<T>, [&]<int Warps, int Pieces, int Groups, int Blocks>() {
      if (args.centered) {
        launch_shape<T, true, Warps, Pieces, Groups, Blocks>(args, blocks, stream);
      } else {
        launch_shape<T, false, Warps, Pieces, Groups, Blocks>(args, blocks, stream);
      }
    });
  });
}

}  // namespace ligature::cuda
