// One call of the product of few tokens with a weight matrix (skinny_gemm.cuh), which Python fills by field names.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"

namespace moeopt {

// What a weight is, and what its FP32 scales are of.
enum class SkinnyWeights : int32_t {
  kBf16 = 0,        // no scales
  kE4M3Rows = 1,    // a row, or all rows
  kE4M3Blocks = 2,  // a block of 128 rows x 128 of K
};

struct SkinnyGemmArgs {
  const uint16_t* x;                    // BF16 [T, K]
  int64_t x_stride;                     // elements between tokens
  const void* w;                        // contiguous [N, K]
  const uint16_t* bias;                 // BF16 [N], or null
  uint16_t* out;                        // BF16 [T, N]
  int64_t out_stride;                   // elements between tokens
  int64_t num_tokens, depth, num_rows;  // T, K, N
  // E4M3; like w written by nothing while the kernel may run.
  const float* scale;
  int64_t scale_row_stride;    // elements between the scales of neighbouring rows (0: all have one) or row blocks
  int64_t scale_depth_stride;  // kE4M3Blocks: elements between neighbouring blocks along K
  SkinnyWeights weights;

  MOEOPT_FIELDS(x, x_stride, w, bias, out, out_stride, num_tokens, depth, num_rows, scale, scale_row_stride,
                scale_depth_stride, weights)
};

struct SkinnyGemmLaunch {
  int32_t blocks, threads, shared_bytes;

  MOEOPT_FIELDS(blocks, threads, shared_bytes)
};

}  // namespace moeopt
