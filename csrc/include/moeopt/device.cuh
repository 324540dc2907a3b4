// The hardware operations that the kernels use, one function per operation, named after its PTX instruction.
//
// Kernels contain no intrinsics and no inline PTX of their own. With MOEOPT_EMULATE, `emulated_device.h`
// (tests/unit/ops/emulation) implements the same functions on a CPU, one fiber per GPU thread; every other header here
// is plain C++. The two implementations are compared by the GPU tests.
//
// Glossary of the CUDA kernels:
//   pair            one (token, slot of its top-k) with the local expert it was routed to; T k of them
//   expert offsets  prefix sums of the pairs per expert: expert e has the sorted positions [offset[e], offset[e + 1])
//   direct          kernels for small batches: weights go from global memory straight into mma registers
//   grouped         kernels for any batch: pairs are sorted by expert, then one GEMM launch covers all experts
//   up, down        first GEMM (gate and up projection, then SwiGLU: h), second GEMM (down projection: y)
//   combine         weighted sum of a token's rows of y
//   token tile      up to 16 .. 160 sorted positions of one expert; row tile: 256 rows of its weights
//   work tile       one token tile x one row tile, the unit that the tile scheduler hands to a block
//   step            128 bytes of every weight row along K
//   stage           shared memory for one step of a work tile; the stages of a block form a ring
//   box             what one TMA load copies into a stage: 128 weight rows x 128 bytes
//   producer, math  warpgroups that fill the ring (TMA, cp.async); warpgroups that multiply (wgmma) and store
//   cluster         two blocks that share weights: each loads half a stage and multicasts it to both ("x2", paired)
//   staging         shared memory through which a math warpgroup transposes its results for 16-byte stores
#pragma once

#include <cstdint>

#if defined(MOEOPT_EMULATE)

#include "emulated_device.h"

#else

#include <cuda.h>  // the type CUtensorMap only; nothing of the driver library is linked

// Every kernel is a template, if necessary over a dummy (MOEOPT_PLAIN_KERNEL): a __global__ function cannot be inline,
// and several files include the headers.
#define MOEOPT_KERNEL __global__
#define MOEOPT_PLAIN_KERNEL \
  template <int kOnly = 0>  \
  __global__
#define MOEOPT_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define MOEOPT_DEVICE __device__ __forceinline__
#define MOEOPT_GRID_CONSTANT __grid_constant__
#define MOEOPT_UNROLL _Pragma("unroll")
#define MOEOPT_NO_UNROLL _Pragma("unroll 1")
// Base of dynamic shared memory, rounded up to the 1024 bytes that a 128-byte swizzled tile needs.
#define MOEOPT_SHARED_BASE(name)                       \
  extern __shared__ unsigned char moeopt_shared_raw[]; \
  unsigned char* const name = moeopt_shared_raw + ((1024u - (smem_address(moeopt_shared_raw) & 1023u)) & 1023u)

namespace moeopt {

using TensorMap = CUtensorMap;

struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};

MOEOPT_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }  // %tid.x
MOEOPT_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }    // %ctaid.x
MOEOPT_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }  // %ctaid.y
MOEOPT_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }  // %ntid.x
MOEOPT_DEVICE int grid_blocks() { return static_cast<int>(gridDim.x); }     // %nctaid.x

// cvta.to.shared
MOEOPT_DEVICE uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- numbers -------------------------------------------------------------------------------------------------

MOEOPT_DEVICE float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }  // mov.b32
MOEOPT_DEVICE uint32_t bits_from_float(float value) { return __float_as_uint(value); }
MOEOPT_DEVICE float abs_f32(float x) { return fabsf(x); }  // abs.f32
// max.NaN.f32 of the magnitudes; NaN if either is.
MOEOPT_DEVICE float max_abs_f32(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}
MOEOPT_DEVICE float min_f32(float a, float b) { return fminf(a, b); }  // min.f32
// prmt.b32: result byte i is byte (nibble i of `selector`) of a (0 to 3) or b (4 to 7).
MOEOPT_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
// prmt.b32 again: nibbles of `selector` from 8 on give the sign of byte (nibble - 8), eight times.
MOEOPT_DEVICE uint32_t prmt_or_sign(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}
// max.u16x2, of each 16-bit half.
MOEOPT_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
// min.u16x2, of each 16-bit half.
MOEOPT_DEVICE uint32_t min_u16x2(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.u16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}
// mul.bf16x2: rounds to nearest even; subnormal numbers go in and come out.
MOEOPT_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
// add.bf16x2 of the low half of b to both halves of a. Which half an instruction reads twice costs nothing.
MOEOPT_DEVICE uint32_t add_bf16x2_low(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("{.reg .b16 lo, hi; .reg .b32 twice; mov.b32 {lo, hi}, %2; mov.b32 twice, {lo, lo};\n"
      "add.rn.bf16x2 %0, %1, twice;}"
      : "=r"(sum)
      : "r"(a), "r"(b));
  return sum;
}
// mul.bf16x2 of both halves of a by the high half of b.
MOEOPT_DEVICE uint32_t mul_bf16x2_high(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("{.reg .b16 lo, hi; .reg .b32 twice; mov.b32 {lo, hi}, %2; mov.b32 twice, {hi, hi};\n"
      "mul.rn.bf16x2 %0, %1, twice;}"
      : "=r"(product)
      : "r"(a), "r"(b));
  return product;
}
MOEOPT_DEVICE float exp_f32(float x) { return expf(x); }  // the library's accurate function
// ex2.approx.ftz.f32 of x log2(e): error about 2 units in the last place of FP32, far below BF16's.
MOEOPT_DEVICE float exp_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
// rcp.approx.ftz.f32: error at most 1 unit in the last place of FP32; a division is 8 instructions and a branch.
MOEOPT_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MOEOPT_DEVICE int popc(uint32_t bits) { return __popc(bits); }  // popc.b32

// cvt.rn.bf16x2.f32: `first` becomes the low half. Rounds to nearest even.
MOEOPT_DEVICE uint32_t cvt_bf16x2_f32(float first, float second) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}
// cvt.rn.f16x2.e4m3x2, then through FP32 to two BF16. Takes the low 16 bits, first value in the low byte. Exact; NaN
// stays NaN.
MOEOPT_DEVICE uint32_t cvt_bf16x2_e4m3x2(uint32_t pair) {
  uint32_t half2;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(static_cast<uint16_t>(pair)));
  float first, second;
  asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(first), "=f"(second)
      : "r"(half2));
  return cvt_bf16x2_f32(first, second);
}
// cvt.rn.satfinite.e4m3x2.f32: `first` becomes the low byte. Rounds to nearest even, saturates to 448.
MOEOPT_DEVICE uint32_t cvt_e4m3x2_f32(float first, float second) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
  return packed;
}

// --- memory --------------------------------------------------------------------------------------------------

// ld.global.nc: data that nothing writes while the kernel runs; it may stay in L1.
MOEOPT_DEVICE float ld_global_nc(const float* pointer) { return __ldg(pointer); }
MOEOPT_DEVICE uint32_t ld_global_nc(const uint8_t* pointer) { return __ldg(pointer); }
MOEOPT_DEVICE uint32_t ld_global_nc(const uint16_t* pointer) { return __ldg(pointer); }
MOEOPT_DEVICE uint32_t ld_global_nc(const uint32_t* pointer) { return __ldg(pointer); }
MOEOPT_DEVICE Vec4 ld_global_nc_v4(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}
// ld.global.nc.L1::no_allocate: the same for data that this launch reads once.
MOEOPT_DEVICE Vec4 ld_global_nc_no_allocate_v4(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}
// ld.global.cg, from L2: data that another block of this launch or an overlapping launch wrote. L1 is not coherent.
MOEOPT_DEVICE Vec4 ld_global_cg_v4(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}
MOEOPT_DEVICE float ld_global_cg(const float* pointer) { return __ldcg(pointer); }
MOEOPT_DEVICE int ld_global_cg(const int* pointer) { return __ldcg(pointer); }
MOEOPT_DEVICE int64_t ld_global_cg(const int64_t* pointer) {
  return __ldcg(reinterpret_cast<const long long*>(pointer));
}

// fence.acq_rel.gpu: release before a counter is added to, acquire after it was read. __threadfence is fence.sc, which
// is slower.
MOEOPT_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
MOEOPT_DEVICE int atom_add_global(int* pointer, int value) { return atomicAdd(pointer, value); }  // atom.global.add
// red.release.gpu.add: who acquires the counter sees earlier writes of this thread and of those it synchronised with.
MOEOPT_DEVICE void red_add_release(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// ld.acquire.gpu, repeated until the counter is at least `value`.
MOEOPT_DEVICE void wait_ld_acquire(const int* counter, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < value);
}
// st.relaxed.gpu and ld.relaxed.gpu: a word that another block of this launch waits for. Orders nothing else.
MOEOPT_DEVICE void st_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
MOEOPT_DEVICE uint32_t ld_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
MOEOPT_DEVICE void atom_max_shared(int* pointer, int value) { atomicMax(pointer, value); }  // atom.shared.max
// atom.shared.or; returns the bits before.
MOEOPT_DEVICE uint32_t atom_or_shared(uint32_t* pointer, uint32_t bits) { return atomicOr(pointer, bits); }

// --- threads -------------------------------------------------------------------------------------------------

MOEOPT_DEVICE void bar_sync() { __syncthreads(); }  // bar.sync 0, all threads of the block
// bar.sync, of `threads` threads.
MOEOPT_DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
MOEOPT_DEVICE void bar_warp_sync() { __syncwarp(); }  // bar.warp.sync, all lanes
// %cluster_ctarank: the number of this block in its cluster.
MOEOPT_DEVICE int cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// barrier.cluster.arrive.release and wait.acquire, by all threads of the cluster: orders shared memory too.
MOEOPT_DEVICE void barrier_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// shfl.sync.idx. The compiler knows that all lanes get the same value, and can keep it in a uniform register.
MOEOPT_DEVICE int shfl_idx(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// shfl.sync.bfly
MOEOPT_DEVICE float shfl_bfly(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
MOEOPT_DEVICE uint32_t redux_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }  // redux.sync.max
MOEOPT_DEVICE uint32_t redux_min(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }  // redux.sync.min
MOEOPT_DEVICE uint32_t match_any(int value) { return __match_any_sync(0xffffffffu, value); }        // match.any.sync
// Sum over this lane and those before it, by shfl.sync.up.
MOEOPT_DEVICE int warp_inclusive_sum(int value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  MOEOPT_UNROLL
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, static_cast<unsigned>(offset));
    value += lane >= offset ? other : 0;
  }
  return value;
}

// setmaxnreg.dec, setmaxnreg.inc: registers per thread of this warpgroup from here on. All four warps execute it, once.
template <int kRegisters>
MOEOPT_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MOEOPT_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: lets the next kernel start; waits until the previous kernel's writes are visible.
MOEOPT_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
MOEOPT_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- mbarrier, cp.async and TMA --------------------------------------------------------------------------------

// mbarrier.init
MOEOPT_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}
// fence.mbarrier_init: after the inits, before another thread or TMA uses the barriers.
MOEOPT_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// fence.proxy.async: orders this thread's accesses to shared memory against TMA and wgmma.
MOEOPT_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// mbarrier.arrive.expect_tx
MOEOPT_DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}
// mapa and mbarrier.arrive at the same barrier of block `rank` of the cluster; a block without a cluster is rank 0. The
// default release, not .cluster: that would wait until every store of this thread has reached L2.
MOEOPT_DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, int rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}
// mapa, mbarrier.arrive.expect_tx and st.async: 16 bytes to the same place of block `rank` of the cluster, and the one
// arrival of the barrier there. Whoever waits for that phase sees them. A release at cluster scope would wait for L2.
MOEOPT_DEVICE void st_async_v4(void* shared, uint64_t* barrier, int rank, Vec4 v) {
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
// mbarrier.try_wait.parity, repeated until the phase of this parity is complete.
MOEOPT_DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
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

// cp.async.bulk.tensor.3d: one box. Elements outside the tensor arrive as zeros and count as bytes.
MOEOPT_DEVICE void tma_load_3d(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier))
      : "memory");
}
// The same with .L2::cache_hint evict_first, for data that is read once. For data that is read again any hint, even
// evict_normal, was up to 10 % slower than none.
MOEOPT_DEVICE void tma_load_3d_evict_first(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}
// The same with .multicast::cluster to both blocks: to the same place, and as bytes of the same barrier, of each.
MOEOPT_DEVICE void tma_load_3d_multicast(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier)), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// prefetch.tensormap
MOEOPT_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// cp.async.cg of 16 bytes; where `valid` is false it writes zeros and reads nothing.
MOEOPT_DEVICE void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// cp.async.ca of 4 bytes
MOEOPT_DEVICE void cp_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
// The same; where `valid` is false it writes zeros and reads nothing.
MOEOPT_DEVICE void cp_async_4(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(shared)), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
// cp.async.mbarrier.arrive.noinc: one arrival once all copies that this thread has started have landed. Does not wait.
MOEOPT_DEVICE void cp_async_mbarrier_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}
// cp.async.bulk: neighbouring bytes, a multiple of 16, for which `barrier` waits.
MOEOPT_DEVICE void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(shared)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}
// The same with .L2::cache_hint evict_first, for data that is read once.
MOEOPT_DEVICE void bulk_load_evict_first(void* shared, const void* global, int bytes, uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(smem_address(shared)),
      "l"(global), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
      : "memory");
}

// --- matrices --------------------------------------------------------------------------------------------------

// stmatrix.m8n8.x4.trans, by one warp: four 8 x 8 matrices of 16-bit values, transposed. Lane 4 g + t holds elements
// [g][2t, 2t+1] of matrix i in register i; lane 8 i + r gives the address of row r, 16 bytes, of the stored matrix i.
MOEOPT_DEVICE void stmatrix_x4_trans(void* shared_row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(shared_row)),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// mma.m16n8k16, by one warp: d += a b with a 16 x 16 and b 16 x 8 in BF16, d 16 x 8 in FP32. Lane 4 g + t holds
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

#include "moeopt/wgmma_sm90.cuh"

#endif
