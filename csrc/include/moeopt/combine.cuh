// out[t] = sum over j ascending of topk_weights[t, j] * y[position of (t, j)], FP32, rounded once.
//
//   y BF16 [pairs sorted by expert][H] ──16 bytes per thread──► FP32 sums of 8 columns ──► out BF16
//
// One block per token and 2048 columns. Fixed order: the same bits on every run. State: compiled and run in
// emulation; not yet run on a GPU.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"

namespace moeopt {

constexpr int kCombineThreads = 256;

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
  float sum[8] = {};
  for (int j = 0; j < args.top_k; ++j) {
    const int position = args.pair_position[token * args.top_k + j];
    if (position < 0) continue;
    const float weight = args.topk_weights[token * args.top_k + j];
    const Vec4 v = load_constant16(args.y + static_cast<int64_t>(position) * args.hidden_size + column);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    MOEOPT_UNROLL
    for (int i = 0; i < 8; ++i) {
      sum[i] += weight * float_from_bits(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    }
  }
  uint32_t packed[4];
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) packed[i] = pack_bf16x2(sum[2 * i], sum[2 * i + 1]);
  *reinterpret_cast<Vec4*>(args.out + token * args.out_stride + column) = {packed[0], packed[1], packed[2], packed[3]};
}

}  // namespace moeopt
