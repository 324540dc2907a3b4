// Gate and up to the input of the down projection, in FP32.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"

namespace moeopt {

MOEOPT_DEVICE float sigmoid(float x) { return reciprocal_fast(1.0f + exp_fast(-x)); }

MOEOPT_DEVICE float swiglu(Activation activation, float gate, float up) {
  if (activation == Activation::kSwigluOai) {
    // The comparisons are written so that NaN passes through.
    const float clamped_gate = gate > 7.0f ? 7.0f : gate;
    const float clamped_up = up > 7.0f ? 7.0f : (up < -7.0f ? -7.0f : up);
    return clamped_gate * sigmoid(1.702f * clamped_gate) * (clamped_up + 1.0f);
  }
  return gate * sigmoid(gate) * up;
}

MOEOPT_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Row of w13 that holds gate i (which = 0) or up i (which = 1).
MOEOPT_DEVICE int w13_row(Activation activation, int intermediate_size, int i, int which) {
  return activation == Activation::kSwigluOai ? 2 * i + which : which * intermediate_size + i;
}

// The factors of one weight row, one per 128 along K (kBlock128); below: of the whole row (kChannel).
MOEOPT_DEVICE const float* block_scales(const float* scale, int expert, int rows, int columns, int row) {
  const int64_t row_blocks = ceil_div(rows, 128), column_blocks = ceil_div(columns, 128);
  return scale + (expert * row_blocks + row / 128) * column_blocks;
}
MOEOPT_DEVICE float channel_scale(const float* scale, int expert, int rows, int row) {
  return load_constant(scale + static_cast<int64_t>(expert) * rows + row);
}

}  // namespace moeopt
