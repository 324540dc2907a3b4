// What one CUDA call takes: tensors, workspace and launch geometry. Python fills every struct by field names
// (moe_optimizer/ops/cuda_dispatch_calls.py); nothing of CUDA is in here.
#pragma once

#include <cstdint>

#include "moeopt/fields.h"
#include "moeopt/fused_experts.h"
#include "moeopt/router.h"

namespace moeopt {

struct TokenTile;

struct Problem {
  FusedExpertsArgs moe;
  RouterArgs router;
};

// --- direct: small batches -----------------------------------------------------------------------------------

struct DirectLaunch {
  int32_t up_grid, up_shared_bytes, down_grid, down_shared_bytes;
  bool up_wide;  // the first launch in steps of 256 bytes; BF16 only

  MOEOPT_FIELDS(up_grid, up_shared_bytes, down_grid, down_shared_bytes, up_wide)
};

struct DirectWorkspace {
  uint16_t* h;
  int* topk_ids;  // what the router chose; null without one
  float* topk_weights;

  MOEOPT_FIELDS(h, topk_ids, topk_weights)
};

// --- grouped: middle and large batches -----------------------------------------------------------------------

struct GroupedLaunch {
  GemmMode mode;
  int32_t tile_tokens, num_stages, shared_bytes, grid, route_blocks, route_shared_bytes, prepare_blocks;
  int32_t cluster_blocks;  // 1, or 2: pairs of token tiles share the weights

  MOEOPT_FIELDS(mode, tile_tokens, num_stages, shared_bytes, grid, route_blocks, route_shared_bytes, prepare_blocks,
                cluster_blocks)
};

// Null where a mode does not use it.
struct GroupedWorkspace {
  int *block_counts, *pair_rank, *expert_offsets, *sorted_token, *pair_position;
  TokenTile* tiles;
  int *num_tiles, *tile_counters, *block_arrivals;
  uint16_t *h, *y;
  void* tokens;  // permuted BF16, or E4M3
  float* token_scale;
  uint8_t* h_quantized;
  float* h_scale;
  int* topk_ids;  // what the router chose
  float* topk_weights;

  MOEOPT_FIELDS(block_counts, pair_rank, expert_offsets, sorted_token, pair_position, tiles, num_tiles, tile_counters,
                block_arrivals, h, y, tokens, token_scale, h_quantized, h_scale, topk_ids, topk_weights)
};

}  // namespace moeopt
