// The functions of csrc/include/moeopt/device.cuh in C++, one fiber per GPU thread. Asynchronous work is done as late
// as the rules allow (cp.async and wgmma when they are waited for, the copy engine at a random moment), so that a
// kernel which reads too early or reuses memory too soon computes garbage here.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define MOEOPT_KERNEL inline
#define MOEOPT_PLAIN_KERNEL inline
#define MOEOPT_BOUNDS(threads, blocks)
#define MOEOPT_DEVICE inline
#define MOEOPT_GRID_CONSTANT
#define MOEOPT_UNROLL
#define MOEOPT_NO_UNROLL
#define MOEOPT_SHARED_BASE(name) unsigned char* const name = ::emulation::machine()->current->block->shared

namespace moeopt {

struct TensorMap {  // what cuTensorMapEncodeTiled is told; swizzle always 128 bytes, zeros outside
  const unsigned char* base;
  int element_bytes;
  int64_t sizes[3];
  int64_t strides[3];  // bytes; strides[0] is element_bytes
  int box[3];
};

struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};

inline ::emulation::Fiber& fiber() { return *::emulation::machine()->current; }
inline ::emulation::Block& block() { return *fiber().block; }

inline int thread_index() { return fiber().thread; }
inline int block_index() { return block().index; }
inline int block_index_y() { return block().grid->block_y; }
inline int block_threads() { return block().grid->threads; }
inline int grid_blocks() { return block().grid->blocks; }

constexpr uint32_t kSharedOrigin = 1024;
inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - block().shared) + kSharedOrigin;
}
inline unsigned char* shared_at(uint32_t address) { return block().shared + (address - kSharedOrigin); }

// --- numbers -------------------------------------------------------------------------------------------------

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float abs_f32(float x) { return std::fabs(x); }
inline float max_abs_f32(float a, float b) {
  if (a != a || b != b) return NAN;
  return std::fabs(a) > std::fabs(b) ? std::fabs(a) : std::fabs(b);
}
inline float min_f32(float a, float b) { return std::fmin(a, b); }
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7u) * 8 & 0xffu) << 8 * i;
  return result;
}
inline uint32_t prmt_or_sign(uint32_t a, uint32_t b, uint32_t selector) {
  const uint32_t bytes = prmt(a, b, selector);
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = bytes >> 8 * i & 0xffu;
    result |= ((selector >> (4 * i + 3) & 1u) == 0 ? byte : byte & 0x80u ? 0xffu : 0u) << 8 * i;
  }
  return result;
}
inline float exp_f32(float x) { return std::exp(x); }
inline float exp_approx(float x) { return std::exp(x); }

inline float rcp_approx(float x) { return 1.0f / x; }
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
}
inline uint32_t min_u16x2(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  return low | ((a >> 16) < (b >> 16) ? a >> 16 : b >> 16) << 16;
}
inline int popc(uint32_t bits) { return __builtin_popcount(bits); }

inline uint32_t bf16_bits(float value) {
  const uint32_t bits = bits_from_float(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
inline float from_bf16_bits(uint32_t bits) { return float_from_bits(bits << 16); }
inline uint32_t cvt_bf16x2_f32(float first, float second) { return bf16_bits(first) | (bf16_bits(second) << 16); }

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return cvt_bf16x2_f32(from_bf16_bits(a & 0xffffu) * from_bf16_bits(b & 0xffffu),
                        from_bf16_bits(a >> 16) * from_bf16_bits(b >> 16));
}

inline uint32_t add_bf16x2_low(uint32_t a, uint32_t b) {
  const float low = from_bf16_bits(b & 0xffffu);
  return cvt_bf16x2_f32(from_bf16_bits(a & 0xffffu) + low, from_bf16_bits(a >> 16) + low);
}
inline uint32_t mul_bf16x2_high(uint32_t a, uint32_t b) {
  const float high = from_bf16_bits(b >> 16);
  return cvt_bf16x2_f32(from_bf16_bits(a & 0xffffu) * high, from_bf16_bits(a >> 16) * high);
}

inline float decode_e4m3(uint32_t bits) {
  const uint32_t exponent = (bits >> 3) & 15u, mantissa = bits & 7u;
  const float sign = (bits & 0x80u) ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-9f;
  return sign * std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, static_cast<int>(exponent) - 7);
}
inline const std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (uint32_t bits = 0; bits < 256; ++bits) values[bits] = decode_e4m3(bits);
  return values;
}();
inline float float_from_e4m3(uint32_t bits) { return kE4m3Values[bits]; }
inline uint32_t cvt_bf16x2_e4m3x2(uint32_t pair) {
  return cvt_bf16x2_f32(float_from_e4m3(pair & 0xffu), float_from_e4m3((pair >> 8) & 0xffu));
}
inline uint32_t e4m3_bits(float value) {  // round to nearest even, saturate to 448
  if (value != value) return 0x7f;
  const uint32_t sign = std::signbit(value) ? 0x80u : 0u;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7eu;
  int exponent = magnitude == 0 ? -6 : std::ilogb(magnitude);
  if (exponent < -6) exponent = -6;
  const float quantum = std::ldexp(1.0f, exponent - 3);
  const auto steps = static_cast<uint32_t>(std::nearbyint(magnitude / quantum));  // 8 .. 16, or 0 .. 8 subnormal
  return sign | static_cast<uint32_t>((exponent + 6) * 8 + static_cast<int>(steps));
}
inline uint32_t cvt_e4m3x2_f32(float first, float second) { return e4m3_bits(first) | (e4m3_bits(second) << 8); }

// --- memory --------------------------------------------------------------------------------------------------

inline Vec4 ld_global_nc_v4(const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16) ::emulation::fail("16-byte load at a misaligned address");
  Vec4 v;
  std::memcpy(&v, pointer, 16);
  return v;
}
inline Vec4 ld_global_nc_no_allocate_v4(const void* pointer) { return ld_global_nc_v4(pointer); }
inline float ld_global_nc(const float* pointer) { return *pointer; }
inline uint32_t ld_global_nc(const uint8_t* pointer) { return *pointer; }
inline uint32_t ld_global_nc(const uint16_t* pointer) { return *pointer; }
inline uint32_t ld_global_nc(const uint32_t* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % 4) ::emulation::fail("4-byte load at a misaligned address");
  return *pointer;
}
inline Vec4 ld_global_cg_v4(const void* pointer) { return ld_global_nc_v4(pointer); }
inline float ld_global_cg(const float* pointer) { return *pointer; }
inline int ld_global_cg(const int* pointer) { return *pointer; }
inline int64_t ld_global_cg(const int64_t* pointer) { return *pointer; }
inline void fence_acq_rel_gpu() {}
inline int atom_add_global(int* pointer, int value) {
  ::emulation::made_progress();
  const int old = *pointer;
  *pointer += value;
  return old;
}
inline void red_add_release(int* counter, int value) { atom_add_global(counter, value); }
inline void wait_ld_acquire(const int* counter, int value) {
  while (*counter < value) ::emulation::yield("what another block makes");
}
inline void st_relaxed(uint32_t* word, uint32_t value) {
  ::emulation::made_progress();
  *word = value;
}
inline uint32_t ld_relaxed(const uint32_t* word) {
  if (*word == 0) ::emulation::yield("a word that another block makes");
  return *word;
}
inline void atom_max_shared(int* pointer, int value) { *pointer = value > *pointer ? value : *pointer; }
inline uint32_t atom_or_shared(uint32_t* pointer, uint32_t bits) {
  const uint32_t old = *pointer;
  *pointer |= bits;
  return old;
}

// --- threads -------------------------------------------------------------------------------------------------

inline void meet(::emulation::Barrier& barrier, int threads, const char* what) {
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    ::emulation::made_progress();
    return;
  }
  while (barrier.generation == generation) ::emulation::yield(what, {&barrier.generation, ~uint64_t{0}, generation});
}
inline void bar_sync() { meet(block().named[0], block_threads(), "bar_sync 0"); }
inline void bar_warp_sync() { meet(block().warps[thread_index() / 32], 32, "bar_warp_sync"); }
inline void bar_sync(int barrier, int threads) { meet(block().named[barrier], threads, "bar_sync"); }

inline int cluster_ctarank() { return block().index % block().grid->cluster_blocks; }
inline ::emulation::Block& cluster_block(int rank) {
  if (rank >= block().grid->cluster_blocks) ::emulation::fail("no such block in the cluster");
  return *::emulation::machine()->blocks[block().cluster + static_cast<size_t>(rank)];
}
inline void barrier_cluster_sync() {
  meet(cluster_block(0).all_of_cluster, block_threads() * block().grid->cluster_blocks, "barrier_cluster_sync");
}

inline uint32_t* exchange_of(int lane) {
  return block().exchange.data() + (static_cast<size_t>(thread_index() / 32) * 32 + lane) * 8;
}
template <typename Combine>
inline uint32_t warp_exchange(uint32_t value, Combine combine) {
  exchange_of(thread_index() % 32)[0] = value;
  bar_warp_sync();
  const uint32_t result = combine();
  bar_warp_sync();
  return result;
}
inline int shfl_idx(int value, int lane) {
  return static_cast<int>(warp_exchange(static_cast<uint32_t>(value), [lane] { return exchange_of(lane)[0]; }));
}
inline float shfl_bfly(float value, int mask) {
  return float_from_bits(
      warp_exchange(bits_from_float(value), [&] { return exchange_of((thread_index() % 32) ^ mask)[0]; }));
}
inline uint32_t redux_max(uint32_t value) {
  return warp_exchange(value, [] {
    uint32_t result = 0;
    for (int lane = 0; lane < 32; ++lane) result = exchange_of(lane)[0] > result ? exchange_of(lane)[0] : result;
    return result;
  });
}
inline uint32_t redux_min(uint32_t value) {
  return warp_exchange(value, [] {
    uint32_t result = 0xffffffffu;
    for (int lane = 0; lane < 32; ++lane) result = exchange_of(lane)[0] < result ? exchange_of(lane)[0] : result;
    return result;
  });
}
inline int warp_inclusive_sum(int value) {
  return static_cast<int>(warp_exchange(static_cast<uint32_t>(value), [] {
    uint32_t sum = 0;
    for (int lane = 0; lane <= thread_index() % 32; ++lane) sum += exchange_of(lane)[0];
    return sum;
  }));
}
inline uint32_t match_any(int value) {
  return warp_exchange(static_cast<uint32_t>(value), [value] {
    uint32_t same = 0;
    for (int lane = 0; lane < 32; ++lane) {
      same |= static_cast<uint32_t>(exchange_of(lane)[0] == static_cast<uint32_t>(value)) << lane;
    }
    return same;
  });
}
template <int>
inline void setmaxnreg_dec() {}
template <int>
inline void setmaxnreg_inc() {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

// --- mbarrier and the copy engine ------------------------------------------------------------------------------

inline uint32_t shared_offset(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - block().shared);
}
inline ::emulation::MBarrier& mbarrier_state(::emulation::Block& owner, uint32_t offset) {
  auto found = owner.mbarriers.find(offset);
  if (found == owner.mbarriers.end()) ::emulation::fail("mbarrier used before its init");
  return found->second;
}
inline void expect_running(const ::emulation::Block& owner) {  // what ran out, may be another block's by now
  for (const auto& each : ::emulation::machine()->fibers) {
    if (each->block == &owner && !each->done) return;
  }
  ::emulation::machine()->failure = "block " + std::to_string(owner.index) + " ended before what others send it";
}
inline void mbarrier_settle(::emulation::MBarrier& state) {
  if (state.pending == 0 && state.bytes == 0) {
    state.pending = state.expected;
    ++state.phase;
    ::emulation::made_progress();
  }
}
inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  auto& state = block().mbarriers[shared_offset(barrier)];
  state = {};
  state.expected = state.pending = arrivals;
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  auto& state = mbarrier_state(block(), shared_offset(barrier));
  if (state.pending == 0) ::emulation::fail("more arrivals at an mbarrier than it was made for");
  state.bytes += bytes;
  --state.pending;
  ::emulation::made_progress();
  mbarrier_settle(state);
}
inline void mbarrier_arrive_cluster(uint64_t* barrier, int rank) {
  ::emulation::Block& owner = cluster_block(rank);
  expect_running(owner);
  auto& state = mbarrier_state(owner, shared_offset(barrier));
  if (state.pending == 0) ::emulation::fail("more arrivals at an mbarrier than it was made for");
  --state.pending;
  ::emulation::made_progress();
  mbarrier_settle(state);
}
inline void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  auto& state = mbarrier_state(block(), shared_offset(barrier));
  while ((state.phase & 1u) == parity) {
    ::emulation::yield(parity ? "an mbarrier (1)" : "an mbarrier (0)", {&state.phase, 1, parity});
  }
}
// Bytes may land before they are expected, if another block asked for them: the phase then still lacks the arrival that
// comes with the expectation. Nothing may land in a phase that is not waited for.
inline void mbarrier_complete(::emulation::Block* owner, uint32_t offset, int64_t bytes, bool own) {
  auto& state = mbarrier_state(*owner, offset);
  state.bytes -= bytes;
  if (state.bytes < 0 && (own || state.pending == 0)) {
    ::emulation::machine()->failure = "an mbarrier got more bytes than it was told to expect";
    return;
  }
  mbarrier_settle(state);
}

inline void st_async_v4(void* shared, uint64_t* barrier, int rank, Vec4 v) {
  if (smem_address(shared) % 16) ::emulation::fail("16-byte store at a misaligned address");
  if (block().grid->cluster_blocks == 1) ::emulation::fail("an illegal instruction without a cluster");
  ::emulation::Block* owner = &cluster_block(rank);
  expect_running(*owner);
  const uint32_t to = shared_offset(shared), offset = shared_offset(barrier);
  auto& state = mbarrier_state(*owner, offset);
  if (state.pending == 0) ::emulation::fail("more arrivals at an mbarrier than it was made for");
  state.bytes += 16;
  --state.pending;
  ::emulation::machine()->in_flight.push_back([=] {
    expect_running(*owner);
    std::memcpy(owner->shared + to, &v, 16);
    mbarrier_complete(owner, offset, 16, true);
  });
}

// Address bits 4-6 (the chunk of 16 bytes) xor bits 7-9 (the row in a group of 8).
inline uint32_t swizzle(uint32_t address) { return address ^ ((address >> 3) & 0x70u); }

// The box at (x, y, z), dimension 0 fastest, rows of 128 bytes one after the other, into one block of the cluster.
inline void tma_load_into(::emulation::Block* owner, void* shared, const TensorMap* map, int x, int y, int z,
                          uint64_t* barrier) {
  if (smem_address(shared) % 1024) ::emulation::fail("tensor copy: box is not 1024-byte aligned");
  if (map->box[0] * map->element_bytes != 128) ::emulation::fail("tensor copy: box rows are not 128 bytes");
  const bool own = owner == &block();
  const uint32_t address = smem_address(shared), offset = shared_offset(barrier);
  const TensorMap m = *map;
  const int start[3] = {x, y, z};
  ::emulation::machine()->in_flight.push_back([=] {
    expect_running(*owner);
    int total = 1;
    for (int d = 0; d < 3; ++d) total *= m.box[d];
    for (int i = 0; i < total; ++i) {
      int rest = i;
      bool inside = true;
      const unsigned char* from = m.base;
      for (int d = 0; d < 3; ++d) {
        const int64_t at = start[d] + rest % m.box[d];
        rest /= m.box[d];
        inside = inside && at >= 0 && at < m.sizes[d];
        from += at * m.strides[d];
      }
      unsigned char* to = owner->shared + (swizzle(address + i * m.element_bytes) - kSharedOrigin);
      if (inside) {
        std::memcpy(to, from, m.element_bytes);
      } else {
        std::memset(to, 0, m.element_bytes);
      }
    }
    mbarrier_complete(owner, offset, static_cast<int64_t>(total) * m.element_bytes, own);
  });
}
inline void tma_load_3d(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  tma_load_into(&block(), shared, map, x, y, z, barrier);
}
inline void tma_load_3d_evict_first(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  tma_load_3d(shared, map, x, y, z, barrier);
}
inline void tma_load_3d_multicast(void* shared, const TensorMap* map, int x, int y, int z, uint64_t* barrier) {
  for (int rank = 0; rank < 2; ++rank) tma_load_into(&cluster_block(rank), shared, map, x, y, z, barrier);
}
inline void stmatrix_x4_trans(void* shared_row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const uint32_t mine[4] = {m0, m1, m2, m3};
  if (smem_address(shared_row) % 16) ::emulation::fail("stmatrix: misaligned address");
  exchange_of(lane)[0] = smem_address(shared_row);
  bar_warp_sync();
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      const auto value = static_cast<uint16_t>(half ? mine[i] >> 16 : mine[i]);
      std::memcpy(shared_at(exchange_of(8 * i + 2 * t + half)[0]) + 2 * g, &value, 2);
    }
  }
  bar_warp_sync();
}
inline void prefetch_tensormap(const TensorMap*) {}
inline void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  if (smem_address(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16 || bytes <= 0) {
    ::emulation::fail("bulk copy: not whole 16 bytes at aligned addresses");
  }
  ::emulation::Block* owner = &block();
  const uint32_t to = shared_offset(shared), offset = shared_offset(barrier);
  ::emulation::machine()->in_flight.push_back([=] {
    expect_running(*owner);
    std::memcpy(owner->shared + to, global, static_cast<size_t>(bytes));
    mbarrier_complete(owner, offset, bytes, true);
  });
}
inline void bulk_load_evict_first(void* shared, const void* global, int bytes, uint64_t* barrier) {
  bulk_load(shared, global, bytes, barrier);
}

inline void cp_async_16(void* shared, const void* global, bool valid) {
  if (smem_address(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    ::emulation::fail("cp.async: misaligned address");
  }
  fiber().open_copies.push_back({shared, global, 16, valid});
}
inline void cp_async_4(void* shared, const void* global, bool valid = true) {
  if (smem_address(shared) % 4 || reinterpret_cast<uintptr_t>(global) % 4) {
    ::emulation::fail("cp.async: misaligned address");
  }
  fiber().open_copies.push_back({shared, global, 4, valid});
}
inline void cp_async_mbarrier_arrive(uint64_t* barrier) {
  ::emulation::Block* owner = &block();
  const uint32_t offset = shared_offset(barrier);
  ::emulation::machine()->in_flight.push_back([owner, offset, copies = std::move(fiber().open_copies)] {
    for (const auto& copy : copies) {
      if (copy.valid) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
    auto& state = mbarrier_state(*owner, offset);
    if (state.pending == 0) ::emulation::machine()->failure = "more arrivals at an mbarrier than it was made for";
    --state.pending;
    mbarrier_settle(state);
  });
  fiber().open_copies.clear();
}

// --- tensor cores ----------------------------------------------------------------------------------------------

inline float half_of(uint32_t pair, int index) { return from_bf16_bits(index ? pair >> 16 : pair & 0xffffu); }

inline void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(exchange_of(lane), mine, sizeof(mine));
  bar_warp_sync();
  for (int r = 0; r < 4; ++r) {
    const int row = g + 8 * (r / 2), column = 2 * t + r % 2;
    float sum = d[r];
    for (int k = 0; k < 16; ++k) {
      const uint32_t* a = exchange_of(row % 8 * 4 + k % 8 / 2);
      const uint32_t* b = exchange_of(column * 4 + k % 8 / 2);
      sum += half_of(a[(row >= 8) + 2 * (k >= 8)], k % 2) * half_of(b[4 + (k >= 8)], k % 2);
    }
    d[r] = sum;
  }
  bar_warp_sync();
}

inline void wgmma_fence() { bar_warp_sync(); }
inline void wgmma_fence_operand(float&) {}
inline uint64_t matrix_descriptor(const void* shared) { return smem_address(shared) >> 4; }
inline uint64_t advance_descriptor(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

template <int kRegisters>
inline void wgmma_bf16(float (&d)[kRegisters], uint64_t a, uint64_t b, int accumulate) {
  fiber().open_wgmma.push_back({d, kRegisters * 2, false, nullptr, a, b, accumulate != 0, false});
}
template <int kRegisters>
inline void wgmma_bf16(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  fiber().open_wgmma.push_back({d, kRegisters * 2, true, a, 0, b, accumulate != 0, false});
}
template <int kRegisters>
inline void wgmma_e4m3(float (&d)[kRegisters], uint64_t a, uint64_t b, int accumulate) {
  fiber().open_wgmma.push_back({d, kRegisters * 2, false, nullptr, a, b, accumulate != 0, true});
}
template <int kRegisters>
inline void wgmma_e4m3(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  fiber().open_wgmma.push_back({d, kRegisters * 2, true, a, 0, b, accumulate != 0, true});
}
inline void wgmma_commit_group() {
  fiber().wgmma_groups.push_back(std::move(fiber().open_wgmma));
  fiber().open_wgmma.clear();
}

// Row r of a tile along one step of K: 32 bytes in two chunks, 16 elements of BF16 or 32 of E4M3.
inline void read_tile_row(uint64_t descriptor, int row, bool fp8, float* elements) {
  const uint32_t address = static_cast<uint32_t>(descriptor) * 16 + row * 128;
  for (int chunk = 0; chunk < 2; ++chunk) {
    const unsigned char* at = shared_at(swizzle(address + 16 * chunk));
    if (fp8) {
      for (int i = 0; i < 16; ++i) *elements++ = float_from_e4m3(at[i]);
    } else {
      uint16_t bits[8];
      std::memcpy(bits, at, 16);
      for (int i = 0; i < 8; ++i) *elements++ = from_bf16_bits(bits[i]);
    }
  }
}
inline void execute_wgmma(const ::emulation::WgmmaOp& op) {
  const int lane = thread_index() % 32, g = lane / 4, t = lane % 4, warp = thread_index() / 32 % 4;
  const int depth = op.fp8 ? 32 : 16;
  if (op.a_in_registers) std::memcpy(exchange_of(lane), op.a_registers, 16);
  bar_warp_sync();
  float a[2][32], row[32], b[32][8] = {};
  for (int half = 0; half < 2; ++half) {
    if (op.a_in_registers) {
      for (int k = 0; k < depth; ++k) {
        if (op.fp8) {
          const uint32_t bytes = exchange_of(g * 4 + k % 16 / 4)[half + 2 * (k >= 16)];
          a[half][k] = float_from_e4m3(bytes >> 8 * (k % 4) & 0xffu);
        } else {
          a[half][k] = half_of(exchange_of(g * 4 + k % 8 / 2)[half + 2 * (k >= 8)], k % 2);
        }
      }
    } else {
      read_tile_row(op.a, 16 * warp + g + 8 * half, op.fp8, a[half]);
    }
  }
  // Two columns of two rows each, of four tiles at a time: sums that do not wait for each other, each in order of k.
  for (int first = 0; first < op.columns / 2; first += 16) {
    const int tiles = op.columns / 2 - first < 16 ? (op.columns / 2 - first) / 4 : 4;
    for (int i = 0; i < 2 * tiles; ++i) {
      read_tile_row(op.b, (first + i / 2 * 4) * 2 + 2 * t + i % 2, op.fp8, row);
      for (int k = 0; k < depth; ++k) b[k][i] = row[k];
    }
    float sums[2][8] = {};
    for (int r = 0; r < 4 * tiles; ++r) {
      if (op.accumulate) sums[r % 4 / 2][r / 4 * 2 + r % 2] = op.d[first + r];
    }
    for (int k = 0; k < depth; ++k) {
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 8; ++i) sums[half][i] += a[half][k] * b[k][i];
      }
    }
    for (int r = 0; r < 4 * tiles; ++r) op.d[first + r] = sums[r % 4 / 2][r / 4 * 2 + r % 2];
  }
  bar_warp_sync();
}
template <int kPending>
inline void wgmma_wait_group() {
  bar_warp_sync();
  auto& groups = fiber().wgmma_groups;
  while (groups.size() > static_cast<size_t>(kPending)) {
    for (const auto& op : groups.front()) execute_wgmma(op);
    groups.erase(groups.begin());
  }
  bar_warp_sync();
}

}  // namespace moeopt
