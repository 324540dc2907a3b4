// MXFP4 weights to BF16, in registers: E2M1 codes of four bits, and one exponent (E8M0) per 32 of K.
//
//   8 codes ──sign and magnitude where BF16 has its sign, its lowest exponent bits and its highest mantissa bit──►
//   value x 2^-126 ──x 2^(s - 33): the factor of the group──► value x 2^(s - 127) x 2^-32
//
// Both steps are exact; E2M1's 0.5 passes as a subnormal BF16. Without the 2^-32, which goes when the products are
// summed (kMxfp4Rescale), the factor of a scale above 2 would not fit BF16. It does up to a scale of 2^33; greater
// ones, and the format's "not a number", count as infinite. Weights below 2^-94 lose bits.
//
// Code i of 8 and code i + 4 become one register, as their bits lie 16 apart: K is permuted, and whoever multiplies
// permutes the tokens. Other orders would take a shift and a mask more for every two weights.
#pragma once

#include "moeopt/device.cuh"

namespace moeopt {

constexpr float kMxfp4Rescale = 0x1p32f;

// The factor of a group, twice, from its exponent byte in each half of `exponents`.
MOEOPT_DEVICE uint32_t mxfp4_factor(uint32_t exponents) {
  return min_u16x2(exponents, 161u * 0x00010001u) * 128u + 94u * 128u * 0x00010001u;
}
MOEOPT_DEVICE uint32_t mxfp4_factor_of_byte(uint32_t exponent) { return mxfp4_factor(exponent * 0x00010001u); }

// values[i] = code i, code i + 4, as BF16 times the factor.
MOEOPT_DEVICE void bf16_of_e2m1(uint32_t codes, uint32_t factor, uint32_t (&values)[4]) {
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    // A product copies the code to both places. Its other bits are masked.
    const uint32_t bits = i < 2 ? codes : codes >> 8;
    const uint32_t placed = i % 2 ? (bits & 0x00f000f0u) * 0x0104u : (bits & 0x000f000fu) * 0x1040u;
    values[i] = mul_bf16x2(placed & 0x81c081c0u, factor);
  }
}

// The same order for 8 tokens, of two BF16 in a word: values[i] = token i, token i + 4.
MOEOPT_DEVICE void order_as_e2m1(const Vec4& tokens, uint32_t (&values)[4]) {
  constexpr uint32_t kLows = 0x5410, kHighs = 0x7632;
  values[0] = prmt(tokens.x, tokens.z, kLows);
  values[1] = prmt(tokens.x, tokens.z, kHighs);
  values[2] = prmt(tokens.y, tokens.w, kLows);
  values[3] = prmt(tokens.y, tokens.w, kHighs);
}

}  // namespace moeopt
