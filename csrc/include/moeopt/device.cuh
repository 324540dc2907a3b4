// The few hardware operations that the kernels use, each behind one function.
//
// Kernels call nothing else: no intrinsics, no asm of their own. That is what lets the tests run the same kernel
// source on a CPU: with MOEOPT_EMULATE, `emulated_device.h` (tests/unit/ops/emulation) provides these functions on
// top of fibers, and every other header here is plain C++. What an instruction means is thus written twice, here as
// PTX and there as C++; the GPU tests are what compares the two.
#pragma once

#include <cstdint>

#if defined(MOEOPT_EMULATE)

#include "emulated_device.h"

#else

#include <cuda.h>  // the type CUtensorMap only; nothing of the driver library is linked

// A kernel is a template, if need be over nothing (MOEOPT_PLAIN_KERNEL): a __global__ function cannot be inline, and
// several files include the headers.
#define MOEOPT_KERNEL __global__
#define MOEOPT_PLAIN_KERNEL template <int kOnly = 0> __global__
#define MOEOPT_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define MOEOPT_DEVICE __device__ __forceinline__
#define MOEOPT_GRID_CONSTANT __grid_constant__
#define MOEOPT_UNROLL _Pragma("unroll")
// The base of dynamic shared memory. Aligned by hand: 1024 bytes is what a 128-byte swizzled tile needs.
#define MOEOPT_SHARED_BASE(name)                                                                       \
  extern __shared__ unsigned char moeopt_shared_raw[];                                                 \
  unsigned char* const name = moeopt_shared_raw + ((1024u - (smem_address(moeopt_shared_raw) & 1023u)) & 1023u)

namespace moeopt {

using TensorMap = CUtensorMap;

struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};

MOEOPT_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
MOEOPT_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
MOEOPT_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }
MOEOPT_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
MOEOPT_DEVICE int grid_blocks() { return static_cast<int>(gridDim.x); }

MOEOPT_DEVICE uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- numbers -------------------------------------------------------------------------------------------------

MOEOPT_DEVICE float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }
MOEOPT_DEVICE uint32_t bits_from_float(float value) { return __float_as_uint(value); }
MOEOPT_DEVICE float magnitude(float x) { return fabsf(x); }
// The larger magnitude; NaN if either is.
MOEOPT_DEVICE float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}
MOEOPT_DEVICE float smaller(float a, float b) { return fminf(a, b); }
// Bytes 0, 2 of a, then of b; bytes 1, 3 of a, then of b.
MOEOPT_DEVICE uint32_t even_bytes(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x6420); }
MOEOPT_DEVICE uint32_t odd_bytes(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7531); }
MOEOPT_DEVICE float exp_accurate(float x) { return expf(x); }
// Of each 16-bit half.
MOEOPT_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
// 2^(x log2 e) on the special function unit: error about 2 units in the last place of FP32, far under BF16's.
MOEOPT_DEVICE float exp_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

// Error at most 1 unit in the last place of FP32; a division is 8 instructions and a branch.
MOEOPT_DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MOEOPT_DEVICE int count_bits(uint32_t bits) { return __popc(bits); }

// Low half: first; high half: second. Round to nearest even.
MOEOPT_DEVICE uint32_t pack_bf16x2(float first, float second) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

// Two E4M3 values (the low 16 bits of `pair`, first in the low byte) to two BF16: exact, NaN stays NaN.
MOEOPT_DEVICE uint32_t bf16x2_from_e4m3x2(uint32_t pair) {
  uint32_t half2;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(static_cast<uint16_t>(pair)));
  float first, second;
  asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(first), "=f"(second)
      : "r"(half2));
  return pack_bf16x2(first, second);
}

// Two floats to E4M3, first in the low byte; round to nearest even, saturate to 448.
MOEOPT_DEVICE uint32_t pack_e4m3x2(float first, float second) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
  return packed;
}

// --- memory --------------------------------------------------------------------------------------------------

// Data that nothing writes while the kernel runs: may stay in L1.
MOEOPT_DEVICE Vec4 load_constant16(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}
// The same for data that this launch reads once.
MOEOPT_DEVICE Vec4 load_once16(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}
MOEOPT_DEVICE float load_constant(const float* pointer) { return __ldg(pointer); }
// Data that another block wrote in this launch, or that an overlapping launch wrote: L1 is not coherent, so read L2.
MOEOPT_DEVICE Vec4 load_shared_across_blocks16(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}
MOEOPT_DEVICE float load_shared_across_blocks(const float* pointer) { return __ldcg(pointer); }
MOEOPT_DEVICE int load_shared_across_blocks(const int* pointer) { return __ldcg(pointer); }
MOEOPT_DEVICE int64_t load_shared_across_blocks(const int64_t* pointer) {
  return __ldcg(reinterpret_cast<const long long*>(pointer));
}

// Release before a count, acquire after one. Lighter than __threadfence, which also orders against every other fence.
MOEOPT_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
MOEOPT_DEVICE int atomic_add_global(int* pointer, int value) { return atomicAdd(pointer, value); }
// Counts what this thread, or those it was synchronised with, wrote before; and waits for as much, behind which what was
// written can be read.
MOEOPT_DEVICE void add_released(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
MOEOPT_DEVICE void wait_released(const int* counter, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < value);
}
MOEOPT_DEVICE void atomic_max_shared(int* pointer, int value) { atomicMax(pointer, value); }
MOEOPT_DEVICE uint32_t atomic_or_shared(uint32_t* pointer, uint32_t bits) { return atomicOr(pointer, bits); }

// --- threads -------------------------------------------------------------------------------------------------

MOEOPT_DEVICE void sync_block() { __syncthreads(); }
MOEOPT_DEVICE void sync_warp() { __syncwarp(); }
MOEOPT_DEVICE void sync_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Two blocks of a cluster, which the hardware starts together: which of them this is.
MOEOPT_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// All threads of both blocks: what they wrote before is visible after, in shared memory too.
MOEOPT_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// A value that all lanes of a warp have in common, said to the compiler: it may live in a uniform register.
MOEOPT_DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
MOEOPT_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
MOEOPT_DEVICE uint32_t warp_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
MOEOPT_DEVICE uint32_t warp_min(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }
// Sum over this lane and those before it.
MOEOPT_DEVICE int warp_inclusive_sum(int value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  MOEOPT_UNROLL
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, static_cast<unsigned>(offset));
    value += lane >= offset ? other : 0;
  }
  return value;
}
// Lanes that hold the same value, as bits.
MOEOPT_DEVICE uint32_t warp_match(int value) { return __match_any_sync(0xffffffffu, value); }

// Registers of this warpgroup from here on (sm_90a): all four warps, once, in one branch of the role's if/else.
template <int kRegisters>
MOEOPT_DEVICE void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MOEOPT_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: the next kernel may start / the previous kernel's writes are visible.
MOEOPT_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
MOEOPT_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- mbarrier and the copy engine ------------------------------------------------------------------------------

MOEOPT_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}
// After the inits, before any other thread or the copy engine uses the barriers.
MOEOPT_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's ordinary accesses to shared memory against the copy engine and the tensor cores.
MOEOPT_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
MOEOPT_DEVICE void mbarrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(
                   smem_address(barrier)),
               "r"(bytes)
               : "memory");
}
// At the barrier in the same place of block `rank` of the cluster; a block without others is rank 0. No stronger
// release than the default: at the scope of the cluster it would wait for every store of this thread to reach L2.
MOEOPT_DEVICE void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}
// 16 bytes into the same place of block `rank` of the cluster, and the one arrival of the barrier there: who waits for
// that phase sees them. As bytes of the barrier, because a release at the cluster's scope would wait for L2.
MOEOPT_DEVICE void send16(void* shared, uint64_t* barrier, int rank, Vec4 v) {
  asm volatile(
      "{.reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [barrier], 16;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [barrier];}" ::"r"(
          smem_address(shared)),
      "r"(smem_address(barrier)), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
// Returns once the phase of the given parity is complete.
MOEOPT_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// One box of a rank-3 tensor map; what lies outside the tensor arrives as zeros and counts as bytes.
MOEOPT_DEVICE void tensor_copy(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier))
      : "memory");
}
// The same for data that is read once: it makes room in L2 first. Any policy, that of evict_normal too, made copies of
// data that is read again up to 10 % slower than none.
MOEOPT_DEVICE void tensor_copy_once(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}
// The same into both blocks of the cluster: to the same place, and as bytes of the barrier in the same place, of each.
MOEOPT_DEVICE void tensor_copy_to_both(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier)), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// Four 8 x 8 matrices of 16-bit values, transposed, one warp: lane 4 g + t holds elements [g][2t, 2t+1] of matrix i in
// register i, and lane 8 i + r gives the address of row r, 16 bytes, of the stored (transposed) matrix i.
MOEOPT_DEVICE void store_transposed(void* shared_row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(shared_row)),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}
MOEOPT_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 16 bytes per thread without registers; zeros are written where `valid` is false (nothing is read then).
MOEOPT_DEVICE void async_copy16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
MOEOPT_DEVICE void async_copy4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
// One arrival once all copies that this thread has started so far have landed; nobody waits here.
MOEOPT_DEVICE void async_copies_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// --- tensor cores ----------------------------------------------------------------------------------------------

// d += a b, one warp: a 16 x 16 and b 16 x 8 in BF16, d 16 x 8 in FP32. Lane 4 g + t holds
//   a0 = a[g][2t, 2t+1], a1 = a[g+8][2t, 2t+1], a2 = a[g][2t+8, 2t+9], a3 = a[g+8][2t+8, 2t+9],
//   b0 = b[2t, 2t+1][g], b1 = b[2t+8, 2t+9][g], d = d[g][2t], d[g][2t+1], d[g+8][2t], d[g+8][2t+1].
MOEOPT_DEVICE void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace moeopt

#include "moeopt/wgmma.cuh"

#endif
