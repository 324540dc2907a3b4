// The gate: router logits of one token to its top-k experts and weights, by one warp.
//
//   logits[E] -> scores (softmax or sigmoid, FP32) -> keys = scores + bias, groups that lost set to the bottom
//             -> k rounds of { warp-wide maximum, lowest index wins a tie, remove } -> weights = scores of the winners
//
// Scores and keys are in shared memory because E is a run-time number; a lane owns experts lane, lane + 32, ...
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/router.h"

namespace moeopt {

// Unsigned key with the order of the floats, NaN above all. 0 is below every float's key and means "taken".
MOEOPT_DEVICE uint32_t ordered_key(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = bits_from_float(value);
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}
MOEOPT_DEVICE float from_ordered_key(uint32_t key) {
  return float_from_bits((key & 0x80000000u) ? (key & 0x7fffffffu) : ~key);
}

MOEOPT_DEVICE float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask >>= 1) value += shfl_bfly(value, mask);  // a fixed tree: same sum every run
  return value;
}

MOEOPT_DEVICE float router_logit(const RouterArgs& router, int64_t index) {
  if (!router.logits_are_bf16) return ld_global_nc(static_cast<const float*>(router.logits) + index);
  return float_from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(router.logits)[index]) << 16);
}

// Lowers the keys of all but the best `topk_groups` groups below every other. A group's score is its best key, or with
// a bias the sum of its two best (the rule of DeepSeek-V3).
MOEOPT_DEVICE void drop_weak_groups(const RouterArgs& router, int num_experts, uint32_t* keys, int lane) {
  const int group_size = num_experts / router.num_groups;
  uint32_t group_key = 0;
  if (lane < router.num_groups) {
    uint32_t best = 0, second = 0;
    for (int i = 0; i < group_size; ++i) {
      const uint32_t key = keys[lane * group_size + i];
      if (key > best) {
        second = best;
        best = key;
      } else if (key > second) {
        second = key;
      }
    }
    const bool sum_two = router.bias != nullptr && group_size > 1;
    group_key = sum_two ? ordered_key(from_ordered_key(best) + from_ordered_key(second)) : best;
  }
  bool kept = false;
  for (int round = 0; round < router.topk_groups; ++round) {
    const uint32_t best = redux_max(group_key);
    const uint32_t winner = redux_min(group_key == best ? static_cast<uint32_t>(lane) : 32u);
    if (winner == static_cast<uint32_t>(lane)) {
      kept = true;
      group_key = 0;
    }
  }
  if (lane < router.num_groups && !kept) {
    for (int i = 0; i < group_size; ++i) keys[lane * group_size + i] = 1;
  }
  bar_warp_sync();
}

// Writes the k chosen experts, best first, and their weights. `scores` and `keys` are this warp's scratch, E each.
MOEOPT_DEVICE void route_token(const RouterArgs& router, int num_experts, int top_k, int64_t token, float* scores,
                               uint32_t* keys, int lane, int* expert_ids, float* weights) {
  const int64_t row = token * num_experts;
  float top = -INFINITY;
  for (int e = lane; e < num_experts; e += 32) {
    const float logit = router_logit(router, row + e);
    scores[e] = logit;
    top = logit > top ? logit : top;
  }
  if (router.scoring == Scoring::kSoftmax) {
    top = from_ordered_key(redux_max(ordered_key(top)));
    float sum = 0;
    for (int e = lane; e < num_experts; e += 32) {
      scores[e] = exp_f32(scores[e] - top);
      sum += scores[e];
    }
    const float scale = 1.0f / warp_sum(sum);
    for (int e = lane; e < num_experts; e += 32) scores[e] *= scale;
  } else {
    for (int e = lane; e < num_experts; e += 32) scores[e] = 1.0f / (1.0f + exp_f32(-scores[e]));
  }
  for (int e = lane; e < num_experts; e += 32) {
    keys[e] = ordered_key(router.bias != nullptr ? scores[e] + ld_global_nc(router.bias + e) : scores[e]);
  }
  bar_warp_sync();
  if (router.num_groups > 1) drop_weak_groups(router, num_experts, keys, lane);

  // Each lane keeps its best entry in registers; only the winner has to search again.
  uint32_t best_key = 0, best_expert = 0;
  bool look = true;
  float my_weight = 0;
  for (int round = 0; round < top_k; ++round) {
    if (look) {
      best_key = 0;
      best_expert = static_cast<uint32_t>(lane);
      for (int e = lane; e < num_experts; e += 32) {
        if (keys[e] > best_key) {
          best_key = keys[e];
          best_expert = static_cast<uint32_t>(e);
        }
      }
    }
    const uint32_t top_key = redux_max(best_key);
    const uint32_t winner = redux_min(best_key == top_key ? best_expert : 0xffffffffu);
    look = winner % 32u == static_cast<uint32_t>(lane);
    if (look) keys[winner] = 0;
    if (lane == round) {
      my_weight = scores[winner];
      expert_ids[round] = static_cast<int>(winner);
    }
  }
  // The tiny term keeps 0 / 0 away when every sigmoid underflowed.
  if (router.renormalize) my_weight /= warp_sum(lane < top_k ? my_weight : 0.0f) + 1e-20f;
  if (lane < top_k) weights[lane] = my_weight * router.scaling_factor;
  bar_warp_sync();  // scratch is free for the next token
}

// One warp per token; ids and weights go to global memory. Dynamic shared memory: 8 bytes per expert and warp.
MOEOPT_PLAIN_KERNEL void MOEOPT_BOUNDS(128, 1) route_tokens_kernel(RouterArgs router, int num_tokens, int num_experts,
                                                                   int top_k, int* topk_ids, float* topk_weights) {
  MOEOPT_SHARED_BASE(shared);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int warp = thread_index() / 32;
  float* scores = reinterpret_cast<float*>(shared) + warp * num_experts;
  uint32_t* keys = reinterpret_cast<uint32_t*>(shared) + (block_threads() / 32 + warp) * num_experts;
  const int64_t token = static_cast<int64_t>(block_index()) * (block_threads() / 32) + warp;
  if (token >= num_tokens) return;
  route_token(router, num_experts, top_k, token, scores, keys, thread_index() % 32, topk_ids + token * top_k,
              topk_weights + token * top_k);
}

}  // namespace moeopt
