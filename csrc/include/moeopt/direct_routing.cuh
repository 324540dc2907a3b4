// Work list of the kernels without a ring, built by every block for itself: at most 8 tokens, so column = token.
//
//   pairs p = token * k + j  ->  (expert, how often the token named it before)  ->  slots: one per distinct such key,
//   in the order of their first pair, with the pair of each token in it
#pragma once

#include "moeopt/decode_routing.cuh"

namespace moeopt {

constexpr int kDirectTokens = 8;
constexpr int kDirectPairs = kDirectTokens * 32;

// In shared memory.
struct DirectRouting {
  int expert[kDirectPairs];  // local expert of a pair, or -1: skipped
  float weight[kDirectPairs];
  int key[kDirectPairs];
  int leads[kDirectPairs];
  int slot_expert[kDirectPairs];
  int pair[kDirectPairs][kDirectTokens];  // of a slot and token; -1: the token is not there
  int num_slots;
};

// All threads of the block. `scratch`: shared memory, 8 bytes per expert and warp when the router runs.
MOEOPT_DEVICE void build_direct_routing(const FusedExpertsArgs& moe, const RouterArgs& router, DirectRouting& routing,
                                        unsigned char* scratch) {
  const int num_tokens = static_cast<int>(moe.num_tokens), top_k = static_cast<int>(moe.top_k);
  const int num_pairs = num_tokens * top_k, p = thread_index();
  if (p == 0) routing.num_slots = 0;
  if (router.logits != nullptr) {
    const int warps = block_threads() / 32, warp = thread_index() / 32;
    const int num_experts = static_cast<int>(moe.expert_map ? moe.num_global_experts : moe.num_local_experts);
    float* scores = reinterpret_cast<float*>(scratch) + warp * num_experts;
    uint32_t* keys = reinterpret_cast<uint32_t*>(scratch) + (warps + warp) * num_experts;
    for (int token = warp; token < num_tokens; token += warps) {
      route_token(router, num_experts, top_k, token, scores, keys, thread_index() % 32,
                  routing.expert + token * top_k, routing.weight + token * top_k);
    }
    sync_block();
    if (p < num_pairs) routing.expert[p] = local_expert(moe, routing.expert[p]);
  } else if (p < num_pairs) {
    routing.expert[p] = local_expert(moe, topk_id(moe, p));
    routing.weight[p] = moe.topk_weights[p];
  }
  for (int i = p; i < num_pairs * kDirectTokens; i += block_threads()) (&routing.pair[0][0])[i] = -1;
  sync_block();
  const int token = p / top_k;
  int key = -1;
  if (p < num_pairs) {
    const int expert = routing.expert[p];
    int before = 0;
    for (int q = token * top_k; q < p; ++q) before += routing.expert[q] == expert;
    key = expert < 0 ? -1 : before * 1024 + expert;
    routing.key[p] = key;
  }
  sync_block();
  int first = p;
  if (p < num_pairs) {
    for (int q = num_pairs - 1; q >= 0; --q) {
      if (routing.key[q] == key && q < first) first = q;
    }
    routing.leads[p] = key >= 0 && first == p;
    if (routing.leads[p]) atomic_add_shared(&routing.num_slots, 1);
  }
  sync_block();
  if (p < num_pairs && key >= 0) {
    int slot = 0;
    for (int q = 0; q < num_pairs; ++q) slot += q < first ? routing.leads[q] : 0;
    routing.pair[slot][token] = p;
    if (first == p) routing.slot_expert[slot] = routing.expert[p];
  }
  sync_block();
}

}  // namespace moeopt
