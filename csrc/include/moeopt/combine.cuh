// Combine: out[t] = sum over ascending j of topk_weights[t, j] * y[position of (t, j)], in FP32, rounded once.
//
//   y BF16 [pairs sorted by expert][H] ──16 bytes per thread──► FP32 sums of 8 columns ──► out BF16
//
// One block per token and 2048 columns. The order is fixed, so every run gives the same bits.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"

namespace moeopt {

constexpr int kCombineThreads = 256;
constexpr int kCombineBatch = 8;  // rows of y in flight, so that their L2 latencies overlap

struct CombineArgs {
  const uint16_t* y;
  const int* pair_position;
  const float* topk_weights;
  uint16_t* out;
  int64_t out_stride;
  int32_t hidden_size, top_k;
};

MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kCombineThreads, 1) combine_kernel(const MOEOPT_GRID_CONSTANT CombineArgs args) {
  const int64_t token = block_index();
  const int column = (block_index_y() * kCombineThreads + thread_index()) * 8;
  if (column >= args.hidden_size) return;
  griddepcontrol_wait();
  float sum[8] = {};
  for (int first = 0; first < args.top_k; first += kCombineBatch) {
    Vec4 row[kCombineBatch];
    float weight[kCombineBatch];
    MOEOPT_UNROLL
    for (int j = 0; j < kCombineBatch; ++j) {
      const int64_t pair = token * args.top_k + first + j;
      const int position = first + j < args.top_k ? args.pair_position[pair] : -1;
      weight[j] = position < 0 ? 0.0f : args.topk_weights[pair];
      row[j] = Vec4{0, 0, 0, 0};
      if (position >= 0) {
        row[j] = ld_global_cg_v4(args.y + static_cast<int64_t>(position) * args.hidden_size + column);
      }
    }
    MOEOPT_UNROLL
    for (int j = 0; j < kCombineBatch; ++j) {
      const uint32_t words[4] = {row[j].x, row[j].y, row[j].z, row[j].w};
      MOEOPT_UNROLL
      for (int i = 0; i < 8; ++i) {
        sum[i] += weight[j] * float_from_bits(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
      }
    }
  }
  uint32_t packed[4];
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) packed[i] = cvt_bf16x2_f32(sum[2 * i], sum[2 * i + 1]);
  *reinterpret_cast<Vec4*>(args.out + token * args.out_stride + column) = {packed[0], packed[1], packed[2], packed[3]};
}

}  // namespace moeopt
