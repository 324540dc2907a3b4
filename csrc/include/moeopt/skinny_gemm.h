// One call of the product of few tokens with a weight matrix (skinny_gemm.cuh), which Python fills by field names.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"

namespace moeopt {

struct SkinnyGemmArgs {
  const uint16_t* x;                    // BF16 [T, K]
  int64_t x_stride;                     // elements between tokens
  const uint16_t* w;                    // BF16, contiguous [N, K]
  const uint16_t* bias;                 // BF16 [N], or null
  uint16_t* out;                        // BF16 [T, N]
  int64_t out_stride;                   // elements between tokens
  int64_t num_tokens, depth, num_rows;  // T, K, N

  MOEOPT_FIELDS(x, x_stride, w, bias, out, out_stride, num_tokens, depth, num_rows)
};

struct SkinnyGemmLaunch {
  int32_t blocks, threads, shared_bytes;

  MOEOPT_FIELDS(blocks, threads, shared_bytes)
};

}  // namespace moeopt
