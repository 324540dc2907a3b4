// Routing of the grouped kernels: from top-k ids to pairs sorted by expert (stable) and a table of token tiles.
//
//   pairs [T k] ──blocks of 1024, 128 per warp──► match.any finds the lanes with the same expert: rank of a pair in its
//                 warp, counts per warp and expert ──prefix over warps──► rank in the block, histogram of the block
//                 last block to arrive ──► prefix over blocks, expert offsets, tile table
//                 further blocks of the launch prepare the tokens for FP8 or MXFP4 (prepare_tokens.cuh)
//   second launch (or the only block itself): position = offset[e] + prefix[block][e] + rank
//                 ──► sorted_token[position] = pair / k, pair_position[pair] = position
//
// The same ids give the same order on every run.
#pragma once

#include "moeopt/block_sum.cuh"
#include "moeopt/device.cuh"
#include "moeopt/expert_ids.cuh"
#include "moeopt/fused_experts.h"
#include "moeopt/prepare_tokens.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kRouteThreads = kPrepareThreads;
constexpr int kRoutePairs = 1024;  // per block
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr int kEvenFromTokens = 128;                       // tiles at least this wide share an expert's tokens evenly
constexpr int kRouteRounds = kRoutePairs / kRouteThreads;  // pairs per thread

// Positions [begin, begin + count) of one expert; count is 0 for the second of a pair of tiles that share a single
// token. `row_tiles_done`: row tiles of the up launch whose h is stored; the routing sets it to 0.
struct alignas(16) TokenTile {
  int expert, begin, count, row_tiles_done;
};

struct RouteArgs {
  FusedExpertsArgs moe;
  int* block_counts;    // [blocks][E]; becomes the prefix over blocks
  int* pair_rank;       // [T k] rank within block and expert
  int* expert_offsets;  // [E + 1]
  int* sorted_token;    // [T k]
  int* pair_position;   // [T k], -1: skipped
  TokenTile* tiles;     // [T k / tile_tokens + E] at most
  int* num_tiles;       // [1]
  int* tile_counters;   // [2] of the up and the down GEMM; becomes zero
  int* block_arrivals;  // [1]; zero between launches
  int32_t tile_tokens;
  int32_t num_blocks;      // blocks that count pairs
  int32_t tiles_together;  // 1, or 2: an expert's tiles come in pairs that share its tokens evenly
};

MOEOPT_DEVICE int* block_count(const RouteArgs& args, int block, int expert) {
  return args.block_counts + block * args.moe.num_local_experts + expert;
}

// The pairs of a thread: round i of warp w has pairs 128 w + 32 i + lane of the block.
struct RoutedPairs {
  int expert[kRouteRounds];  // -1: skipped, or no such pair
  int rank[kRouteRounds];    // among the pairs of the expert in this block

  MOEOPT_DEVICE static int pair(int round) {
    return block_index() * kRoutePairs + (thread_index() / 32 * kRouteRounds + round) * 32 + thread_index() % 32;
  }
};

// Shared: counts[E], then warp_counts[kRouteWarps][E].
MOEOPT_DEVICE RoutedPairs count_block(const RouteArgs& args, int* counts, uint16_t* warp_counts) {
  const int num_experts = static_cast<int>(args.moe.num_local_experts), lane = thread_index() % 32;
  const int num_pairs = static_cast<int>(args.moe.num_tokens * args.moe.top_k);
  RoutedPairs mine;
  experts_of_pairs(args.moe, RoutedPairs::pair(0), 32, num_pairs, mine.expert);
  for (int i = thread_index(); i < kRouteWarps * num_experts; i += kRouteThreads) warp_counts[i] = 0;
  bar_sync();
  uint16_t* of_warp = warp_counts + thread_index() / 32 * num_experts;
  MOEOPT_UNROLL
  for (int i = 0; i < kRouteRounds; ++i) {
    const int expert = mine.expert[i];
    const uint32_t same = match_any(expert);
    const int before = popc(same & ((1u << lane) - 1u));
    mine.rank[i] = expert < 0 ? 0 : of_warp[expert] + before;
    bar_warp_sync();
    if (expert >= 0 && before == 0) of_warp[expert] = static_cast<uint16_t>(of_warp[expert] + popc(same));
    bar_warp_sync();
  }
  bar_sync();
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) {
    int sum = 0;
    MOEOPT_UNROLL
    for (int w = 0; w < kRouteWarps; ++w) {
      const int count = warp_counts[w * num_experts + e];
      warp_counts[w * num_experts + e] = static_cast<uint16_t>(sum);
      sum += count;
    }
    counts[e] = sum;
  }
  bar_sync();
  MOEOPT_UNROLL
  for (int i = 0; i < kRouteRounds; ++i) {
    if (mine.expert[i] >= 0) mine.rank[i] += of_warp[mine.expert[i]];
  }
  return mine;
}

// Turns the blocks' histograms into prefixes over blocks; `totals`: the sums.
MOEOPT_DEVICE void add_blocks(const RouteArgs& args, int* totals) {
  const int num_experts = static_cast<int>(args.moe.num_local_experts);
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) {
    int before = 0;
    // 16 loads at a time, so that their L2 latencies overlap.
    for (int first = 0; first < args.num_blocks; first += 16) {
      int value[16];
      MOEOPT_UNROLL
      for (int i = 0; i < 16; ++i) {
        value[i] = first + i < args.num_blocks ? ld_global_cg(block_count(args, first + i, e)) : 0;
      }
      MOEOPT_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (first + i < args.num_blocks) *block_count(args, first + i, e) = before;
        before += value[i];
      }
    }
    totals[e] = before;
  }
  bar_sync();
}

// Tiles of an expert with `count` pairs.
MOEOPT_DEVICE int tiles_of(const RouteArgs& args, int count) {
  return ceil_div(count, args.tile_tokens * args.tiles_together) * args.tiles_together;
}

// Narrow tiles are filled, the last one takes the rest. Wide tiles share an expert's tokens evenly, in steps of 16
// columns, the unit they can leave out: two of 80 take less time than one of 144 and one of 16.
MOEOPT_DEVICE int tokens_per_tile(const RouteArgs& args, int count, int tiles) {
  if (tiles == 0 || (args.tiles_together == 1 && args.tile_tokens < kEvenFromTokens)) return args.tile_tokens;
  const int share = ceil_div(count, tiles);
  return args.tiles_together == 1 ? ceil_div(share, 16) * 16 : share;
}

// Offsets per expert and the tile table, by one block. `totals` [E]: pairs per expert; becomes the offsets.
MOEOPT_DEVICE void write_tiles(const RouteArgs& args, int* totals, int* warp_sums) {
  const int num_experts = static_cast<int>(args.moe.num_local_experts);
  const int per_thread = ceil_div(num_experts, kRouteThreads), begin = thread_index() * per_thread;
  const int end = begin + per_thread < num_experts ? begin + per_thread : num_experts;
  int pairs = 0, tiles = 0, num_active = 0, num_tiles = 0;
  for (int e = begin; e < end; ++e) {
    pairs += totals[e];
    tiles += tiles_of(args, totals[e]);
  }
  int position = exclusive_sum<kRouteWarps>(pairs, warp_sums, num_active);
  bar_sync();
  int tile = exclusive_sum<kRouteWarps>(tiles, warp_sums, num_tiles);
  for (int e = begin; e < end; ++e) {
    const int count = totals[e];
    totals[e] = position;
    args.expert_offsets[e] = position;
    const int of_expert = tiles_of(args, count), share = tokens_per_tile(args, count, of_expert);
    for (int i = 0; i < of_expert; ++i) {
      const int first = i * share, left = count - first;
      args.tiles[tile++] = {e, position + first, left < 0 ? 0 : left < share ? left : share, 0};
    }
    position += count;
  }
  if (thread_index() == 0) {
    args.expert_offsets[num_experts] = num_active;
    *args.num_tiles = num_tiles;
    args.tile_counters[0] = args.tile_counters[1] = 0;
    *args.block_arrivals = 0;
  }
}

MOEOPT_DEVICE void place_pair(const RouteArgs& args, int pair, int position) {
  if (position >= 0) args.sorted_token[position] = pair / static_cast<int>(args.moe.top_k);
  args.pair_position[pair] = position;
}

// Shared memory of the first launch: is_last and warp sums, counts[E], warp_counts[kRouteWarps][E].
struct RouteShared {
  int is_last;
  int warp_sums[kRouteWarps];
};

MOEOPT_DEVICE void count_pairs(const RouteArgs& args, unsigned char* shared) {
  const int num_experts = static_cast<int>(args.moe.num_local_experts);
  const int num_pairs = static_cast<int>(args.moe.num_tokens * args.moe.top_k);
  RouteShared& own = *reinterpret_cast<RouteShared*>(shared);
  int* counts = reinterpret_cast<int*>(shared + sizeof(RouteShared));
  const RoutedPairs mine = count_block(args, counts, reinterpret_cast<uint16_t*>(counts + num_experts));
  if (args.num_blocks == 1) {  // nothing to wait for: the second launch is left out
    write_tiles(args, counts, own.warp_sums);
    bar_sync();
    MOEOPT_UNROLL
    for (int i = 0; i < kRouteRounds; ++i) {
      const int pair = RoutedPairs::pair(i), expert = mine.expert[i];
      if (pair < num_pairs) place_pair(args, pair, expert < 0 ? -1 : counts[expert] + mine.rank[i]);
    }
    return;
  }
  MOEOPT_UNROLL
  for (int i = 0; i < kRouteRounds; ++i) {
    if (mine.expert[i] >= 0) args.pair_rank[RoutedPairs::pair(i)] = mine.rank[i];
  }
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) *block_count(args, block_index(), e) = counts[e];
  bar_sync();
  if (thread_index() == 0) {
    fence_acq_rel_gpu();
    own.is_last = atom_add_global(args.block_arrivals, 1) == args.num_blocks - 1;
    fence_acq_rel_gpu();
  }
  bar_sync();
  if (own.is_last == 0) return;
  add_blocks(args, counts);
  write_tiles(args, counts, own.warp_sums);
}

// The first launch: blocks from args.num_blocks on prepare tokens, if there are any.
template <bool kMxfp4, bool kRounds>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kRouteThreads, 1)
    count_pairs_kernel(const MOEOPT_GRID_CONSTANT RouteArgs args, const MOEOPT_GRID_CONSTANT PrepareArgs prepare) {
  MOEOPT_SHARED_BASE(shared);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (block_index() < args.num_blocks) {
    count_pairs(args, shared);
  } else {
    prepare_tokens<kMxfp4, kRounds>(prepare, block_index() - args.num_blocks, grid_blocks() - args.num_blocks);
  }
}

MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kRouteThreads, 1) place_pairs_kernel(const MOEOPT_GRID_CONSTANT RouteArgs args) {
  const int num_pairs = static_cast<int>(args.moe.num_tokens * args.moe.top_k);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  int experts[kRouteRounds], offset[kRouteRounds], before[kRouteRounds], rank[kRouteRounds];
  experts_of_pairs(args.moe, RoutedPairs::pair(0), 32, num_pairs, experts);
  MOEOPT_UNROLL
  for (int i = 0; i < kRouteRounds; ++i) {  // no conditions, as in experts_of_pairs; skipped pairs are not used
    const int expert = experts[i] < 0 ? 0 : experts[i], pair = experts[i] < 0 ? 0 : RoutedPairs::pair(i);
    offset[i] = ld_global_cg(args.expert_offsets + expert);
    before[i] = ld_global_cg(block_count(args, block_index(), expert));
    rank[i] = ld_global_cg(args.pair_rank + pair);
  }
  MOEOPT_UNROLL
  for (int i = 0; i < kRouteRounds; ++i) {
    const int pair = RoutedPairs::pair(i);
    if (pair < num_pairs) place_pair(args, pair, experts[i] < 0 ? -1 : offset[i] + before[i] + rank[i]);
  }
}

}  // namespace moeopt
