// Work list of the small-batch kernel, built by every block for itself.
//
//   pairs p = token * k + j  ->  expert of p  ->  pairs sorted by (expert, p)  ->  slots: runs of one expert, at most
//   kSlotColumns pairs each
//
// All blocks compute the same list from the same ids, so no block has to wait for another before it can ask for
// weights. Cost: two passes of (pairs^2 / threads) comparisons; independent of the number of experts.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/fused_experts.h"
#include "moeopt/router.cuh"

namespace moeopt {

constexpr int kMaxPairs = 512;  // T * top_k that fits the tables below (mirrored in launch_geometry)

// In shared memory.
struct DecodeRouting {
  int expert[kMaxPairs];         // local expert of a pair, or -1: skipped
  int position[kMaxPairs];       // of a pair in sorted order, or -1
  float weight[kMaxPairs];       // of a pair
  int sorted_pair[kMaxPairs];    // pair at a position
  int slot_begin[kMaxPairs + 1]; // positions [slot_begin[s], slot_begin[s + 1])
  int slot_expert[kMaxPairs];
  int num_slots;
  int num_active;                // pairs that are not skipped
  int is_last;                   // scratch of the arrival counts
};

MOEOPT_DEVICE int local_expert(const FusedExpertsArgs& moe, int64_t id) {
  if (moe.expert_map != nullptr) {
    if (id < 0 || id >= moe.num_global_experts) return -1;
    id = moe.expert_map[id];
  }
  // An id past the end cannot be reported from here; it is skipped like a negative one.
  return id >= 0 && id < moe.num_local_experts ? static_cast<int>(id) : -1;
}

MOEOPT_DEVICE int64_t topk_id(const FusedExpertsArgs& moe, int64_t pair) {
  return moe.ids_are_int64 ? static_cast<const int64_t*>(moe.topk_ids)[pair]
                           : static_cast<const int32_t*>(moe.topk_ids)[pair];
}

// All threads of the block. `scratch`: shared memory, 8 bytes per expert and warp when the router runs, else
// 4 bytes per pair.
template <int kSlotColumns>
MOEOPT_DEVICE void build_decode_routing(const FusedExpertsArgs& moe, const RouterArgs& router, DecodeRouting& routing,
                                        unsigned char* scratch) {
  const int num_pairs = static_cast<int>(moe.num_tokens * moe.top_k);
  const int top_k = static_cast<int>(moe.top_k);
  const int warps = block_threads() / 32, warp = thread_index() / 32;
  if (thread_index() == 0) {
    routing.num_slots = 0;
    routing.num_active = 0;
  }
  if (router.logits != nullptr) {
    const int num_experts = static_cast<int>(moe.expert_map ? moe.num_global_experts : moe.num_local_experts);
    float* scores = reinterpret_cast<float*>(scratch) + warp * num_experts;
    uint32_t* keys = reinterpret_cast<uint32_t*>(scratch) + (warps + warp) * num_experts;
    for (int token = warp; token < moe.num_tokens; token += warps) {
      route_token(router, num_experts, top_k, token, scores, keys, thread_index() % 32,
                  routing.expert + token * top_k, routing.weight + token * top_k);
    }
    sync_block();
    for (int p = thread_index(); p < num_pairs; p += block_threads()) {
      routing.expert[p] = local_expert(moe, routing.expert[p]);
    }
  } else {
    for (int p = thread_index(); p < num_pairs; p += block_threads()) {
      routing.expert[p] = local_expert(moe, topk_id(moe, p));
      routing.weight[p] = moe.topk_weights[p];
    }
  }
  sync_block();

  // Rank of a pair among those of its expert; the first of every kSlotColumns leads a slot.
  int* leads = reinterpret_cast<int*>(scratch);
  for (int p = thread_index(); p < num_pairs; p += block_threads()) {
    const int expert = routing.expert[p];
    int rank = 0, lower = 0;
    for (int q = 0; q < num_pairs; ++q) {
      const int other = routing.expert[q];
      rank += other == expert && q < p;
      lower += other >= 0 && other < expert;
    }
    const bool active = expert >= 0;
    routing.position[p] = active ? lower + rank : -1;
    leads[p] = active && rank % kSlotColumns == 0;
    if (active) {
      routing.sorted_pair[lower + rank] = p;
      atomic_add_shared(&routing.num_active, 1);
      if (leads[p]) atomic_add_shared(&routing.num_slots, 1);
    }
  }
  sync_block();
  for (int p = thread_index(); p < num_pairs; p += block_threads()) {
    if (!leads[p]) continue;
    int slot = 0;
    for (int q = 0; q < num_pairs; ++q) slot += leads[q] && routing.position[q] < routing.position[p];
    routing.slot_begin[slot] = routing.position[p];
    routing.slot_expert[slot] = routing.expert[p];
  }
  if (thread_index() == 0) routing.slot_begin[routing.num_slots] = routing.num_active;
  fence_async_proxy();  // the scratch becomes a target of the copy engine next
  sync_block();
}

}  // namespace moeopt
