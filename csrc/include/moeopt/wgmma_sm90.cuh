// wgmma.mma_async (sm_90a): d[64][N] (+)= a[64][K] b[K][N] by a warpgroup, FP32 out; K = 16 in BF16, 32 in E4M3.
//
// b, and a where it has a descriptor, are K-major tiles in shared memory with a 128-byte swizzle: row r, 128 bytes
// long, starts 128 r bytes after a 1024-byte aligned base, and its 16-byte chunk c is at position c ^ (r % 8). A step
// along K is 32 bytes: it advances the descriptor's address, and the swizzle applies to the sum.
//
// Warp w of the warpgroup holds rows 16w .. 16w+15 of d; in it lane 4g + t holds, for each 8 columns n,
//   d[8 (n/8) ...]: d[4j] = d[g][8j + 2t], d[4j+1] = d[g][8j + 2t + 1], d[4j+2] and d[4j+3] the same of row g + 8.
// Registers as operand a are those of mma_m16n8k16; in E4M3 lane 4 g + t has a[g][4t .. 4t+3], a[g+8][the same],
// a[g][4t+16 .. 4t+19] and a[g+8][the same].
//
// Every accumulator is an operand of the instruction. Macros write these lists, one instantiated width per line below.
#pragma once

#include <cstdint>

namespace moeopt {

// wgmma.fence: before the first wgmma, and after other code wrote registers that it reads (accumulators, operand a).
MOEOPT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group
MOEOPT_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: at most kPending groups stay in flight.
template <int kPending>
MOEOPT_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// No instruction: keeps the compiler from moving accesses to an accumulator across a wait.
MOEOPT_DEVICE void wgmma_fence_operand(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// Matrix descriptor: address, leading dimension 1 (unused with a swizzle), 1024 bytes between groups of 8 rows, swizzle
// 128.
MOEOPT_DEVICE uint64_t matrix_descriptor(const void* shared) {
  constexpr uint64_t kFixed = (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
  return kFixed | ((smem_address(shared) & 0x3ffffu) >> 4);
}
// The descriptor `bytes` further along K.
MOEOPT_DEVICE uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}

// Operand names and constraints of the accumulators: of 8 or 4, then of the first N.
#define MOEOPT_NAMES(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define MOEOPT_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOEOPT_OUT8(i) MOEOPT_OUT4(i), MOEOPT_OUT4(i + 4)
#define MOEOPT_NAMES_8 MOEOPT_NAMES(0, 1, 2, 3, 4, 5, 6, 7)
#define MOEOPT_NAMES_16 MOEOPT_NAMES_8 ", " MOEOPT_NAMES(8, 9, 10, 11, 12, 13, 14, 15)
#define MOEOPT_NAMES_24 MOEOPT_NAMES_16 ", " MOEOPT_NAMES(16, 17, 18, 19, 20, 21, 22, 23)
#define MOEOPT_NAMES_32 MOEOPT_NAMES_24 ", " MOEOPT_NAMES(24, 25, 26, 27, 28, 29, 30, 31)
#define MOEOPT_NAMES_40 MOEOPT_NAMES_32 ", " MOEOPT_NAMES(32, 33, 34, 35, 36, 37, 38, 39)
#define MOEOPT_NAMES_48 MOEOPT_NAMES_40 ", " MOEOPT_NAMES(40, 41, 42, 43, 44, 45, 46, 47)
#define MOEOPT_NAMES_56 MOEOPT_NAMES_48 ", " MOEOPT_NAMES(48, 49, 50, 51, 52, 53, 54, 55)
#define MOEOPT_NAMES_64 MOEOPT_NAMES_56 ", " MOEOPT_NAMES(56, 57, 58, 59, 60, 61, 62, 63)
#define MOEOPT_NAMES_72 MOEOPT_NAMES_64 ", " MOEOPT_NAMES(64, 65, 66, 67, 68, 69, 70, 71)
#define MOEOPT_NAMES_80 MOEOPT_NAMES_72 ", " MOEOPT_NAMES(72, 73, 74, 75, 76, 77, 78, 79)
#define MOEOPT_OUT_8 MOEOPT_OUT8(0)
#define MOEOPT_OUT_16 MOEOPT_OUT_8, MOEOPT_OUT8(8)
#define MOEOPT_OUT_24 MOEOPT_OUT_16, MOEOPT_OUT8(16)
#define MOEOPT_OUT_32 MOEOPT_OUT_24, MOEOPT_OUT8(24)
#define MOEOPT_OUT_40 MOEOPT_OUT_32, MOEOPT_OUT8(32)
#define MOEOPT_OUT_48 MOEOPT_OUT_40, MOEOPT_OUT8(40)
#define MOEOPT_OUT_56 MOEOPT_OUT_48, MOEOPT_OUT8(48)
#define MOEOPT_OUT_64 MOEOPT_OUT_56, MOEOPT_OUT8(56)
#define MOEOPT_OUT_72 MOEOPT_OUT_64, MOEOPT_OUT8(64)
#define MOEOPT_OUT_80 MOEOPT_OUT_72, MOEOPT_OUT8(72)

// One instruction. Operands: `registers` accumulators, then the inputs (the variable arguments, named in `rest`), then
// `accumulate`, whose number is `last`.
#define MOEOPT_WGMMA(shape_and_types, registers, last, rest, ...)                                              \
  asm volatile("{.reg .pred keep; setp.ne.b32 keep, %" #last                                                   \
               ", 0;\n"                                                                                        \
               "wgmma.mma_async.sync.aligned." shape_and_types " {" MOEOPT_NAMES_##registers "}, " rest ";}\n" \
               : MOEOPT_OUT_##registers                                                                        \
               : __VA_ARGS__, "r"(accumulate))

// n columns; i = n / 2 accumulators, so i .. last are the numbers of the operands after them. a in shared memory:
#define MOEOPT_WGMMA_SHARED(n, i, j, last)                                                                      \
  MOEOPT_DEVICE void wgmma_bf16(float (&d)[i], uint64_t a, uint64_t b, int accumulate) {                        \
    MOEOPT_WGMMA("m64n" #n "k16.f32.bf16.bf16", i, last, "%" #i ", %" #j ", keep, 1, 1, 0, 0", "l"(a), "l"(b)); \
  }                                                                                                             \
  MOEOPT_DEVICE void wgmma_e4m3(float (&d)[i], uint64_t a, uint64_t b, int accumulate) {                        \
    MOEOPT_WGMMA("m64n" #n "k32.f32.e4m3.e4m3", i, last, "%" #i ", %" #j ", keep, 1, 1", "l"(a), "l"(b));       \
  }
// a in registers:
#define MOEOPT_WGMMA_REGISTERS(n, i, j, k, l, m, last)                                                                \
  MOEOPT_DEVICE void wgmma_bf16(float (&d)[i], const uint32_t (&a)[4], uint64_t b, int accumulate) {                  \
    MOEOPT_WGMMA("m64n" #n "k16.f32.bf16.bf16", i, last,                                                              \
                 "{%" #i ", %" #j ", %" #k ", %" #l "}, %" #m ", keep, 1, 1, 0", "r"(a[0]), "r"(a[1]), "r"(a[2]),     \
                 "r"(a[3]), "l"(b));                                                                                  \
  }                                                                                                                   \
  MOEOPT_DEVICE void wgmma_e4m3(float (&d)[i], const uint32_t (&a)[4], uint64_t b, int accumulate) {                  \
    MOEOPT_WGMMA("m64n" #n "k32.f32.e4m3.e4m3", i, last, "{%" #i ", %" #j ", %" #k ", %" #l "}, %" #m ", keep, 1, 1", \
                 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
  }

MOEOPT_WGMMA_SHARED(16, 8, 9, 10)
MOEOPT_WGMMA_SHARED(32, 16, 17, 18)
MOEOPT_WGMMA_SHARED(48, 24, 25, 26)
MOEOPT_WGMMA_SHARED(64, 32, 33, 34)
MOEOPT_WGMMA_SHARED(80, 40, 41, 42)
MOEOPT_WGMMA_SHARED(96, 48, 49, 50)
MOEOPT_WGMMA_SHARED(112, 56, 57, 58)
MOEOPT_WGMMA_SHARED(128, 64, 65, 66)
MOEOPT_WGMMA_SHARED(144, 72, 73, 74)
MOEOPT_WGMMA_SHARED(160, 80, 81, 82)
MOEOPT_WGMMA_REGISTERS(16, 8, 9, 10, 11, 12, 13)
MOEOPT_WGMMA_REGISTERS(32, 16, 17, 18, 19, 20, 21)
MOEOPT_WGMMA_REGISTERS(48, 24, 25, 26, 27, 28, 29)
MOEOPT_WGMMA_REGISTERS(64, 32, 33, 34, 35, 36, 37)
MOEOPT_WGMMA_REGISTERS(96, 48, 49, 50, 51, 52, 53)
MOEOPT_WGMMA_REGISTERS(112, 56, 57, 58, 59, 60, 61)
MOEOPT_WGMMA_REGISTERS(128, 64, 65, 66, 67, 68, 69)

#undef MOEOPT_WGMMA
}  // namespace moeopt
