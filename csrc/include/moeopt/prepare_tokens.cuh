// Prepares the activations for the grouped GEMM over FP8 or MXFP4 weights.
//
// permute:  BF16 in, BF16 out, each 16 along K reordered. A lane reads 4 neighbouring FP8 weights, K = 4t .. 4t+3, but
//           the wgmma operand needs 2t, 2t+1, 2t+8, 2t+9. Permuting the tokens is cheaper than permuting the weights.
//           One warp per 128 elements of a row, 4 per lane.
//           MXFP4: each 128 along K reordered; rows are filled up with zeros to whole 128. A lane reads the 32 weights
//           of one group, K = 32t .. 32t+31, and gets codes i and i + 4 of 8 in one register (mxfp4.cuh).
// quantize: BF16 in, E4M3 and one FP32 scale per row out: scale = max |x| / 448. One scale per row is accurate enough:
//           E4M3 is a floating-point format, so values down to 2^-15 of the largest keep their 4 significant bits. It
//           saves the GEMM a factor per token and 128 of K. One warp per row.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kPrepareThreads = 256;
constexpr float kLargestE4M3 = 448.0f;

// New position of element k among its 16: pairs (4t, 4t+1) go to 2t, pairs (4t+2, 4t+3) to 2t + 8.
MOEOPT_DEVICE int permuted_position(int k) { return (k & ~15) | ((k & 12) >> 1) | ((k & 2) << 2) | (k & 1); }

// The same for MXFP4, among 128: 8 w + i + 4 p of the 32 of lane t goes to place 2 t + p of the 8 at 8 (4 w + i).
MOEOPT_DEVICE int mxfp4_position(int k) {
  return (k & ~127) | ((k & 24) << 2) | ((k & 3) << 3) | ((k & 96) >> 4) | ((k & 4) >> 2);
}

// The same for kMxfp4 in E4M3: 8 w + 4 p + i of lane t goes to byte i of the word t of the 16 at 32 w + 16 p.
MOEOPT_DEVICE int e4m3_position(int k) {
  return (k & ~127) | ((k & 24) << 2) | ((k & 4) << 2) | ((k & 96) >> 3) | (k & 3);
}

// Scale for values up to `top` in magnitude. Values so small that the ratio of two scales could be infinite get scale 1
// and become zeros. NaN and infinity stay visible through the scale.
MOEOPT_DEVICE float quantization_scale(float top) { return top < 0x1p-60f ? 1.0f : top * (1.0f / kLargestE4M3); }

MOEOPT_DEVICE float float_of_bf16(uint32_t pair, int index) {
  return float_from_bits(index ? pair & 0xffff0000u : pair << 16);
}

// Larger magnitudes of BF16 pairs, as bits: bits order like the numbers, NaN above all.
MOEOPT_DEVICE uint32_t larger_magnitudes(uint32_t pairs, uint32_t magnitudes) {
  return max_u16x2(pairs & 0x7fff7fffu, magnitudes);
}
MOEOPT_DEVICE uint32_t larger_magnitudes(const Vec4& v, uint32_t magnitudes) {
  return larger_magnitudes(v.x, larger_magnitudes(v.y, larger_magnitudes(v.z, larger_magnitudes(v.w, magnitudes))));
}
// The larger of a pair of magnitudes, as the bits of a float.
MOEOPT_DEVICE uint32_t larger_of_pair(uint32_t magnitudes) {
  const uint32_t low = magnitudes << 16, high = magnitudes & 0xffff0000u;
  return low > high ? low : high;
}

struct Quantized8 {
  uint32_t low, high;  // E4M3
};
MOEOPT_DEVICE Quantized8 quantize8(const Vec4& v, float scale) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  const float inverse = rcp_approx(scale);
  uint32_t pairs[4];
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    pairs[i] = cvt_e4m3x2_f32(float_of_bf16(words[i], 0) * inverse, float_of_bf16(words[i], 1) * inverse);
  }
  return {pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)};
}

struct PrepareArgs {
  const uint16_t* in;  // [rows][row_stride] BF16
  int64_t in_stride;
  uint16_t* permuted;  // [rows][depth], or null; for MXFP4 rows have whole 128
  uint8_t* quantized;  // [rows][depth], or null
  float* scale;        // [rows]
  int64_t rows;
  int32_t depth;  // multiple of 16
};

MOEOPT_DEVICE void permute_rows(const PrepareArgs& args, int block, int num_blocks) {
  const int groups = ceil_div(args.depth, 128), lane = thread_index() % 32;
  const int64_t total = args.rows * groups, warps = static_cast<int64_t>(num_blocks) * (kPrepareThreads / 32);
  for (int64_t task = static_cast<int64_t>(block) * (kPrepareThreads / 32) + thread_index() / 32; task < total;
       task += warps) {
    const int64_t row = task / groups;
    const int k = static_cast<int>(task % groups) * 128 + lane * 4;
    if (k >= args.depth) continue;
    const auto* source = reinterpret_cast<const uint32_t*>(args.in + row * args.in_stride + k);
    auto* row_out = reinterpret_cast<uint32_t*>(args.permuted + row * args.depth);
    row_out[permuted_position(k) / 2] = source[0];
    row_out[permuted_position(k + 2) / 2] = source[1];
  }
}

// A lane makes 4 words of 2 elements, which are next to each other in the result.
MOEOPT_DEVICE void permute_rows_for_mxfp4(const PrepareArgs& args, int block, int num_blocks) {
  const int lane = thread_index() % 32, length = ceil_div(args.depth, 128) * 128;
  const int64_t total = args.rows * (length / 128), warps = static_cast<int64_t>(num_blocks) * (kPrepareThreads / 32);
  for (int64_t task = static_cast<int64_t>(block) * (kPrepareThreads / 32) + thread_index() / 32; task < total;
       task += warps) {
    const int64_t row = task / (length / 128);
    const int first = static_cast<int>(task % (length / 128)) * 128;
    if (lane >= 16) continue;
    const uint16_t* source = args.in + row * args.in_stride;
    uint32_t words[4];
    MOEOPT_UNROLL
    for (int t = 0; t < 4; ++t) {
      const int k = first + 32 * t + lane / 4 * 8 + lane % 4;
      words[t] = k < args.depth ? source[k] | static_cast<uint32_t>(source[k + 4]) << 16 : 0;
    }
    *reinterpret_cast<Vec4*>(args.permuted + row * length + first + lane * 8) = {words[0], words[1], words[2],
                                                                                 words[3]};
  }
}

// Keeps 2048 elements of a row in registers; a longer row is read a second time for the rounding. kMxfp4: in the order
// of e4m3_position; rows are filled up with zeros to whole 128.
template <bool kMxfp4>
MOEOPT_DEVICE void quantize_rows(const PrepareArgs& args, int block, int num_blocks) {
  constexpr int kVectors = 8, kSpan = kVectors * 32 * 8;
  const int lane = thread_index() % 32;
  const int64_t warps = static_cast<int64_t>(num_blocks) * (kPrepareThreads / 32);
  for (int64_t row = static_cast<int64_t>(block) * (kPrepareThreads / 32) + thread_index() / 32; row < args.rows;
       row += warps) {
    Vec4 values[kVectors];
    const auto element = [&](int span, int i) { return span + (i * 32 + lane) * 8; };
    const auto read = [&](int span) {
      MOEOPT_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const int k = element(span, i);
        values[i] = {0, 0, 0, 0};
        if (k < args.depth) values[i] = *reinterpret_cast<const Vec4*>(args.in + row * args.in_stride + k);
      }
    };
    uint32_t magnitudes = 0;
    for (int span = 0; span < args.depth; span += kSpan) {
      read(span);
      MOEOPT_UNROLL
      for (int i = 0; i < kVectors; ++i) magnitudes = larger_magnitudes(values[i], magnitudes);
    }
    const float scale = quantization_scale(float_from_bits(redux_max(larger_of_pair(magnitudes))));
    if (lane == 0) args.scale[row] = scale;
    for (int span = 0; span < args.depth; span += kSpan) {
      if (args.depth > kSpan) read(span);
      MOEOPT_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const int k = element(span, i);
        if constexpr (kMxfp4) {
          const int length = ceil_div(args.depth, 128) * 128;
          if (k >= length) continue;
          const Quantized8 q = quantize8(values[i], scale);
          auto* to = reinterpret_cast<uint32_t*>(args.quantized + row * length + e4m3_position(k));
          to[0] = q.low;
          to[4] = q.high;
        } else {
          if (k >= args.depth) continue;
          const Quantized8 q = quantize8(values[i], scale);
          auto* to = reinterpret_cast<uint64_t*>(args.quantized + row * args.depth + k);
          *to = q.low | static_cast<uint64_t>(q.high) << 32;
        }
      }
    }
  }
}

// kMxfp4: in the order for MXFP4; kRounds: and in E4M3. By `num_blocks` blocks of kPrepareThreads threads; this is
// number `block`.
template <bool kMxfp4, bool kRounds>
MOEOPT_DEVICE void prepare_tokens(const PrepareArgs& args, int block, int num_blocks) {
  if constexpr (kMxfp4 && kRounds) {
    quantize_rows<true>(args, block, num_blocks);
  } else if constexpr (kMxfp4) {
    permute_rows_for_mxfp4(args, block, num_blocks);
  } else if (args.permuted != nullptr) {
    permute_rows(args, block, num_blocks);
  } else {
    quantize_rows<false>(args, block, num_blocks);
  }
}

}  // namespace moeopt
