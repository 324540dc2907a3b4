// Chooses grid, stages and shared memory of a call's launches, and lays out its workspace. Plain arithmetic, which runs
// without a GPU. What the hardware or the kernels' barriers forbid throws std::invalid_argument with the numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "launch/arguments.h"

namespace moeopt {

// Dynamic shared memory that one block may ask for (CUDA C++ Programming Guide, compute capability 9.0).
constexpr int kSharedLimit = 227 * 1024;
// Shared memory lost when its base is rounded up to 1024 bytes.
constexpr int kAlignmentSlack = 1024;

[[noreturn]] inline void refuse(const char* what, int64_t got, const std::string& expected) {
  throw std::invalid_argument(std::string(what) + ": got " + std::to_string(got) + ", expected " + expected);
}
inline void expect_at_most(const char* what, int64_t got, int64_t most) {
  if (got > most) refuse(what, got, "at most " + std::to_string(most));
}
inline void expect_at_least(const char* what, int64_t got, int64_t least) {
  if (got < least) refuse(what, got, "at least " + std::to_string(least));
}

inline void expect_multiple(const char* what, int64_t got, int64_t divisor) {
  if (got % divisor) refuse(what, got, "a multiple of " + std::to_string(divisor));
}

inline void check_sizes(const Problem& problem) {
  const FusedExpertsArgs& moe = problem.moe;
  const int64_t multiple = moe.scale_kind == ScaleKind::kGroup32 ? kScaleGroup : kSizeMultiple;
  if (is_int4(problem)) {
    for (const int64_t group : {problem.int4.w13_group, problem.int4.w2_group}) {
      if (group != 1 << int4_shift(group)) refuse("INT4: weights that share a scale", group, "32, 64 or 128");
    }
  }
  expect_multiple("H", moe.hidden_size, is_int4(problem) ? problem.int4.w13_group : multiple);
  expect_multiple("I", moe.intermediate_size, is_int4(problem) ? problem.int4.w2_group : multiple);
  expect_at_most("E", moe.num_local_experts, kMaxExperts);
}
inline int64_t num_pairs(const FusedExpertsArgs& moe) { return moe.num_tokens * moe.top_k; }
inline int64_t ceil_div64(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Hands out parts of a buffer one after the other, aligned to 256 bytes; null for a part without elements.
class Arena {
 public:
  explicit Arena(uintptr_t buffer) : begin_(buffer), next_(buffer) {}
  template <typename T>
  T* take(int64_t count) {
    T* const part = count > 0 ? reinterpret_cast<T*>(next_) : nullptr;
    next_ += ceil_div64(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
    return part;
  }
  int64_t bytes() const { return static_cast<int64_t>(next_ - begin_); }

 private:
  uintptr_t begin_, next_;
};

// --- direct --------------------------------------------------------------------------------------------------

static_assert(kDirectScratchOffset +
                      std::max<int>(kDirectDownSumBytesPerToken * kDirectTokens, kDirectScratchPerExpert* kMaxExperts) +
                      kAlignmentSlack <=
                  kSharedLimit,
              "more shared memory than a block may have");

// Whether `tiles` fill the rounds of few blocks better, where many have less than two rounds of them. In more rounds
// the blocks drift apart, and many keep the memory busier.
inline bool divides_better(int64_t tiles, int64_t few_blocks, int64_t many_blocks) {
  const int64_t of_few = ceil_div64(tiles, few_blocks) * few_blocks,
                of_many = ceil_div64(tiles, many_blocks) * many_blocks;
  return tiles < 2 * many_blocks && of_few < of_many;
}

inline DirectLaunch direct_launch(const Problem& problem, int multiprocessors) {
  check_sizes(problem);
  const FusedExpertsArgs& moe = problem.moe;
  expect_at_most("direct_experts: T", moe.num_tokens, kDirectTokens);
  expect_at_most("direct_experts: T x k", num_pairs(moe), kDirectPairs);
  const bool bf16 = weight_bits(moe) == 16;  // kernels of fewer bits have one shape
  static_assert(kDirectUpRows<4> == kDirectUpRows<8> &&
                kDirectUpBlocks<4, kDirectNarrow> == kDirectUpBlocks<8, kDirectNarrow>);
  const int64_t tiles = num_pairs(moe) * (moe.intermediate_size / (bf16 ? kDirectUpRows<16> : kDirectUpRows<8>));
  const int wide = multiprocessors * kDirectUpBlocks<16, kDirectWide>;
  const int narrow = multiprocessors * (bf16 ? kDirectUpBlocks<16, kDirectNarrow> : kDirectUpBlocks<8, kDirectNarrow>);
  const auto shared = [&](int64_t sum_bytes) {
    const int64_t scratch = std::max(sum_bytes, kDirectScratchPerExpert * moe.num_local_experts);
    return static_cast<int32_t>(kDirectScratchOffset + scratch + kAlignmentSlack);
  };
  DirectLaunch launch{};
  launch.up_wide = bf16 && divides_better(tiles, wide, narrow);
  launch.up_grid = static_cast<int32_t>(std::min<int64_t>(launch.up_wide ? wide : narrow, tiles));
  launch.up_shared_bytes = shared(kDirectUpSumBytes);
  launch.down_grid = static_cast<int32_t>(std::min<int64_t>(multiprocessors, moe.hidden_size / kDirectRows));
  launch.down_shared_bytes = shared(kDirectDownSumBytesPerToken * moe.num_tokens);
  return launch;
}

inline DirectWorkspace direct_workspace(const Problem& problem, Arena& arena) {
  const int64_t pairs = num_pairs(problem.moe), routed = problem.router.logits == nullptr ? 0 : pairs;
  DirectWorkspace w{};
  w.h = arena.take<uint16_t>(pairs * problem.moe.intermediate_size);
  w.topk_ids = arena.take<int>(routed);
  w.topk_weights = arena.take<float>(routed);
  return w;
}

// --- grouped -------------------------------------------------------------------------------------------------

constexpr int64_t kRouteSharedPerExpert = 4 + 2 * kRouteWarps;  // a count, and one per warp
static_assert(kRouteSharedPerExpert * kMaxExperts + static_cast<int64_t>(sizeof(RouteShared)) + kAlignmentSlack <=
                  kSharedLimit,
              "more shared memory than a block may have");

// A buffer of scales beside the ring for the launch that needs more, or 0 where a bulk copy cannot bring them: it
// takes whole 16 bytes. Parts of tensors begin at whole 32 rows, so what their first byte is decides.
inline int64_t most_scale_bytes(const Problem& problem) {
  const Int4Args& int4 = problem.int4;
  uintptr_t addresses = 0;
  if (is_int4(problem)) {
    for (const uint16_t* scale : {int4.w13_scale, int4.w2_scale}) addresses |= reinterpret_cast<uintptr_t>(scale);
    for (const uint8_t* zero : {int4.w13_zero, int4.w2_zero}) addresses |= reinterpret_cast<uintptr_t>(zero);
  } else {
    const FusedExpertsArgs& moe = problem.moe;
    for (const uint8_t* each : {moe.w13_exponents, moe.w2_exponents}) addresses |= reinterpret_cast<uintptr_t>(each);
  }
  return addresses % 16 ? 0 : std::max(tile_scale_bytes(problem, false), tile_scale_bytes(problem, true));
}

// With scales beside it, a ring of so many stages is as fast as a longer one.
constexpr int kStagesBesideScales = 3;

// Stages and shared memory of the GEMMs' ring. scale_bytes: of a buffer beside it; two of them if that leaves enough of
// the ring, else one of INT4, whose copies stage by stage cost most, else none.
template <GemmMode kMode>
void choose_ring(int32_t wanted_stages, int64_t scale_bytes, GroupedLaunch& launch) {
  with_tile(CompiledTiles<kMode>(), launch, [&](auto tile) {
    using Shape = GemmShape<kMode, decltype(tile)::value>;
    constexpr int kBarriers = 2 * static_cast<int>(sizeof(uint64_t));  // per stage
    constexpr int kFixed = 2 * Shape::kStagingBytes + kQueueBytes + kAlignmentSlack;
    const auto stages_of = [&](int64_t fixed, int stage) {
      return static_cast<int32_t>(std::clamp<int64_t>((kSharedLimit - fixed) / stage, 0, 8));
    };
    int fixed = kFixed, per_stage = Shape::kStageBytes + kBarriers;
    if constexpr (Shape::kTileScales) {
      constexpr int kFewestBuffers = Shape::kInt4 ? 1 : 2;
      const int32_t least =
          wanted_stages > 0 ? wanted_stages : std::min(kStagesBesideScales, stages_of(fixed, per_stage));
      for (int buffers = scale_bytes > 0 ? 2 : 0; buffers >= kFewestBuffers; --buffers) {
        const int64_t with_scales = kFixed + kScaleBarrierBytes + buffers * scale_bytes;
        if (stages_of(with_scales, Shape::kStageBytesBeside + kBarriers) < least) continue;
        launch.scale_bytes = static_cast<int32_t>(buffers * scale_bytes);
        fixed = static_cast<int>(with_scales);
        per_stage = Shape::kStageBytesBeside + kBarriers;
        break;
      }
    }
    launch.num_stages = wanted_stages > 0 ? wanted_stages : stages_of(fixed, per_stage);
    launch.shared_bytes = fixed + launch.num_stages * per_stage;
  });
  // The math warps' release trails: BF16 releases stage s once s + 1 is issued, FP8 once s + 1 is there. Warps that
  // keep s until they have s + 1 need that one filled meanwhile, or both sides wait for ever.
  constexpr bool kReleasesAtOnce = kMode != GemmMode::kBf16 && kMode != GemmMode::kFp8;
  expect_at_least("grouped_gemm: ring stages", launch.num_stages, kReleasesAtOnce ? 1 : 2);
  // A slot is written again without asking: the weights warp may be two work tiles and a ring of stages ahead of the
  // last warp that reads it; in a pair, a ring of either block.
  expect_at_most("grouped_gemm: work tiles queued ahead", launch.cluster_blocks * launch.num_stages + 2, kQueueSlots);
  expect_at_most("grouped_gemm: bytes of shared memory", launch.shared_bytes, kSharedLimit);
}

inline GroupedLaunch grouped_launch(const Problem& problem, const Variant& variant, int multiprocessors) {
  check_sizes(problem);
  const FusedExpertsArgs& moe = problem.moe;
  expect_at_most("grouped_gemm: T x k", num_pairs(moe), std::numeric_limits<int32_t>::max());
  const int bits = variant.mode == GemmMode::kBf16 ? 16 : has_four_bits(variant.mode) ? 4 : 8;
  if (weight_bits(moe) != bits) refuse("grouped_gemm: bits per weight", weight_bits(moe), std::to_string(bits));
  const bool int4 = variant.mode == GemmMode::kInt4Weights;
  if (bits == 4 && int4 != is_int4(problem)) {
    throw std::invalid_argument(std::string("grouped_gemm: 4-bit weights: got ") + (int4 ? "MXFP4" : "INT4") +
                                ", expected " + (int4 ? "INT4" : "MXFP4"));
  }
  GroupedLaunch launch{};
  launch.mode = variant.mode;
  launch.tile_tokens = variant.tile_tokens;
  launch.cluster_blocks = variant.paired ? 2 : 1;
  expect_at_least("grouped_gemm: multiprocessors", multiprocessors, launch.cluster_blocks);
  launch.grid = multiprocessors / launch.cluster_blocks * launch.cluster_blocks;
  const auto choose = launch.mode == GemmMode::kBf16          ? choose_ring<GemmMode::kBf16>
                      : launch.mode == GemmMode::kFp8Weights  ? choose_ring<GemmMode::kFp8Weights>
                      : launch.mode == GemmMode::kFp8         ? choose_ring<GemmMode::kFp8>
                      : launch.mode == GemmMode::kInt4Weights ? choose_ring<GemmMode::kInt4Weights>
                      : launch.mode == GemmMode::kMxfp4       ? choose_ring<GemmMode::kMxfp4>
                                                              : choose_ring<GemmMode::kMxfp4Weights>;
  choose(variant.num_stages, bits == 4 ? most_scale_bytes(problem) : 0, launch);
  launch.route_blocks = static_cast<int32_t>(std::max<int64_t>(1, ceil_div64(num_pairs(moe), kRoutePairs)));
  launch.route_shared_bytes =
      static_cast<int32_t>(kRouteSharedPerExpert * moe.num_local_experts + sizeof(RouteShared) + kAlignmentSlack);
  if (launch.mode != GemmMode::kBf16) {  // a warp per token, or per 128 elements
    const int64_t warps = moe.num_tokens * (rounds_tokens(launch.mode) ? 1 : ceil_div64(moe.hidden_size, 128));
    const int64_t blocks = ceil_div64(warps, kPrepareThreads / 32);
    launch.prepare_blocks = static_cast<int32_t>(std::min<int64_t>(blocks, 16 * multiprocessors));
  }
  return launch;
}

// The token tiles that can arise: all full ones, and of every expert a started one (a started pair).
inline int64_t max_tiles(const FusedExpertsArgs& moe, const GroupedLaunch& launch) {
  const int64_t together = launch.cluster_blocks, pairs = num_pairs(moe);
  return together * (pairs / (launch.tile_tokens * together) + std::min(moe.num_local_experts, pairs));
}

inline GroupedWorkspace grouped_workspace(const Problem& problem, const GroupedLaunch& launch, Arena& arena) {
  const FusedExpertsArgs& moe = problem.moe;
  const int64_t pairs = num_pairs(moe), routed = problem.router.logits == nullptr ? 0 : pairs;
  const bool rounds = rounds_tokens(launch.mode), four_bits = has_four_bits(launch.mode);
  const auto row = [&](int64_t depth) { return four_bits ? mxfp4_row(depth) : depth; };
  const int64_t token_elements = moe.num_tokens * row(moe.hidden_size), h_elements = pairs * row(moe.intermediate_size);
  GroupedWorkspace w{};
  w.block_counts = arena.take<int>(launch.route_blocks * moe.num_local_experts);
  w.pair_rank = arena.take<int>(pairs);
  w.expert_offsets = arena.take<int>(moe.num_local_experts + 1);
  w.sorted_token = arena.take<int>(pairs);
  w.pair_position = arena.take<int>(pairs);
  w.tiles = arena.take<TokenTile>(max_tiles(moe, launch));
  w.num_tiles = arena.take<int>(1);
  w.tile_counters = arena.take<int>(2);
  w.y = arena.take<uint16_t>(pairs * moe.hidden_size);
  w.topk_ids = arena.take<int>(routed);
  w.topk_weights = arena.take<float>(routed);
  if (rounds) {
    w.tokens = arena.take<uint8_t>(token_elements);
    w.token_scale = arena.take<float>(moe.num_tokens);
    w.h_quantized = arena.take<uint8_t>(h_elements);
    w.h_scale = arena.take<float>(pairs * ceil_div64(moe.intermediate_size, 128));
  } else {
    if (launch.mode != GemmMode::kBf16) w.tokens = arena.take<uint16_t>(token_elements);
    w.h = arena.take<uint16_t>(h_elements);
  }
  return w;
}

// --- either --------------------------------------------------------------------------------------------------

// What the variant takes for the problem. `buffer`: the workspace; without one the layout tells its bytes. `counters`:
// one zeroed number.
inline CallLayout lay_out(const Problem& problem, const Variant& variant, int multiprocessors, uintptr_t buffer,
                          int* counters) {
  Arena arena(buffer);
  if (variant.direct) {
    const DirectLaunch launch = direct_launch(problem, multiprocessors);
    const DirectWorkspace workspace = direct_workspace(problem, arena);
    return Layout<DirectLaunch, DirectWorkspace>{launch, workspace, arena.bytes()};
  }
  const GroupedLaunch launch = grouped_launch(problem, variant, multiprocessors);
  GroupedWorkspace workspace = grouped_workspace(problem, launch, arena);
  workspace.block_arrivals = counters;
  return Layout<GroupedLaunch, GroupedWorkspace>{launch, workspace, arena.bytes()};
}

}  // namespace moeopt
