// Activations as a grouped GEMM over FP8 weights wants them.
//
// permute:  BF16 in, BF16 out, each 16 along K reordered. A lane that reads 4 neighbouring FP8 weights holds
//           K = 4t .. 4t+3 of the 16, where the instruction's operand wants 2t, 2t+1, 2t+8, 2t+9. Moving the tokens
//           instead is cheaper: position q of the output holds K = kPermutation[q].
// quantize: BF16 in, E4M3 and one FP32 scale per 128 along K out: scale = max |x| / 448.
//
// One warp per 128 elements of a row: a lane has 4.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kPrepareThreads = 256;
constexpr float kLargestE4M3 = 448.0f;

// Where the element at K = k % 16 goes: pairs (4t, 4t+1) to 2t, pairs (4t+2, 4t+3) to 2t + 8.
MOEOPT_DEVICE int permuted_position(int k) { return (k & ~15) | ((k & 12) >> 1) | ((k & 2) << 2) | (k & 1); }

// The scale of values of which the largest magnitude is `top`. Zeros, and what is so small that 1 / scale would be
// infinite, get 1 and become zeros. NaN and infinity stay visible through the scale.
MOEOPT_DEVICE float quantization_scale(float top) { return top < 1e-30f ? 1.0f : top / kLargestE4M3; }

MOEOPT_DEVICE float float_of_bf16(uint32_t pair, int index) {
  return float_from_bits(index ? pair & 0xffff0000u : pair << 16);
}

// Of 8 BF16 values. The order of the bits is the order of the magnitudes, NaN above all.
MOEOPT_DEVICE float largest_magnitude(const Vec4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  uint32_t top = 0;
  MOEOPT_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = bits_from_float(float_of_bf16(words[i / 2], i % 2)) & 0x7fffffffu;
    top = bits > top ? bits : top;
  }
  return float_from_bits(top);
}

// The largest of 8 neighbouring lanes, for values that are not negative.
MOEOPT_DEVICE float warp_eighth_max(float value) {
  MOEOPT_UNROLL
  for (int mask = 4; mask > 0; mask >>= 1) {
    const float other = shuffle_xor(value, mask);
    value = bits_from_float(other) > bits_from_float(value) ? other : value;
  }
  return value;
}

struct Quantized8 {
  uint32_t low, high;  // E4M3
};
MOEOPT_DEVICE Quantized8 quantize8(const Vec4& v, float scale) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  const float inverse = 1.0f / scale;
  uint32_t pairs[4];
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    pairs[i] = pack_e4m3x2(float_of_bf16(words[i], 0) * inverse, float_of_bf16(words[i], 1) * inverse);
  }
  return {pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)};
}

struct PrepareArgs {
  const uint16_t* in;  // [rows][row_stride] BF16
  int64_t in_stride;
  uint16_t* permuted;   // [rows][depth], or null
  uint8_t* quantized;   // [rows][depth], or null
  float* scale;         // [rows][ceil(depth / 128)]
  int64_t rows;
  int32_t depth;  // multiple of 16
};

// By `num_blocks` blocks of kPrepareThreads, of which this is number `block`.
MOEOPT_DEVICE void prepare_tokens(const PrepareArgs& args, int block, int num_blocks) {
  const int groups = ceil_div(args.depth, 128), lane = thread_index() % 32;
  const int64_t total = args.rows * groups, warps = static_cast<int64_t>(num_blocks) * (kPrepareThreads / 32);
  for (int64_t task = static_cast<int64_t>(block) * (kPrepareThreads / 32) + thread_index() / 32; task < total;
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
    uint32_t largest = 0;
    MOEOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t magnitude = bits_from_float(float_of_bf16(pairs[i / 2], i % 2)) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    const float scale = quantization_scale(float_from_bits(warp_max(largest)));
    if (lane == 0) args.scale[task] = scale;
    if (!inside) continue;
    const Quantized8 q = quantize8({pairs[0], pairs[1], 0, 0}, scale);
    *reinterpret_cast<uint32_t*>(args.quantized + row * args.depth + k) = q.low;
  }
}

}  // namespace moeopt
