// Activations as a grouped GEMM over FP8 weights wants them.
//
// permute:  BF16 in, BF16 out, each 16 along K reordered. A lane that reads 4 neighbouring FP8 weights holds
//           K = 4t .. 4t+3 of the 16, where the instruction's operand wants 2t, 2t+1, 2t+8, 2t+9. Moving the tokens
//           instead is cheaper: position q of the output holds K = kPermutation[q].
// quantize: BF16 in, E4M3 and one FP32 scale per 128 along K out: scale = max |x| / 448.
//
// One warp per 128 elements of a row: a lane has 4. State: compiled and run in emulation; not yet run on a GPU.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kPrepareThreads = 256;
constexpr float kLargestE4M3 = 448.0f;

// Where the element at K = k % 16 goes: pairs (4t, 4t+1) to 2t, pairs (4t+2, 4t+3) to 2t + 8.
MOEOPT_DEVICE int permuted_position(int k) { return (k & ~15) | ((k & 12) >> 1) | ((k & 2) << 2) | (k & 1); }

struct PrepareArgs {
  const uint16_t* in;  // [rows][row_stride] BF16
  int64_t in_stride;
  uint16_t* permuted;   // [rows][depth], or null
  uint8_t* quantized;   // [rows][depth], or null
  float* scale;         // [rows][ceil(depth / 128)]
  int64_t rows;
  int32_t depth;  // multiple of 16
};

MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kPrepareThreads, 1) prepare_tokens_kernel(const MOEOPT_GRID_CONSTANT PrepareArgs args) {
  const int groups = ceil_div(args.depth, 128), lane = thread_index() % 32;
  const int64_t total = args.rows * groups, warps = static_cast<int64_t>(grid_blocks()) * (kPrepareThreads / 32);
  for (int64_t task = static_cast<int64_t>(block_index()) * (kPrepareThreads / 32) + thread_index() / 32; task < total;
       task += warps) {
    const int64_t row = task / groups;
    const int group = static_cast<int>(task % groups), k = group * 128 + lane * 4;
    const bool inside = k < args.depth;
    uint32_t pairs[2] = {0, 0};
    if (inside) {
      const auto* source = reinterpret_cast<const uint32_t*>(args.in + row * args.in_stride + k);
      pairs[0] = source[0];
      pairs[1] = source[1];
    }
    if (args.permuted != nullptr) {
      if (!inside) continue;
      auto* row_out = reinterpret_cast<uint32_t*>(args.permuted + row * args.depth);
      row_out[permuted_position(k) / 2] = pairs[0];
      row_out[permuted_position(k + 2) / 2] = pairs[1];
      continue;
    }
    float value[4];
    uint32_t largest = 0;
    for (int i = 0; i < 4; ++i) {
      value[i] = float_from_bits(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
      const uint32_t magnitude = bits_from_float(value[i]) & 0x7fffffffu;  // order of bits is order of magnitudes
      largest = magnitude > largest ? magnitude : largest;
    }
    const float top = float_from_bits(warp_max(largest));
    // A group of zeros gets scale 1: 0 / 0 would be NaN. NaN and infinity stay visible through the scale.
    const float scale = top == 0.0f ? 1.0f : top / kLargestE4M3;
    if (lane == 0) args.scale[task] = scale;
    if (!inside) continue;
    const uint32_t low = pack_e4m3x2(value[0] / scale, value[1] / scale);
    const uint32_t high = pack_e4m3x2(value[2] / scale, value[3] / scale);
    *reinterpret_cast<uint32_t*>(args.quantized + row * args.depth + k) = low | (high << 16);
  }
}

}  // namespace moeopt
