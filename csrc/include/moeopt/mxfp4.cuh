// MXFP4 weights to BF16 or E4M3, in registers: E2M1 codes of four bits, and one exponent (E8M0) per 32 of K.
//
// To BF16:
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
//
// To E4M3, which has 18 powers of two: weights are taken relative to the largest scale of their row, which becomes 2^6.
//
//   group ──► 8 bytes: the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^(6 + s - largest), as E4M3
//   4 codes ──prmt, low three bits──► magnitudes ┐
//           ──prmt, sign bit─────────► signs ────┴─► -value x 2^(6 + s - largest)
//
// The row's sums are then multiplied by -2^(largest - 127 - 6) (mxfp4_row_scale). Exact where a scale is at least 2^-14
// of the row's largest: 6 x 2^6 is below E4M3's 448, and 0.5 x 2^-8 is its smallest number. Smaller ones are rounded to
// multiples of 2^-15 of the row's largest scale. A sign that is negated costs one instruction less.
//
// Codes 0 to 3 of 8 become one register, 4 to 7 the other: two runs of 4 along K, as the operand of wgmma has them.
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

// Eight E4M3 magnitudes of a group, by the low three bits of a code.
struct E4m3Magnitudes {
  uint32_t low, high;
};
constexpr uint32_t kMostPlainBinades = 11;  // that a group may lie below the row's largest with no subnormal magnitude

// `below`: binades from the row's largest scale down to the group's.
MOEOPT_DEVICE E4m3Magnitudes e4m3_magnitudes(uint32_t below) {
  return {0x6c686000u - below * 0x08080800u, 0x7c787470u - below * 0x08080808u};
}
// The same for any group.
MOEOPT_DEVICE E4m3Magnitudes e4m3_magnitudes_below(uint32_t below) {
  const float scale = float_from_bits((127u + 6u - (below < 31u ? below : 31u)) << 23);
  return {cvt_e4m3x2_f32(0.0f, 0.5f * scale) | cvt_e4m3x2_f32(scale, 1.5f * scale) << 16,
          cvt_e4m3x2_f32(2.0f * scale, 3.0f * scale) | cvt_e4m3x2_f32(4.0f * scale, 6.0f * scale) << 16};
}

// values[0] = codes 0 to 3, values[1] = codes 4 to 7, negated.
MOEOPT_DEVICE void e4m3_of_e2m1(uint32_t codes, const E4m3Magnitudes& of, uint32_t (&values)[2]) {
  constexpr uint32_t kHalfSign = 0x40404040u;  // doubled where a code has no sign
  const uint32_t magnitudes = codes & 0x77777777u;
  MOEOPT_UNROLL
  for (int i = 0; i < 2; ++i) {
    values[i] =
        prmt_or_sign(of.low, of.high, magnitudes >> 16 * i) + 2 * prmt_or_sign(kHalfSign, kHalfSign, codes >> 16 * i);
  }
}

// What the sums of a row are multiplied by; infinite where its largest exponent is the format's "not a number".
MOEOPT_DEVICE float mxfp4_row_scale(uint32_t largest) {
  const uint32_t bits = largest == 255 ? 0x7f800000u : largest > 6 ? (largest - 6) << 23 : 1u << (16 + largest);
  return float_from_bits(bits | 0x80000000u);
}

// The order of bf16_of_e2m1 for 8 tokens, of two BF16 in a word: values[i] = token i, token i + 4.
MOEOPT_DEVICE void order_as_e2m1(const Vec4& tokens, uint32_t (&values)[4]) {
  constexpr uint32_t kLows = 0x5410, kHighs = 0x7632;
  values[0] = prmt(tokens.x, tokens.z, kLows);
  values[1] = prmt(tokens.x, tokens.z, kHighs);
  values[2] = prmt(tokens.y, tokens.w, kLows);
  values[3] = prmt(tokens.y, tokens.w, kHighs);
}

}  // namespace moeopt
