// SwiGLU in FP32, and where gate and up rows and weight scales lie.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"

namespace moeopt {

MOEOPT_DEVICE float sigmoid(float x) { return rcp_approx(1.0f + exp_approx(-x)); }

MOEOPT_DEVICE float swiglu(Activation activation, float gate, float up) {
  if (activation == Activation::kSwigluOai) {
    // The comparisons are written so that NaN passes through.
    const float clamped_gate = gate > 7.0f ? 7.0f : gate;
    const float clamped_up = up > 7.0f ? 7.0f : (up < -7.0f ? -7.0f : up);
    return clamped_gate * sigmoid(1.702f * clamped_gate) * (clamped_up + 1.0f);
  }
  return gate * sigmoid(gate) * up;
}

// gate = swiglu(gate, up) for two values with one reciprocal, because a wide epilogue is bound by the special function
// unit. A sigmoid below 2^-60 becomes 2^-60, which keeps the product of both finite.
MOEOPT_DEVICE void swiglu2(Activation activation, float& gate0, float& gate1, float up0, float up1) {
  float scaled0 = gate0, scaled1 = gate1;
  if (activation == Activation::kSwigluOai) {  // as in swiglu
    gate0 = gate0 > 7.0f ? 7.0f : gate0;
    gate1 = gate1 > 7.0f ? 7.0f : gate1;
    up0 = (up0 > 7.0f ? 7.0f : (up0 < -7.0f ? -7.0f : up0)) + 1.0f;
    up1 = (up1 > 7.0f ? 7.0f : (up1 < -7.0f ? -7.0f : up1)) + 1.0f;
    scaled0 = 1.702f * gate0;
    scaled1 = 1.702f * gate1;
  }
  const float denominator0 = 1.0f + exp_approx(min_f32(-scaled0, 41.588831f));
  const float denominator1 = 1.0f + exp_approx(min_f32(-scaled1, 41.588831f));
  const float reciprocal = rcp_approx(denominator0 * denominator1);
  gate0 *= reciprocal * denominator1 * up0;
  gate1 *= reciprocal * denominator0 * up1;
}

// sum0 = swiglu(sum0, sum1). Two rows of one token share a reciprocal, so no result depends on another token.
template <int kSums>
MOEOPT_DEVICE void swiglu_sums(Activation activation, float (&sum0)[kSums], const float (&sum1)[kSums]) {
  MOEOPT_UNROLL
  for (int r = 0; r < kSums; ++r) {
    if (r % 4 < 2) swiglu2(activation, sum0[r], sum0[r + 2], sum1[r], sum1[r + 2]);
  }
}

MOEOPT_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Row of w13 that holds gate i (which = 0) or up i (which = 1).
MOEOPT_DEVICE int w13_row(Activation activation, int intermediate_size, int i, int which) {
  return activation == Activation::kSwigluOai ? 2 * i + which : which * intermediate_size + i;
}

// Scales of one weight row, one per 128 along K (kBlock128).
MOEOPT_DEVICE const float* block_scales(const float* scale, int expert, int rows, int columns, int row) {
  const int64_t row_blocks = ceil_div(rows, 128), column_blocks = ceil_div(columns, 128);
  return scale + (expert * row_blocks + row / 128) * column_blocks;
}
// Scale of one weight row (kChannel).
MOEOPT_DEVICE float channel_scale(const float* scale, int expert, int rows, int row) {
  return ld_global_nc(scale + static_cast<int64_t>(expert) * rows + row);
}

}  // namespace moeopt
