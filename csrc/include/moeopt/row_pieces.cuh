// Pieces of 16 weight rows times 8 tokens, BF16 or E4M3: a piece is 64 bytes of a row, 16 of each lane of a quad.
//
// A lane reads bytes 16 t of every 64, which permutes K; tokens are read the same way, so both have the same order.
#pragma once

#include "moeopt/device.cuh"

namespace moeopt {

constexpr int kPieceBytes = 64;

// The tokens of a piece: a lane's 8 BF16 weights need 1 vector of 8 BF16, 16 E4M3 need 2, 32 of four bits need 4.
template <int kWeightBits>
struct PieceTokens {
  Vec4 part[16 / kWeightBits];
};

// sums += 16 rows x one piece of weights, not scaled yet, times 8 columns. E4M3 becomes BF16 exactly.
template <int kWeightBits>
MOEOPT_DEVICE void multiply_piece(const Vec4& low, const Vec4& high, const PieceTokens<kWeightBits>& tokens,
                                  float (&sums)[4]) {
  if constexpr (kWeightBits == 16) {
    const Vec4& x = tokens.part[0];
    mma_m16n8k16(sums, low.x, high.x, low.y, high.y, x.x, x.y);
    mma_m16n8k16(sums, low.z, high.z, low.w, high.w, x.z, x.w);
  } else {
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
    MOEOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Vec4& x = tokens.part[i / 2];
      mma_m16n8k16(sums, cvt_bf16x2_e4m3x2(lows[i]), cvt_bf16x2_e4m3x2(highs[i]), cvt_bf16x2_e4m3x2(lows[i] >> 16),
                   cvt_bf16x2_e4m3x2(highs[i] >> 16), i % 2 ? x.z : x.x, i % 2 ? x.w : x.y);
    }
  }
}

}  // namespace moeopt
