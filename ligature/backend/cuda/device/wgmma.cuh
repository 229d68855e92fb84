// Hopper's own instructions (sm_90a) as functions: barriers in shared memory, the bulk tensor copy
// engine, matrix products of a warpgroup. Addresses are those of the shared window, 32 bits.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace ligature::cuda::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers of arrivals and bytes. A phase ends when all that was awaited has come; `parity` is that
// of the phase, and the one before the first has parity 1.

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// After the last init_barrier, before the cluster meets.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ bool has_passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!has_passed(barrier, parity)) {
  }
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// At the barrier of the same place in another block of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(block)
      : "memory");
}

__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/// The block's named barrier: one side arrives, the other waits for it.
__device__ __forceinline__ void arrive_named(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void meet_named(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Copies of boxes of a matrix; x counts along its rows, y its rows.

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x, int y,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

/// Of a stack of matrices; z counts them.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

/// To the same place in all blocks of `mask`, each block's own barrier counting its bytes.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap* map, int x, int y,
                                                uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask)
      : "memory");
}

/// Into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}

// Matrix products. An operand lies in shared memory in rows of 128 bytes, swizzled as the copy
// engine does it (128B), at a multiple of 1024 bytes.

/// Rows of 128 bytes over k: eight of them make a group of 1024 bytes.
__device__ __forceinline__ uint64_t operand_along_k(uint32_t address) {
  constexpr uint64_t kGroups = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | kGroups | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

/// Boxes of [64 of k, 64 columns], one of 8192 bytes for each 64 columns; eight of k make a group
/// of 1024 bytes. 16 further along k: + 2048 bytes.
__device__ __forceinline__ uint64_t operand_across_k(uint32_t address) {
  constexpr uint64_t kBoxes = uint64_t{8192 >> 4} << 16;
  constexpr uint64_t kGroups = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | kGroups | kBoxes | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from moving uses of the sums above a wait.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

#define LIGATURE_EIGHT(i)                                                             \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), \
      "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])

#define LIGATURE_ALL                                                                  \
  LIGATURE_EIGHT(0), LIGATURE_EIGHT(8), LIGATURE_EIGHT(16), LIGATURE_EIGHT(24),       \
      LIGATURE_EIGHT(32), LIGATURE_EIGHT(40), LIGATURE_EIGHT(48), LIGATURE_EIGHT(56), \
      LIGATURE_EIGHT(64), LIGATURE_EIGHT(72), LIGATURE_EIGHT(80), LIGATURE_EIGHT(88), \
      LIGATURE_EIGHT(96), LIGATURE_EIGHT(104), LIGATURE_EIGHT(112), LIGATURE_EIGHT(120)

// d (+)= a b over 32 bytes of k, 64 rows and 256 columns, of `types`; `tail`: what follows.
#define LIGATURE_MULTIPLY(types, tail)                                                             \
  "{\n"                                                                                            \
  ".reg .pred p;\n"                                                                                \
  "setp.ne.b32 p, %130, 0;\n"                                                                      \
  "wgmma.mma_async.sync.aligned.m64n256" types                                                     \
  " {"                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "               \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "               \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
  "}, %128, %129, p, 1, 1" tail                                                                    \
  ";\n"                                                                                            \
  "}\n"

/// Of bfloat16.
template <bool BTurned>
__device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(LIGATURE_MULTIPLY("k16.f32.bf16.bf16", ", 0, %131")
               : LIGATURE_ALL
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(BTurned ? 1 : 0));
}

/// Of bfloat16, both across k.
__device__ __forceinline__ void multiply_across(float (&d)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(LIGATURE_MULTIPLY("k16.f32.bf16.bf16", ", 1, 1")
               : LIGATURE_ALL
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

/// Of E4M3 codes, both along k.
__device__ __forceinline__ void multiply_codes(float (&d)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(LIGATURE_MULTIPLY("k32.f32.e4m3.e4m3", "")
               : LIGATURE_ALL
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

#undef LIGATURE_MULTIPLY
#undef LIGATURE_ALL
#undef LIGATURE_EIGHT

/// 16 rows and 16 columns of 16-bit values into rows of 16 bytes; each lane names one row's place.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/// What this thread wrote to shared memory is there for products and copies that come after.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What passes through once; nothing is read (0) or written unless `inside`.
__device__ __forceinline__ uint4 load_passing(const void* from, bool inside) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "r"(static_cast<int>(inside)));
  return v;
}
__device__ __forceinline__ void store_passing(void* to, uint2 v, bool inside) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.global.cs.v2.b32 [%0], {%1, %2};\n"
      "}\n" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(static_cast<int>(inside))
      : "memory");
}
__device__ __forceinline__ void store_passing(void* to, uint4 v, bool inside) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(inside))
      : "memory");
}

}  // namespace ligature::cuda::hopper
