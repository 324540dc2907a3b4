// INT4 weights to BF16, in registers: (code - zero) * scale, codes of four bits, a BF16 scale and a zero point per
// group.
//
//   8 codes ──mask, or──► 128 + code ──+ -(128 + zero)──► code - zero ──x scale──► weight
//
// The first two are exact in BF16, whose numbers from 128 to 255 are the integers. The product is rounded once, to the
// BF16 nearest to the weight: exact where the scale has 4 significant bits or fewer.
//
// Code i of 8 and code i + 4 become one register, as in mxfp4.cuh: K has the same permutation.
#pragma once

#include "moeopt/device.cuh"

namespace moeopt {

constexpr uint32_t kInt4SymmetricZeroPoint = 8;  // of groups without zero points

// Of one weight tensor.
struct Int4Factors {
  const uint16_t* scale;  // BF16 [E, rows, K / group], contiguous, on 4 bytes
  const uint8_t* zero;    // [E, rows, K / group], likewise, 0 to 15; or null
  int32_t shift;          // group = 1 << shift: 32, 64 or 128
};

// What turns codes of one group into weights: the scale in the high half, -(128 + zero point) in the low one.
MOEOPT_DEVICE uint32_t int4_factor(uint32_t scale, uint32_t zero) { return scale << 16 | 0xc300u | zero; }

// values[i] = weights i and i + 4 of 8.
MOEOPT_DEVICE void bf16_of_int4(uint32_t codes, uint32_t factor, uint32_t (&values)[4]) {
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t above_128 = (codes >> (4 * i) & 0x000f000fu) | 0x43004300u;
    values[i] = mul_bf16x2_high(add_bf16x2_low(above_128, factor), factor);
  }
}

}  // namespace moeopt
