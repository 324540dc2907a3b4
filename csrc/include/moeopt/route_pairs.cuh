// From top-k ids to work for the grouped GEMMs: pairs sorted by expert, stable, and a table of token tiles.
//
//   pairs [T k] ──blocks of 1024──► rank of a pair among its expert's in the block, histogram of the block
//                 last block to arrive ──► prefix over blocks, offsets per expert, tile table
//   second launch (or the only block itself): position = offset[e] + prefix[block][e] + rank
//                 ──► sorted_pair[position] = pair, pair_position[pair] = position
//
// Stable and without floating point: the same ids give the same order on every run.
//
// State: compiled and run in emulation on a CPU; not yet run on a GPU.
#pragma once

#include "moeopt/decode_routing.cuh"
#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kRouteThreads = 256;
constexpr int kRoutePairs = 1024;  // per block

// Tokens of one expert that one tile of a grouped GEMM takes: positions [begin, begin + count).
struct alignas(16) TokenTile {
  int expert, begin, count, unused;
};

struct RouteArgs {
  FusedExpertsArgs moe;
  int* block_counts;    // [blocks][E]; becomes the prefix over blocks
  int* pair_rank;       // [T k] rank within block and expert
  int* expert_offsets;  // [E + 1]
  int* sorted_pair;     // [T k]
  int* pair_position;   // [T k], -1: skipped
  TokenTile* tiles;     // [T k / tile_tokens + E] at most
  int* num_tiles;       // [1]
  int* block_arrivals;  // [1]; zero between launches
  int32_t tile_tokens;
};

MOEOPT_DEVICE int* block_count(const RouteArgs& args, int block, int expert) {
  return args.block_counts + block * args.moe.num_local_experts + expert;
}

MOEOPT_DEVICE int expert_of_pair(const FusedExpertsArgs& moe, int64_t pair) {
  return local_expert(moe, topk_id(moe, pair));
}

// Histogram and ranks of this block's pairs. Shared: counts[E], then 256 ids.
MOEOPT_DEVICE void count_block(const RouteArgs& args, int* counts, int* ids) {
  const int num_experts = static_cast<int>(args.moe.num_local_experts);
  const int num_pairs = static_cast<int>(args.moe.num_tokens * args.moe.top_k);
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) counts[e] = 0;
  sync_block();
  for (int first = block_index() * kRoutePairs; first < (block_index() + 1) * kRoutePairs && first < num_pairs;
       first += kRouteThreads) {
    const int pair = first + thread_index();
    const int expert = pair < num_pairs ? expert_of_pair(args.moe, pair) : -1;
    ids[thread_index()] = expert;
    sync_block();
    int rank = 0;
    for (int q = 0; q < thread_index(); ++q) rank += ids[q] == expert;
    if (expert >= 0) args.pair_rank[pair] = counts[expert] + rank;
    sync_block();
    if (expert >= 0) atomic_add_shared(counts + expert, 1);
    sync_block();
  }
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) {
    *block_count(args, block_index(), e) = counts[e];
  }
}

// Exclusive sums of `values` [n] in place, total returned to every thread. `partial`: kRouteThreads ints.
MOEOPT_DEVICE int exclusive_sums(int* values, int n, int* partial) {
  const int per_thread = ceil_div(n, kRouteThreads), begin = thread_index() * per_thread;
  int sum = 0;
  for (int i = begin; i < begin + per_thread && i < n; ++i) sum += values[i];
  partial[thread_index()] = sum;
  sync_block();
  int before = 0, total = 0;
  for (int t = 0; t < kRouteThreads; ++t) {
    before += t < thread_index() ? partial[t] : 0;
    total += partial[t];
  }
  for (int i = begin; i < begin + per_thread && i < n; ++i) {
    const int value = values[i];
    values[i] = before;
    before += value;
  }
  sync_block();
  return total;
}

// By the last block: prefix over blocks, offsets, tile table. Shared: totals[E], tile_base[E], 256 partial sums.
MOEOPT_DEVICE void finish_counts(const RouteArgs& args, int* totals, int* tile_base, int* partial) {
  const int num_experts = static_cast<int>(args.moe.num_local_experts);
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) {
    int before = 0;
    // 16 loads at a time: one after the other, each would wait for L2.
    for (int first = 0; first < grid_blocks(); first += 16) {
      int value[16];
      MOEOPT_UNROLL
      for (int i = 0; i < 16; ++i) {
        value[i] = first + i < grid_blocks() ? load_shared_across_blocks(block_count(args, first + i, e)) : 0;
      }
      MOEOPT_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (first + i < grid_blocks()) *block_count(args, first + i, e) = before;
        before += value[i];
      }
    }
    totals[e] = before;
    tile_base[e] = ceil_div(before, args.tile_tokens);
  }
  sync_block();
  const int num_tiles = exclusive_sums(tile_base, num_experts, partial);
  const int num_active = exclusive_sums(totals, num_experts, partial);  // totals: now the offsets
  for (int e = thread_index(); e < num_experts; e += kRouteThreads) {
    const int begin = totals[e], end = e + 1 < num_experts ? totals[e + 1] : num_active;
    args.expert_offsets[e] = begin;
    for (int i = 0; begin + i * args.tile_tokens < end; ++i) {
      const int first = begin + i * args.tile_tokens, left = end - first;
      args.tiles[tile_base[e] + i] = {e, first, left < args.tile_tokens ? left : args.tile_tokens, 0};
    }
  }
  if (thread_index() == 0) {
    args.expert_offsets[num_experts] = num_active;
    *args.num_tiles = num_tiles;
    *args.block_arrivals = 0;
  }
}

// Positions of this block's pairs.
MOEOPT_DEVICE void place_pairs(const RouteArgs& args) {
  const int num_pairs = static_cast<int>(args.moe.num_tokens * args.moe.top_k);
  const int first = block_index() * kRoutePairs;
  for (int pair = first + thread_index(); pair < first + kRoutePairs && pair < num_pairs; pair += kRouteThreads) {
    const int expert = expert_of_pair(args.moe, pair);
    int position = -1;
    if (expert >= 0) {
      position = args.expert_offsets[expert] + *block_count(args, block_index(), expert) + args.pair_rank[pair];
      args.sorted_pair[position] = pair;
    }
    args.pair_position[pair] = position;
  }
}

// Dynamic shared memory: (2 E + 256 + 1) ints and the alignment.
MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kRouteThreads, 1) count_pairs_kernel(const MOEOPT_GRID_CONSTANT RouteArgs args) {
  MOEOPT_SHARED_BASE(shared);
  const int num_experts = static_cast<int>(args.moe.num_local_experts);
  int* counts = reinterpret_cast<int*>(shared);
  int* tile_base = counts + num_experts;
  int* partial = tile_base + num_experts;
  int* is_last = partial + kRouteThreads;
  count_block(args, counts, partial);
  sync_block();
  if (thread_index() == 0) {
    fence_gpu();
    *is_last = atomic_add_global(args.block_arrivals, 1) == grid_blocks() - 1;
    fence_gpu();
  }
  sync_block();
  if (*is_last == 0) return;
  finish_counts(args, counts, tile_base, partial);
  if (grid_blocks() == 1) {  // nothing to wait for: the second launch is left out
    sync_block();
    place_pairs(args);
  }
}

MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(kRouteThreads, 1) place_pairs_kernel(const MOEOPT_GRID_CONSTANT RouteArgs args) {
  place_pairs(args);
}

}  // namespace moeopt
