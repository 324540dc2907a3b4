// One call of the product of few tokens with a weight matrix (skinny_gemm.cuh), which Python fills by field names.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"

namespace moeopt {

struct SkinnyGemmArgs {
  const uint16_t* x;     // BF16 [T, K]
  int64_t x_stride;      // elements between tokens
  const uint16_t* w;     // BF16, contiguous [N, K]
  const uint16_t* bias;  // BF16 [N], or null
  uint16_t* out;         // BF16 [T, N]
  int64_t out_stride;    // elements between tokens
  const void* prefetch;  // what a later launch reads: brought into L2 behind the weights; or null
  int64_t prefetch_bytes;
  int64_t prefetch_apart;               // bytes between what is asked for
  bool prefetch_stays;                  // in L2 whatever is read until then
  int64_t num_tokens, depth, num_rows;  // T, K, N

  MOEOPT_FIELDS(x, x_stride, w, bias, out, out_stride, prefetch, prefetch_bytes, prefetch_apart, prefetch_stays,
                num_tokens, depth, num_rows)
};

struct SkinnyVariant {
  int32_t warps, stages;  // per block, per warp

  MOEOPT_FIELDS(warps, stages)
};

struct SkinnyGemmLaunch {
  int32_t blocks, threads, shared_bytes, token_tiles;

  MOEOPT_FIELDS(blocks, threads, shared_bytes, token_tiles)
};

}  // namespace moeopt
