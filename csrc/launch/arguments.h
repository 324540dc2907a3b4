// Kernel arguments from a problem, its workspace and its geometry: plain arithmetic, shared by the launchers and the
// tests' emulation, so that both start the kernels with the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "launch/problem.h"
#include "moeopt/combine.cuh"
#include "moeopt/direct_experts.cuh"
#include "moeopt/grouped_gemm_sm90.cuh"
#include "moeopt/prepare_tokens.cuh"
#include "moeopt/route_pairs.cuh"
#include "moeopt/router.cuh"

namespace moeopt {

// Of one stored weight.
inline int weight_bits(const FusedExpertsArgs& moe) {
  return moe.weight_dtype == DType::kFloat4E2M1 ? 4 : moe.weight_dtype == DType::kFloat8E4M3 ? 8 : 16;
}

inline bool is_int4(const Problem& problem) { return problem.int4.w13_scale != nullptr; }

inline int32_t int4_shift(int64_t group) { return group == 128 ? 7 : group == 64 ? 6 : 5; }
inline Int4Factors w13_factors(const Int4Args& int4) {
  return {int4.w13_scale, int4.w13_zero, int4_shift(int4.w13_group)};
}
inline Int4Factors w2_factors(const Int4Args& int4) { return {int4.w2_scale, int4.w2_zero, int4_shift(int4.w2_group)}; }

inline bool has_four_bits(GemmMode mode) {
  return mode == GemmMode::kMxfp4Weights || mode == GemmMode::kInt4Weights || mode == GemmMode::kMxfp4;
}

// Elements of a row of tokens in the order that weights of four bits need (mxfp4_position): whole 128.
inline int64_t mxfp4_row(int64_t depth) { return (depth + 127) / 128 * 128; }

// --- from logits ---------------------------------------------------------------------------------------------

constexpr int kRouterWarps = 4;  // a token each

inline int64_t router_columns(const FusedExpertsArgs& moe) {
  return moe.expert_map != nullptr ? moe.num_global_experts : moe.num_local_experts;
}
// 8 bytes per warp and column, and the alignment.
inline int router_shared_bytes(const FusedExpertsArgs& moe) {
  return static_cast<int>(kRouterWarps * 8 * router_columns(moe) + 1024);
}

// Replaces given ids and weights by those that the router chose.
inline Problem with_routed_ids(Problem problem, const int* topk_ids, const float* topk_weights) {
  problem.moe.topk_ids = topk_ids;
  problem.moe.topk_weights = topk_weights;
  problem.moe.ids_are_int64 = false;
  return problem;
}

// --- grouped -------------------------------------------------------------------------------------------------

// Calls `use(std::integral_constant<int, kTokens>())` for the compiled tile that the launch asks for.
template <int... kTokens, typename Use>
void with_tile(std::integer_sequence<int, kTokens...>, const GroupedLaunch& launch, Use use) {
  const auto try_tile = [&](auto tile) {
    if (launch.tile_tokens != tile) return false;
    use(tile);
    return true;
  };
  if ((try_tile(std::integral_constant<int, kTokens>()) || ...)) return;
  throw std::invalid_argument("grouped_gemm: token tile: got " + std::to_string(launch.tile_tokens) +
                              ", expected one that is compiled for mode " +
                              std::to_string(static_cast<int>(launch.mode)));
}

inline RouteArgs route_arguments(const Problem& problem, const GroupedWorkspace& w, const GroupedLaunch& launch) {
  return {problem.moe,
          w.block_counts,
          w.pair_rank,
          w.expert_offsets,
          w.sorted_token,
          w.pair_position,
          w.tiles,
          w.num_tiles,
          w.tile_counters,
          w.block_arrivals,
          launch.tile_tokens,
          launch.route_blocks,
          launch.cluster_blocks};
}

inline PrepareArgs prepare_arguments(const Problem& problem, const GroupedWorkspace& w, GemmMode mode) {
  const FusedExpertsArgs& moe = problem.moe;
  PrepareArgs args{};
  args.in = static_cast<const uint16_t*>(moe.x);
  args.in_stride = moe.x_stride;
  const bool permutes = mode == GemmMode::kFp8Weights || (has_four_bits(mode) && !rounds_tokens(mode));
  args.permuted = permutes ? static_cast<uint16_t*>(w.tokens) : nullptr;
  args.quantized = rounds_tokens(mode) ? static_cast<uint8_t*>(w.tokens) : nullptr;
  args.scale = w.token_scale;
  args.rows = moe.num_tokens;
  args.depth = static_cast<int32_t>(moe.hidden_size);
  return args;
}

// Up to this many pairs per expert, weights are evicted from L2 first, so that h and y stay: 1 to 2 % faster. With more
// pairs the weights are read again soon, and it costs up to 7 %.
constexpr int64_t kPairsForEvictFirst = 16;

// What the scales of 256 rows take: exponents, or INT4's scales and zero points.
inline int64_t tile_scale_bytes(const Problem& problem, bool down) {
  const int64_t depth = down ? problem.moe.intermediate_size : problem.moe.hidden_size;
  if (!is_int4(problem)) return 2 * kBoxRows * (depth / kScaleGroup);
  const Int4Factors of = down ? w2_factors(problem.int4) : w13_factors(problem.int4);
  return 2 * kBoxRows * (depth >> of.shift) * (of.zero != nullptr ? 3 : 2);
}
inline void take_scale_buffers(GemmArgs& args, const Problem& problem, const GroupedLaunch& launch, bool down) {
  if (launch.scale_bytes == 0) return;
  args.scale_buffer_bytes = static_cast<int32_t>(tile_scale_bytes(problem, down));
  args.scale_buffers = std::min(kMostScaleBuffers, launch.scale_bytes / args.scale_buffer_bytes);
}

// Whether most experts have one token tile.
inline bool reads_weights_once(const FusedExpertsArgs& moe) {
  return moe.num_tokens * moe.top_k <= kPairsForEvictFirst * moe.num_local_experts;
}

inline GemmArgs up_arguments(const Problem& problem, const GroupedWorkspace& w, const GroupedLaunch& launch) {
  const FusedExpertsArgs& moe = problem.moe;
  const bool prepared = launch.mode != GemmMode::kBf16;
  GemmArgs args{};
  args.tokens = prepared ? w.tokens : moe.x;
  const bool four_bits = has_four_bits(launch.mode);
  args.token_stride = four_bits ? mxfp4_row(moe.hidden_size) : prepared ? moe.hidden_size : moe.x_stride;
  args.token_scale = w.token_scale;
  args.sorted_token = w.sorted_token;
  args.tiles = w.tiles;
  args.num_tiles = w.num_tiles;
  args.tile_counter = w.tile_counters;
  args.out = w.h;
  args.out_stride = four_bits ? mxfp4_row(moe.intermediate_size) : moe.intermediate_size;
  args.out_quantized = w.h_quantized;
  args.out_scale = w.h_scale;
  args.weight_scale = moe.w13_scale;
  args.exponents = moe.w13_exponents;
  args.bias = moe.w13_bias;
  args.depth = static_cast<int32_t>(moe.hidden_size);
  args.rows = static_cast<int32_t>(moe.intermediate_size);
  args.weight_rows = 2 * args.rows;
  args.scale_kind = moe.scale_kind;
  args.activation = moe.activation;
  args.weights_evict_first = reads_weights_once(moe);
  args.paired = launch.cluster_blocks == 2;
  args.num_stages = launch.num_stages;
  if (is_int4(problem)) args.int4 = w13_factors(problem.int4);
  take_scale_buffers(args, problem, launch, false);
  return args;
}

inline GemmArgs down_arguments(const Problem& problem, const GroupedWorkspace& w, const GroupedLaunch& launch) {
  const FusedExpertsArgs& moe = problem.moe;
  GemmArgs args = up_arguments(problem, w, launch);
  args.tokens = w.h;
  if (rounds_tokens(launch.mode)) args.tokens = w.h_quantized;
  args.token_stride = args.out_stride;
  args.token_scale = w.h_scale;
  args.tile_counter = w.tile_counters + 1;
  args.sorted_token = nullptr;
  args.out = w.y;
  args.out_stride = moe.hidden_size;
  args.weight_scale = moe.w2_scale;
  args.exponents = moe.w2_exponents;
  if (is_int4(problem)) args.int4 = w2_factors(problem.int4);
  take_scale_buffers(args, problem, launch, true);
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

// Weights as a tensor map describes them, for boxes of 128 rows x 128 bytes.
struct WeightView {
  const unsigned char* base;
  int32_t element_bytes;
  int64_t sizes[3];
  int64_t strides[3];  // bytes
  int32_t box[3];
  // Whether what misses L2 comes with the 256 bytes around it. A stage has 128 bytes of each of 128 rows, and with four
  // bits that are read once the rest of those lines came too early: MXFP4 took 1.03 to 1.14 times as long at 16 and 64
  // tokens (benchmarks/records/2026-11-27_h100_weight_fetch_trials.json). BF16 and FP8, whose next stage reads the
  // rest, are 1.02 to 1.06 times as fast with it up to 256 tokens
  // (benchmarks/records/2026-11-28_h100_weight_fetch_trials.json).
  bool with_neighbours;
};

// which: 0 gate, 1 up, 2 down. [expert][row][K].
inline WeightView weight_view(const FusedExpertsArgs& moe, int which) {
  const int bits = weight_bits(moe);
  const int32_t bytes = bits == 16 ? 2 : 1;  // of an element of the map: of four bits, two weights
  const bool down = which == 2, alternating = moe.activation == Activation::kSwigluOai;
  const int64_t depth = (down ? moe.intermediate_size : moe.hidden_size) * bits / (8 * bytes);
  const int64_t row = (down ? moe.w2_row_stride : moe.w13_row_stride * (alternating ? 2 : 1)) * bytes;
  const int64_t expert = (down ? moe.w2_expert_stride : moe.w13_expert_stride) * bytes;
  const int64_t up_row = which == 1 ? (alternating ? 1 : moe.intermediate_size) : 0;
  const auto* base = static_cast<const unsigned char*>(down ? moe.w2 : moe.w13) + up_row * moe.w13_row_stride * bytes;
  return {base,
          bytes,
          {depth, down ? moe.hidden_size : moe.intermediate_size, moe.num_local_experts},
          {bytes, row, expert},
          {128 / bytes, kBoxRows, 1},
          bits != 4 || !reads_weights_once(moe)};
}

}  // namespace moeopt
