// One call of the product of few tokens with a weight matrix (skinny_gemm.cuh), which Python fills by field names.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"

namespace moeopt {

// Where weights wait until they are multiplied.
enum class SkinnyBuffer : int32_t {
  kRegisters = 0,  // loads of 16 bytes per lane
  kShared = 1,     // cp.async of 16 bytes per lane into shared memory of that lane
  kBulk = 2,       // a bulk copy per row of a stage
};

struct SkinnyGemmArgs {
  const uint16_t* x;     // BF16 [T, K]
  int64_t x_stride;      // elements between tokens
  const uint16_t* w;     // BF16, contiguous [N, K]
  const uint16_t* bias;  // BF16 [N], or null
  uint16_t* out;         // BF16 [T, N]
  int64_t out_stride;    // elements between tokens
  const void* prefetch;  // what a later launch reads: brought into L2 behind the weights; or null
  int64_t prefetch_bytes;
  int64_t num_tokens, depth, num_rows;  // T, K, N

  MOEOPT_FIELDS(x, x_stride, w, bias, out, out_stride, prefetch, prefetch_bytes, num_tokens, depth, num_rows)
};

struct SkinnyVariant {
  SkinnyBuffer buffer;
  int32_t warps;  // per block

  MOEOPT_FIELDS(buffer, warps)
};

struct SkinnyGemmLaunch {
  int32_t blocks, threads, shared_bytes, token_tiles;

  MOEOPT_FIELDS(blocks, threads, shared_bytes, token_tiles)
};

}  // namespace moeopt
