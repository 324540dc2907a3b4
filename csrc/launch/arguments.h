// Kernel arguments from a problem, its workspace and its geometry: plain arithmetic, shared by the launchers and the
// tests' emulation, so that both start the kernels with the same numbers.
//
// Workspaces arrive as address lists and geometries as integer lists, in the order of the structs below; they are made
// by moe_optimizer/ops/cuda_dispatch.py from moe_optimizer/ops/launch_geometry.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "launch/problem.h"
#include "moeopt/combine.cuh"
#include "moeopt/direct_experts.cuh"
#include "moeopt/grouped_gemm.cuh"
#include "moeopt/prepare_tokens.cuh"
#include "moeopt/route_pairs.cuh"
#include "moeopt/router.cuh"

namespace moeopt {

inline void expect_count(const char* what, int64_t got, int64_t expected) {
  if (got != expected) {
    throw std::invalid_argument(std::string(what) + ": got " + std::to_string(got) + " values, expected " +
                                std::to_string(expected));
  }
}

// --- from logits ---------------------------------------------------------------------------------------------

constexpr int kRouterWarps = 4;  // a token each

inline int64_t router_columns(const FusedExpertsArgs& moe) {
  return moe.expert_map != nullptr ? moe.num_global_experts : moe.num_local_experts;
}
// 8 bytes per warp and column, and the alignment.
inline int router_shared_bytes(const FusedExpertsArgs& moe) {
  return static_cast<int>(kRouterWarps * 8 * router_columns(moe) + 1024);
}

// The chosen ids and weights take the place of given ones.
inline Problem with_routed_ids(Problem problem, const int* topk_ids, const float* topk_weights) {
  problem.moe.topk_ids = topk_ids;
  problem.moe.topk_weights = topk_weights;
  problem.moe.ids_are_int64 = false;
  return problem;
}

// --- small batches -------------------------------------------------------------------------------------------

struct DirectLaunch {
  int32_t up_grid, up_shared_bytes, down_grid, down_shared_bytes;
  bool up_wide;  // the first launch in steps of 256 bytes; BF16 only
};
constexpr int kDirectLaunchValues = 5;

struct DirectWorkspace {
  uint16_t* h;
  int* topk_ids;  // what the router chose; null without one
  float* topk_weights;
};
constexpr int kDirectWorkspace = 3;

inline DirectLaunch direct_launch(const int64_t* values, int64_t count) {
  expect_count("direct geometry", count, kDirectLaunchValues);
  const auto at = [&](int i) { return static_cast<int32_t>(values[i]); };
  return {at(0), at(1), at(2), at(3), at(4) != 0};
}

inline DirectWorkspace direct_workspace(const int64_t* v, int64_t count) {
  expect_count("direct workspace", count, kDirectWorkspace);
  return {reinterpret_cast<uint16_t*>(v[0]), reinterpret_cast<int*>(v[1]), reinterpret_cast<float*>(v[2])};
}

// --- middle and large batches --------------------------------------------------------------------------------

struct GroupedLaunch {
  GemmMode mode;
  int32_t tile_tokens, num_stages, shared_bytes, grid, route_blocks, route_shared_bytes, prepare_blocks;
  int32_t cluster_blocks;  // 1, or 2: pairs of token tiles share the weights
};
constexpr int kGroupedLaunchValues = 9;

// In the order of the list. Null where a mode does not use it.
struct GroupedWorkspace {
  int *block_counts, *pair_rank, *expert_offsets, *sorted_token, *pair_position;
  TokenTile* tiles;
  int *num_tiles, *tasks_taken, *block_arrivals;
  uint16_t *h, *y;
  void* tokens;  // permuted BF16, or E4M3
  float* token_scale;
  uint8_t* h_quantized;
  float* h_scale;
  int* topk_ids;  // what the router chose
  float* topk_weights;
};
constexpr int kGroupedWorkspace = 17;

inline GroupedLaunch grouped_launch(const int64_t* values, int64_t count) {
  expect_count("grouped geometry", count, kGroupedLaunchValues);
  const auto at = [&](int i) { return static_cast<int32_t>(values[i]); };
  return {static_cast<GemmMode>(values[0]), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8)};
}

inline GroupedWorkspace grouped_workspace(const int64_t* v, int64_t count) {
  expect_count("grouped workspace", count, kGroupedWorkspace);
  const auto ints = [&](int i) { return reinterpret_cast<int*>(v[i]); };
  const auto any = [&](int i) { return reinterpret_cast<void*>(v[i]); };
  GroupedWorkspace w{};
  w.block_counts = ints(0);
  w.pair_rank = ints(1);
  w.expert_offsets = ints(2);
  w.sorted_token = ints(3);
  w.pair_position = ints(4);
  w.tiles = static_cast<TokenTile*>(any(5));
  w.num_tiles = ints(6);
  w.tasks_taken = ints(7);
  w.block_arrivals = ints(8);
  w.h = static_cast<uint16_t*>(any(9));
  w.y = static_cast<uint16_t*>(any(10));
  w.tokens = any(11);
  w.token_scale = static_cast<float*>(any(12));
  w.h_quantized = static_cast<uint8_t*>(any(13));
  w.h_scale = static_cast<float*>(any(14));
  w.topk_ids = ints(15);
  w.topk_weights = static_cast<float*>(any(16));
  return w;
}

inline RouteArgs route_arguments(const Problem& problem, const GroupedWorkspace& w, const GroupedLaunch& launch) {
  return {problem.moe,  w.block_counts, w.pair_rank,      w.expert_offsets,  w.sorted_token, w.pair_position, w.tiles,
          w.num_tiles, w.tasks_taken, w.block_arrivals, launch.tile_tokens, launch.route_blocks, launch.cluster_blocks};
}

inline PrepareArgs prepare_arguments(const Problem& problem, const GroupedWorkspace& w, GemmMode mode) {
  const FusedExpertsArgs& moe = problem.moe;
  PrepareArgs args{};
  args.in = static_cast<const uint16_t*>(moe.x);
  args.in_stride = moe.x_stride;
  args.permuted = mode == GemmMode::kFp8Weights ? static_cast<uint16_t*>(w.tokens) : nullptr;
  args.quantized = mode == GemmMode::kFp8 ? static_cast<uint8_t*>(w.tokens) : nullptr;
  args.scale = w.token_scale;
  args.rows = moe.num_tokens;
  args.depth = static_cast<int32_t>(moe.hidden_size);
  return args;
}

// Up to so many pairs per expert, weights leave L2 first, so that h and y stay: 1 to 2 % faster; with more they are
// read again soon enough to lose up to 7 %.
constexpr int64_t kPairsForWeightsOnce = 16;

inline GemmArgs up_arguments(const Problem& problem, const GroupedWorkspace& w, const GroupedLaunch& launch) {
  const FusedExpertsArgs& moe = problem.moe;
  const bool prepared = launch.mode != GemmMode::kBf16;
  GemmArgs args{};
  args.tokens = prepared ? w.tokens : moe.x;
  args.token_stride = prepared ? moe.hidden_size : moe.x_stride;
  args.token_scale = w.token_scale;
  args.sorted_token = w.sorted_token;
  args.tiles = w.tiles;
  args.num_tiles = w.num_tiles;
  args.tasks_taken = w.tasks_taken;
  args.out = w.h;
  args.out_stride = moe.intermediate_size;
  args.out_quantized = w.h_quantized;
  args.out_scale = w.h_scale;
  args.weight_scale = moe.w13_scale;
  args.bias = moe.w13_bias;
  args.depth = static_cast<int32_t>(moe.hidden_size);
  args.rows = static_cast<int32_t>(moe.intermediate_size);
  args.weight_rows = 2 * args.rows;
  args.scale_kind = moe.scale_kind;
  args.activation = moe.activation;
  args.weights_once = moe.num_tokens * moe.top_k <= kPairsForWeightsOnce * moe.num_local_experts;
  args.paired = launch.cluster_blocks == 2;
  args.num_stages = launch.num_stages;
  return args;
}

inline GemmArgs down_arguments(const Problem& problem, const GroupedWorkspace& w, const GroupedLaunch& launch) {
  const FusedExpertsArgs& moe = problem.moe;
  GemmArgs args = up_arguments(problem, w, launch);
  args.tokens = w.h;
  if (launch.mode == GemmMode::kFp8) args.tokens = w.h_quantized;
  args.token_stride = moe.intermediate_size;
  args.token_scale = w.h_scale;
  args.tasks_taken = w.tasks_taken + 1;
  args.sorted_token = nullptr;
  args.out = w.y;
  args.out_stride = moe.hidden_size;
  args.weight_scale = moe.w2_scale;
  args.bias = moe.w2_bias;
  args.depth = static_cast<int32_t>(moe.intermediate_size);
  args.rows = static_cast<int32_t>(moe.hidden_size);
  args.weight_rows = args.rows;
  return args;
}

inline CombineArgs combine_arguments(const Problem& problem, const GroupedWorkspace& w) {
  const FusedExpertsArgs& moe = problem.moe;
  return {w.y,
          w.pair_position,
          moe.topk_weights,
          static_cast<uint16_t*>(moe.out),
          moe.out_stride,
          static_cast<int32_t>(moe.hidden_size),
          static_cast<int32_t>(moe.top_k)};
}

// A view of weights that is copied in boxes of 128 rows x 128 bytes: what a tensor map is made from.
struct WeightView {
  const unsigned char* base;
  int32_t element_bytes;
  int64_t sizes[3];
  int64_t strides[3];  // bytes
  int32_t box[3];
};

// which: 0 gate, 1 up, 2 down. [expert][row][K].
inline WeightView weight_view(const FusedExpertsArgs& moe, int which) {
  const int32_t bytes = moe.weight_dtype == DType::kFloat8E4M3 ? 1 : 2;
  const bool down = which == 2, alternating = moe.activation == Activation::kSwigluOai;
  const int64_t row = (down ? moe.w2_row_stride : moe.w13_row_stride * (alternating ? 2 : 1)) * bytes;
  const int64_t expert = (down ? moe.w2_expert_stride : moe.w13_expert_stride) * bytes;
  const int64_t up_row = which == 1 ? (alternating ? 1 : moe.intermediate_size) : 0;
  const auto* base = static_cast<const unsigned char*>(down ? moe.w2 : moe.w13) + up_row * moe.w13_row_stride * bytes;
  return {base,
          bytes,
          {down ? moe.intermediate_size : moe.hidden_size, down ? moe.hidden_size : moe.intermediate_size,
           moe.num_local_experts},
          {bytes, row, expert},
          {128 / bytes, kBoxRows, 1}};
}

}  // namespace moeopt
