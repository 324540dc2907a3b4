// What one CUDA call takes: tensors and a variant, which Python fills by field names
// (moe_optimizer/ops/kernel_arguments.py), and what geometry.h makes of them: launches and workspace. Nothing of CUDA
// is in here.
#pragma once

#include <cstdint>
#include <variant>

#include "moeopt/fields.h"
#include "moeopt/fused_experts.h"
#include "moeopt/router.h"

namespace moeopt {

struct TokenTile;

// INT4 weights: what FusedExpertsArgs has no place for. It says kFloat4E2M1, whose codes are stored likewise, and kNone
// as kind of scale.
struct Int4Args {
  const uint16_t* w13_scale;  // as Int4Factors (int4.cuh); null: the weights are not INT4
  const uint16_t* w2_scale;
  const uint8_t* w13_zero;
  const uint8_t* w2_zero;
  int64_t w13_group, w2_group;

  MOEOPT_FIELDS(w13_scale, w2_scale, w13_zero, w2_zero, w13_group, w2_group)
};

struct Problem {
  FusedExpertsArgs moe;
  RouterArgs router;
  Int4Args int4;
};

// The kernels that run a call; moe_optimizer/ops/cuda_variants.py names and picks them.
struct Variant {
  bool direct;  // else grouped, of which the rest tells
  GemmMode mode;
  int32_t tile_tokens;
  int32_t num_stages;  // 0: as many as fit
  bool paired;         // clusters of two blocks: pairs of token tiles share the weights

  MOEOPT_FIELDS(direct, mode, tile_tokens, num_stages, paired)
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
  int32_t tile_tokens, num_stages, shared_bytes, grid;
  int32_t route_blocks;  // 1: a single block counts and places in one launch. More: a second launch places
  int32_t route_shared_bytes;
  int32_t prepare_blocks;  // that prepare the tokens, beside those that count pairs
  int32_t cluster_blocks;  // 1, or 2 in pairs
  int32_t scale_bytes;     // of the buffers beside the ring with the scales of tiles (TileScales); 0: in the stages

  MOEOPT_FIELDS(mode, tile_tokens, num_stages, shared_bytes, grid, route_blocks, route_shared_bytes, prepare_blocks,
                cluster_blocks, scale_bytes)
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

// --- either --------------------------------------------------------------------------------------------------

// What a call launches, and its workspace of so many bytes.
template <typename Launch, typename Workspace>
struct Layout {
  Launch launch;
  Workspace workspace;
  int64_t bytes;
};
using CallLayout = std::variant<Layout<DirectLaunch, DirectWorkspace>, Layout<GroupedLaunch, GroupedWorkspace>>;

}  // namespace moeopt
