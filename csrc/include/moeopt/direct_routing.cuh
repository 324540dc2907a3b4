// Work list of the direct kernels, built by every block for itself from the same ids.
//
//   pairs p = token * k + j  ──►  bit `token` in the mask of the expert  ──►  rank = bits below, count = bits
//                prefix sums over experts  ──►  pairs sorted by (expert, token)
//   repeated for pairs whose token named the same expert before, if there are any
//   slots: runs of one expert, at most 8 pairs each. A token is in a slot at most once.
//   At most 32 pairs of at most 8 tokens: one warp does it in registers, one lane per pair.
//
// No loop over all pairs for each pair: no weight is loaded before the list is complete, so its time counts.
#pragma once

#include "moeopt/block_sum.cuh"
#include "moeopt/expert_ids.cuh"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kDirectTokens = 64;  // bits of a mask
constexpr int kDirectPairs = 512;
constexpr int kDirectMaxWarps = 16;
constexpr int kSlotColumns = 8;

// In shared memory.
struct DirectRouting {
  float weight[kDirectPairs];
  int16_t expert[kDirectPairs];  // local expert of a pair, or -1: skipped
  int16_t sorted_pair[kDirectPairs];
  int16_t slot_expert[kDirectPairs];
  int16_t slot_begin[kDirectPairs + 2];  // slot s has sorted pairs [slot_begin[s], slot_begin[s + 1])
  int num_slots;
  int has_repeats, last_repeat;
  int warp_sums[kDirectMaxWarps];
};

// Scratch bytes of build_direct_routing per expert: a mask of 64 bits and a packed prefix sum.
constexpr int kDirectScratchPerExpert = 12;

// Pair in a column of a slot, or -1.
MOEOPT_DEVICE int slot_pair(const DirectRouting& routing, int slot, int column) {
  const int at = routing.slot_begin[slot] + column;
  return at < routing.slot_begin[slot + 1] ? routing.sorted_pair[at] : -1;
}

MOEOPT_DEVICE int repeats_before(const DirectRouting& routing, int pair, int top_k) {
  int before = 0;
  for (int q = pair / top_k * top_k; q < pair; ++q) before += routing.expert[q] == routing.expert[pair];
  return before;
}

// Number of pairs and of slots in one int.
struct PackedSums {
  MOEOPT_DEVICE static int of(uint32_t low, uint32_t high) {
    const int pairs = popc(low) + popc(high);
    return ((pairs + kSlotColumns - 1) / kSlotColumns << 16) | pairs;
  }
  MOEOPT_DEVICE static int pairs(int packed) { return packed & 0xffff; }
  MOEOPT_DEVICE static int slots(int packed) { return packed >> 16; }
};

// Work list of at most 32 pairs of at most 8 tokens, by one warp: one lane per pair, slots in the order of their first
// pairs.
MOEOPT_DEVICE void build_small_routing(const FusedExpertsArgs& moe, DirectRouting& routing) {
  const int lane = thread_index() % 32, num_pairs = static_cast<int>(moe.num_tokens * moe.top_k);
  const int top_k = static_cast<int>(moe.top_k);
  const int expert = lane < num_pairs ? expert_of_pair(moe, lane) : -1;
  if (lane < num_pairs) routing.weight[lane] = ld_global_cg(moe.topk_weights + lane);
  const uint32_t below = (1u << lane) - 1u, of_token = below & ~((1u << (lane / top_k * top_k)) - 1u);
  const int repeat = popc(match_any(expert) & of_token);  // how often the token named the expert before
  const uint32_t group = match_any(expert < 0 ? -1 : expert * 32 + repeat);  // a token is in it once: at most 8
  const bool first = expert >= 0 && (group & below) == 0;
  const int packed = first ? (1 << 16) + popc(group) : 0, sum = warp_inclusive_sum(packed);  // slots, pairs
  if (first) {
    const int slot = (sum >> 16) - 1;
    int at = (sum & 0xffff) - popc(group);
    routing.slot_expert[slot] = static_cast<int16_t>(expert);
    routing.slot_begin[slot] = static_cast<int16_t>(at);
    for (uint32_t rest = group; rest != 0; rest &= rest - 1) {
      routing.sorted_pair[at++] = static_cast<int16_t>(popc((rest & (0u - rest)) - 1u));  // the lowest lane
    }
  }
  if (lane == 31) {
    routing.num_slots = sum >> 16;
    routing.slot_begin[sum >> 16] = static_cast<int16_t>(sum & 0xffff);
  }
}

// All threads of a block of kWarps warps. `scratch`: shared memory, kDirectScratchPerExpert bytes per expert.
template <int kWarps>
MOEOPT_DEVICE void build_direct_routing(const FusedExpertsArgs& moe, DirectRouting& routing, unsigned char* scratch) {
  constexpr int kThreads = kWarps * 32, kRounds = kDirectPairs / kThreads;
  const int num_pairs = static_cast<int>(moe.num_tokens * moe.top_k), top_k = static_cast<int>(moe.top_k);
  const int num_experts = static_cast<int>(moe.num_local_experts), thread = thread_index();
  if (num_pairs <= 32 && moe.num_tokens <= kSlotColumns) {
    if (thread < 32) build_small_routing(moe, routing);
    bar_sync();
    return;
  }
  uint32_t* masks = reinterpret_cast<uint32_t*>(scratch);
  int* starts = reinterpret_cast<int*>(masks + 2 * num_experts);
  int expert[kRounds], before[kRounds];  // of this thread's pairs; before: how often the token named the expert
  MOEOPT_UNROLL
  for (int i = 0; i < kRounds; ++i) {
    const int p = thread + i * kThreads;
    expert[i] = p < num_pairs ? expert_of_pair(moe, p) : -1;
    before[i] = 0;
    if (p < num_pairs) routing.weight[p] = ld_global_cg(moe.topk_weights + p);
  }
  for (int i = thread; i < 2 * num_experts; i += kThreads) masks[i] = 0;
  if (thread == 0) routing.has_repeats = routing.last_repeat = 0;
  bar_sync();
  MOEOPT_UNROLL
  for (int i = 0; i < kRounds; ++i) {
    const int p = thread + i * kThreads, token = p / top_k;
    if (p < num_pairs) routing.expert[p] = static_cast<int16_t>(expert[i]);
    if (expert[i] < 0) continue;
    const uint32_t bit = 1u << (token % 32);
    const bool again = atom_or_shared(masks + 2 * expert[i] + token / 32, bit) & bit;
    if (again) atom_max_shared(&routing.has_repeats, 1);
  }
  bar_sync();
  if (routing.has_repeats) {
    MOEOPT_UNROLL
    for (int i = 0; i < kRounds; ++i) {
      if (expert[i] >= 0) before[i] = repeats_before(routing, thread + i * kThreads, top_k);
      atom_max_shared(&routing.last_repeat, before[i]);
    }
    bar_sync();
  }
  const int last_repeat = routing.last_repeat;
  int done = 0;  // of the repeats before, packed
  for (int repeat = 0;; ++repeat) {
    const int per_thread = ceil_div(num_experts, kThreads), first = thread * per_thread;
    const int end = first + per_thread < num_experts ? first + per_thread : num_experts;
    int mine = 0, total = 0;
    for (int e = first; e < end; ++e) mine += PackedSums::of(masks[2 * e], masks[2 * e + 1]);
    int start = done + exclusive_sum<kWarps>(mine, routing.warp_sums, total);
    for (int e = first; e < end; ++e) {
      const int here = PackedSums::of(masks[2 * e], masks[2 * e + 1]);
      starts[e] = start;
      for (int i = 0; i < PackedSums::slots(here); ++i) {
        routing.slot_expert[PackedSums::slots(start) + i] = static_cast<int16_t>(e);
        routing.slot_begin[PackedSums::slots(start) + i] =
            static_cast<int16_t>(PackedSums::pairs(start) + i * kSlotColumns);
      }
      start += here;
    }
    done += total;
    if (thread == 0) {
      routing.num_slots = PackedSums::slots(done);
      routing.slot_begin[PackedSums::slots(done)] = static_cast<int16_t>(PackedSums::pairs(done));
    }
    bar_sync();
    MOEOPT_UNROLL
    for (int i = 0; i < kRounds; ++i) {
      const int p = thread + i * kThreads, token = p / top_k;
      if (expert[i] < 0 || before[i] != repeat) continue;
      const uint32_t low = masks[2 * expert[i]], high = masks[2 * expert[i] + 1], below = (1u << (token % 32)) - 1u;
      const int rank = token < 32 ? popc(low & below) : popc(low) + popc(high & below);
      routing.sorted_pair[PackedSums::pairs(starts[expert[i]]) + rank] = static_cast<int16_t>(p);
    }
    bar_sync();
    if (repeat == last_repeat) return;
    for (int i = thread; i < 2 * num_experts; i += kThreads) masks[i] = 0;
    bar_sync();
    MOEOPT_UNROLL
    for (int i = 0; i < kRounds; ++i) {
      const int token = (thread + i * kThreads) / top_k;
      if (before[i] == repeat + 1) atom_or_shared(masks + 2 * expert[i] + token / 32, 1u << (token % 32));
    }
    bar_sync();
  }
}

}  // namespace moeopt
